// The insides of the fake driver: one device per index, all of it behind one mutex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "pack/cuda/copy_args.hpp"
#include "shim/cuda_driver.hpp"

namespace kvpush {

struct CudaContextObject {
  int device = 0;
  int references = 0;
};
struct CudaFunctionObject {
  std::string name;
  bool packing = false;
  bool bulk = false;
};
struct CudaModuleObject {
  std::map<std::string, CudaFunctionObject> functions;
};

/// Becomes true when the work in question is done.
using Marker = std::shared_ptr<bool>;

struct CudaEventObject {
  CudaContext context = nullptr;
  Marker latest;  ///< of the last record; none before the first
};

/// Work in order. An op returns whether it is done; until then it is tried again.
struct CudaStreamObject {
  CudaContext context = nullptr;
  std::deque<std::function<bool()>> ops;
  std::deque<Marker> holds;
};

namespace fake {

inline constexpr CudaCode kInvalidValue = 1;
inline constexpr CudaCode kNotInitialized = 3;
inline constexpr CudaCode kDeinitialized = 4;
inline constexpr CudaCode kNoDevice = 100;
inline constexpr CudaCode kInvalidDevice = 101;
inline constexpr CudaCode kInvalidImage = 200;
inline constexpr CudaCode kInvalidContext = 201;
inline constexpr CudaCode kInvalidHandle = 400;
inline constexpr CudaCode kNotFound = 500;
inline constexpr CudaCode kContextIsDestroyed = 709;
inline constexpr CudaCode kHostMemoryAlreadyRegistered = 712;
inline constexpr CudaCode kHostMemoryNotRegistered = 713;

inline constexpr int kMaxDevices = 16;

/// Memory that kernels can touch. Addresses are the host's.
struct Memory {
  enum class Kind : std::uint8_t { kDevice, kImported, kHost, kRegistered } kind = Kind::kDevice;
  std::size_t size = 0;
  int device = 0;
  int fd = -1;              ///< kDevice: of its memfd
  std::uint64_t id = 0;     ///< kDevice: never used again by this process
  std::string source{};     ///< kImported: whose
  unsigned references = 1;  ///< kImported
};

struct Fault {
  int nth = 0;
  CudaCode code = 0;
};

struct State {
  std::mutex mutex;
  bool initialized = false;
  std::array<CudaContextObject, kMaxDevices> contexts;
  std::map<std::uintptr_t, Memory> memory;  ///< by its first byte
  std::uint64_t last_id = 0;
  std::map<CudaModule, std::unique_ptr<CudaModuleObject>> modules;
  std::map<CudaEvent, std::unique_ptr<CudaEventObject>> events;
  std::vector<std::unique_ptr<CudaStreamObject>> streams;    ///< in the order of creation
  std::vector<std::unique_ptr<CudaStreamObject>> destroyed;  ///< those that still have work
  std::array<CudaStreamObject, kMaxDevices> default_streams;

  CudaCode broken = kCudaOk;  ///< what everything returns
  std::map<std::string, Fault> faults;
  std::map<std::string, long> counts;
  std::map<int, int> attributes;
};

State& state();
[[noreturn]] void die(const std::string& what);

/// The entry of every function: holds the mutex, counts, and says with what code the call must end.
class Call {
 public:
  enum class Needs : std::uint8_t {
    kNothing,
    kDriver,   ///< cuInit
    kDevice,   ///< and one that is not broken
    kContext,  ///< and a current context
  };
  Call(const char* symbol, Needs needs);

 private:
  std::unique_lock<std::mutex> lock_;

 public:
  const bool refused;   ///< what it needs is not there
  const CudaCode code;  ///< not OK: also a fault that was asked for, or that of a broken device
};

/// The calling thread's current context, or null.
CudaContext current_context();
std::vector<CudaContext>& context_stack();
/// `stream`, or the current context's own for null; null if there is no such.
CudaStreamObject* find_stream(CudaStream stream);
/// At most one op of every stream. With `all`, until nothing moves any more.
void advance(bool all = false);
/// The memory that all `size` bytes at `address` lie in, or null.
const Memory* find_memory(std::uintptr_t address, std::size_t size);
/// Dies unless a kernel may touch it.
void require_memory(const void* address, std::size_t size, const char* what);
/// Checks what the hardware would fault on, then moves the box.
void run_copy(const CudaFunctionObject& function, const CopyArgs& args, unsigned num_blocks,
              unsigned threads_per_block);

}  // namespace fake
}  // namespace kvpush

#define FAKE_CUDA_EXPORT extern "C" __attribute__((visibility("default")))
// Definitions of another type do not compile.
#define FAKE_CUDA_DECLARE(symbol, name, type) FAKE_CUDA_EXPORT std::type_identity_t<type> symbol;
namespace kvpush {
KVPUSH_CUDA_FUNCTIONS(FAKE_CUDA_DECLARE)
}
#undef FAKE_CUDA_DECLARE

// Opens the body of each function that the library exports.
#define FAKE_CUDA_ENTER(symbol, needs)                                          \
  const ::kvpush::fake::Call call(#symbol, ::kvpush::fake::Call::Needs::needs); \
  if (call.code != ::kvpush::kCudaOk) return call.code
// Of those that release something: a fault is returned at the end.
#define FAKE_CUDA_ENTER_RELEASE(symbol, needs)                                  \
  const ::kvpush::fake::Call call(#symbol, ::kvpush::fake::Call::Needs::needs); \
  if (call.refused) return call.code
