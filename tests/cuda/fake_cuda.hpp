// What tests may do with libfake_cuda.so beside calling the driver's functions. C names, so that ctypes can
// too.
#pragma once

#include <string>

#include "base/status.hpp"
#include "shim/cuda_driver.hpp"
#include "shim/dl.hpp"

// Environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_UUID (32 hex digits, of device 0; by default every process
// sees the same), FAKE_CUDA_COMPUTE (90). Threads: any.
#pragma GCC visibility push(default)
extern "C" {

/// The nth call of `symbol` from now on (1: the next) returns `code`; nth 0: no more; nth < 0: every call.
/// One that releases something releases it all the same, as the real ones may. Codes of a broken device (719,
/// for example) break it: nothing runs any more and everything returns that code.
void fake_cuda_fail(const char* symbol, int nth, int code);
/// How often `symbol` was called, or the kernel of that name launched, since the last reset; "blocks": of all
/// launches.
long fake_cuda_count(const char* symbol);
/// Memory, streams, events, modules and contexts of this process that are not given back.
long fake_cuda_leaks();
/// Forgets counts, faults and attributes that were set; a broken device is whole again.
void fake_cuda_reset();
/// What cuDeviceGetAttribute says, e.g. 118 (ordering of GPUDirect writes, by default 100), 16 (SMs), 75, 76.
void fake_cuda_set_attribute(int attribute, int value);
/// The nth stream (0: the first) of those that there are, in the order of creation; null if there is none.
kvpush::CudaStream fake_cuda_stream(int nth);
/// Puts work into `stream` that lasts until fake_cuda_release(stream) ends the oldest such one.
void fake_cuda_hold(kvpush::CudaStream stream);
void fake_cuda_release(kvpush::CudaStream stream);

}  // extern "C"
#pragma GCC visibility pop

namespace kvpush {

// symbol, member.
#define KVPUSH_FAKE_CUDA_CONTROLS(X)        \
  X(fake_cuda_fail, fail)                   \
  X(fake_cuda_count, count)                 \
  X(fake_cuda_leaks, leaks)                 \
  X(fake_cuda_reset, reset)                 \
  X(fake_cuda_set_attribute, set_attribute) \
  X(fake_cuda_stream, stream)               \
  X(fake_cuda_hold, hold)                   \
  X(fake_cuda_release, release)

/// The functions above of the library that load_cuda_driver(path) loads too.
struct FakeCuda {
#define KVPUSH_FAKE_CUDA_MEMBER(symbol, name) decltype(&::symbol) name = nullptr;
  KVPUSH_FAKE_CUDA_CONTROLS(KVPUSH_FAKE_CUDA_MEMBER)
#undef KVPUSH_FAKE_CUDA_MEMBER

  static Result<FakeCuda> load(const std::string& path) {
    auto library = DynamicLibrary::open(path, DynamicLibrary::Lifetime::kProcess);
    if (!library.ok()) return library.status();
    FakeCuda fake;
#define KVPUSH_FAKE_CUDA_LOOKUP(symbol, name) KVPUSH_TRY(library.value().lookup(#symbol, &fake.name));
    KVPUSH_FAKE_CUDA_CONTROLS(KVPUSH_FAKE_CUDA_LOOKUP)
#undef KVPUSH_FAKE_CUDA_LOOKUP
    return fake;
  }
};

}  // namespace kvpush
