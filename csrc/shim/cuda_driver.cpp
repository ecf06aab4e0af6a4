#include "shim/cuda_driver.hpp"

#include <mutex>

#include "shim/dl.hpp"

namespace kvpush {

Status CudaDriver::check(CudaCode code, const char* call) const {
  if (code == kCudaOk) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(code, &name) != kCudaOk || name == nullptr) name = "unknown error";
  if (get_error_string(code, &text) != kCudaOk || text == nullptr) text = "no text";
  return {code == kCudaOutOfMemory ? Code::kExhausted : Code::kTransport,
          std::string(call) + ": " + name + " (" + std::to_string(code) + "): " + text};
}

bool ends_context(CudaCode code) {
  switch (code) {
    case 4:    // DEINITIALIZED
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 810:  // MPS_CLIENT_TERMINATED
    case 911:  // EXTERNAL_DEVICE
      return true;
    default: return false;
  }
}

Result<std::shared_ptr<const CudaDriver>> load_cuda_driver(const std::string& path) {
  // The loader serialises this too, but a thread sanitizer does not see its lock.
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  auto library = DynamicLibrary::open(path, DynamicLibrary::Lifetime::kProcess);
  if (!library.ok()) return Status(Code::kUnsupported, "no CUDA driver: " + library.status().message());

  auto driver = std::make_shared<CudaDriver>();
#define KVPUSH_CUDA_LOOKUP(symbol, name, type) KVPUSH_TRY(library.value().lookup(#symbol, &driver->name));
  KVPUSH_CUDA_FUNCTIONS(KVPUSH_CUDA_LOOKUP)
#undef KVPUSH_CUDA_LOOKUP

  if (const Status status = driver->check(driver->init(0), "cuInit"); !status.ok()) {
    return Status(Code::kUnsupported, "the CUDA driver " + path + " does not start: " + status.message());
  }
  return std::shared_ptr<const CudaDriver>(std::move(driver));
}

}  // namespace kvpush
