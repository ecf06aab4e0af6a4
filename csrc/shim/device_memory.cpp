#include "shim/device_memory.hpp"

#include <algorithm>
#include <bit>
#include <mutex>
#include <string>
#include <vector>

namespace kvpush {
namespace {

// Source: CUDA C++ Programming Guide, Interprocess Communication.
constexpr std::size_t kBlockBytes = std::size_t{2} << 20U;
// One call of the driver cannot be interrupted: this much lies between two looks at the clock.
constexpr std::size_t kPinStepBytes = std::size_t{64} << 20U;

std::string name_of(const CudaDevice& device) {
  return "GPU " + std::to_string(device.index()) + " (" + device.name() + ")";
}

CudaPointer pointer_to(const std::byte* data) {
  return reinterpret_cast<CudaPointer>(data);
}

std::byte* bytes_at(CudaPointer pointer) {
  return std::bit_cast<std::byte*>(pointer);
}

// Never destroyed: engines may be closed by other statics' destructors.
void keep(DeviceMemory memory) {
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::vector<DeviceMemory>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

Result<DeviceMemory> DeviceMemory::allocate(std::shared_ptr<const CudaDevice> device,
                                            std::size_t size_bytes) {
  if (size_bytes == 0 || size_bytes > SIZE_MAX - kBlockBytes) {
    return Status(Code::kInvalidArgument, "cannot allocate " + std::to_string(size_bytes) + " bytes");
  }
  const std::size_t rounded = (size_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  const CudaScope scope(*device);
  CudaPointer pointer = 0;
  const Status status = device->driver().check(device->driver().mem_alloc(&pointer, rounded), "cuMemAlloc");
  if (!status.ok()) {
    return Status(status.code(), std::to_string(rounded) + " bytes on " + name_of(*device) + ": " +
                                     status.message() +
                                     "; leave more of its memory free, or set a smaller num_slots or "
                                     "slot_bytes");
  }
  DeviceMemory memory(std::move(device), Kind::kAllocated, bytes_at(pointer), rounded);
  KVPUSH_TRY(memory.clear(rounded));
  return memory;
}

Result<DeviceMemory> DeviceMemory::import(std::shared_ptr<const CudaDevice> device,
                                          const CudaIpcHandle& handle, std::size_t size_bytes) {
  const CudaScope scope(*device);
  CudaPointer pointer = 0;
  const CudaCode code = device->driver().ipc_open_mem_handle(&pointer, handle, kCudaIpcLazyPeerAccess);
  if (const Status status = device->driver().check(code, "cuIpcOpenMemHandle"); !status.ok()) {
    return Status(Code::kTransport, name_of(*device) + " cannot open a peer's memory: " + status.message());
  }
  DeviceMemory opened(std::move(device), Kind::kImported, bytes_at(pointer), 0);
  const CudaDriver& cuda = opened.device_->driver();
  CudaPointer start = 0;
  std::size_t size = 0;
  KVPUSH_TRY(cuda.check(cuda.pointer_get_attribute(&start, kCudaPointerRangeStart, pointer),
                        "cuPointerGetAttribute of a peer's memory"));
  KVPUSH_TRY(cuda.check(cuda.pointer_get_attribute(&size, kCudaPointerRangeSize, pointer),
                        "cuPointerGetAttribute of a peer's memory"));
  const std::size_t available = start + size - pointer;
  if (start > pointer || available < size_bytes) {
    return Status(Code::kTransport, "the peer's memory has " + std::to_string(available) +
                                        " bytes, agreed were " + std::to_string(size_bytes));
  }
  return opened;
}

Result<DeviceMemory> DeviceMemory::pin(std::shared_ptr<const CudaDevice> device, std::byte* data,
                                       std::size_t size_bytes, TimeUs budget_us) {
  const CudaDriver& cuda = device->driver();
  const std::string what = std::to_string(size_bytes) + " bytes of host memory for " + name_of(*device);
  const TimeUs start = monotonic_us();
  DeviceMemory pinned(std::move(device), Kind::kPinned, data, 0);
  const CudaScope scope(*pinned.device_);
  while (pinned.size_ < size_bytes) {
    if (pinned.size_ != 0 && monotonic_us() - start > budget_us) {
      return Status(Code::kExhausted, "pinned " + std::to_string(pinned.size_) + " of " + what + " in " +
                                          std::to_string(budget_us) +
                                          " us: set a smaller num_slots or slot_bytes");
    }
    std::byte* const at = data + pinned.size_;
    const std::size_t step = std::min(kPinStepBytes, size_bytes - pinned.size_);
    // A range that is registered already belonged to a mapping that is gone: its pages are not these.
    const CudaCode code = cuda.mem_host_register(at, step, kCudaHostPortable | kCudaHostDeviceMap);
    if (const Status status = cuda.check(code, "cuMemHostRegister"); !status.ok()) {
      return Status(status.code(),
                    "cannot pin " + what + ": " + status.message() +
                        "; the host needs that much free memory, or set a smaller num_slots or "
                        "slot_bytes");
    }
    pinned.size_ += step;
  }
  CudaPointer seen = 0;
  KVPUSH_TRY(cuda.check(cuda.mem_host_get_device_pointer(&seen, data, 0), "cuMemHostGetDevicePointer"));
  if (seen != pointer_to(data)) {
    return Status(Code::kUnsupported,
                  "the GPU sees pinned memory at another address than the host, which a "
                  "kernel of kvpush cannot use: " +
                      what);
  }
  return pinned;
}

Result<CudaIpcHandle> DeviceMemory::share() const {
  const CudaScope scope(*device_);
  CudaIpcHandle handle{};
  const CudaCode code = device_->driver().ipc_get_mem_handle(&handle, pointer_to(data_));
  KVPUSH_TRY(device_->driver().check(code, "cuIpcGetMemHandle"));
  return handle;
}

Status DeviceMemory::clear(std::size_t size_bytes) const {
  const CudaDriver& cuda = device_->driver();
  const CudaScope scope(*device_);
  CudaStream stream = nullptr;
  KVPUSH_TRY(
      cuda.check(cuda.stream_create(&stream, kCudaStreamNonBlocking, 0), "cuStreamCreateWithPriority"));
  Status status = cuda.check(cuda.memset_async(pointer_to(data_), 0, size_bytes, stream), "cuMemsetD8Async");
  if (status.ok()) status = cuda.check(cuda.stream_synchronize(stream), "cuStreamSynchronize");
  (void)cuda.stream_destroy(stream);
  return status;
}

void DeviceMemory::leak() noexcept {
  if (data_ == nullptr) return;
  keep(std::move(*this));
}

void DeviceMemory::reset() noexcept {
  if (data_ != nullptr) {
    const CudaDriver& cuda = device_->driver();
    const CudaScope scope(*device_);
    switch (kind_) {
      case Kind::kAllocated: (void)cuda.mem_free(pointer_to(data_)); break;
      case Kind::kImported: (void)cuda.ipc_close_mem_handle(pointer_to(data_)); break;
      case Kind::kPinned:
        for (std::size_t at = 0; at < size_; at += kPinStepBytes) (void)cuda.mem_host_unregister(data_ + at);
        break;
    }
  }
  data_ = nullptr;
  device_.reset();
}

}  // namespace kvpush
