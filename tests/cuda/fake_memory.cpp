// The fake driver: memory. That of a device is a memfd, so that another process can map it too.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iterator>

#include "fake_state.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

constexpr std::size_t kPageBytes = 4096;

/// What the 64 bytes of an IPC handle hold.
struct Exported {
  char magic[8];
  std::int32_t pid;
  std::int32_t fd;
  std::uint64_t id;
  std::uint64_t size;
};
static_assert(sizeof(Exported) <= sizeof(CudaIpcHandle));
constexpr char kMagic[8] = "fakeipc";

std::size_t whole_pages(std::size_t size) {
  return (size + kPageBytes - 1) / kPageBytes * kPageBytes;
}

std::string memfd_name(std::int32_t pid, std::uint64_t id) {
  return "fake_cuda." + std::to_string(pid) + "." + std::to_string(id);
}

std::uintptr_t add_mapping(int fd, Memory memory) {
  void* const at = ::mmap(nullptr, whole_pages(memory.size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return 0;
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  state().memory[address] = std::move(memory);
  return address;
}

/// The entry that begins at `address` and is of `kind`, or the end.
auto find_start(std::uintptr_t address, Memory::Kind kind) {
  auto found = state().memory.find(address);
  return found != state().memory.end() && found->second.kind == kind ? found : state().memory.end();
}

bool overlaps_memory(std::uintptr_t address, std::size_t size) {
  const auto& memory = state().memory;
  const auto after = memory.lower_bound(address);
  if (after != memory.end() && after->first < address + size) return true;
  return find_memory(address, 1) != nullptr;
}

}  // namespace

FAKE_CUDA_EXPORT CudaCode cuMemAlloc_v2(CudaPointer* pointer, std::size_t size) {
  FAKE_CUDA_ENTER(cuMemAlloc_v2, kContext);
  if (size == 0) return kInvalidValue;
  const std::uint64_t id = ++state().last_id;
  const int fd = ::memfd_create(memfd_name(::getpid(), id).c_str(), MFD_CLOEXEC);
  if (fd < 0) return kCudaOutOfMemory;
  if (::ftruncate(fd, static_cast<off_t>(whole_pages(size))) == 0) {
    Memory memory{.kind = Memory::Kind::kDevice, .size = size, .device = current_context()->device, .fd = fd};
    memory.id = id;
    *pointer = add_mapping(fd, memory);
    // What was there before.
    if (*pointer != 0) std::memset(reinterpret_cast<void*>(*pointer), 0xdb, size);
    if (*pointer != 0) return kCudaOk;
  }
  ::close(fd);
  return kCudaOutOfMemory;
}

FAKE_CUDA_EXPORT CudaCode cuMemFree_v2(CudaPointer pointer) {
  FAKE_CUDA_ENTER_RELEASE(cuMemFree_v2, kContext);
  const auto found = find_start(pointer, Memory::Kind::kDevice);
  if (found == state().memory.end()) return pointer == 0 ? kCudaOk : kInvalidValue;
  ::munmap(reinterpret_cast<void*>(pointer), whole_pages(found->second.size));
  ::close(found->second.fd);
  state().memory.erase(found);
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuMemHostAlloc(void** pointer, std::size_t size, unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuMemHostAlloc, kContext);
  if (size == 0) return kInvalidValue;
  *pointer = std::aligned_alloc(64, (size + 63) / 64 * 64);
  if (*pointer == nullptr) return kCudaOutOfMemory;
  state().memory[reinterpret_cast<std::uintptr_t>(*pointer)] = {
      .kind = Memory::Kind::kHost, .size = size, .device = current_context()->device};
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuMemFreeHost(void* pointer) {
  FAKE_CUDA_ENTER_RELEASE(cuMemFreeHost, kContext);
  const auto found = find_start(reinterpret_cast<std::uintptr_t>(pointer), Memory::Kind::kHost);
  if (found == state().memory.end()) return kInvalidValue;
  state().memory.erase(found);
  std::free(pointer);
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuMemHostRegister_v2(void* pointer, std::size_t size, unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuMemHostRegister_v2, kContext);
  if (pointer == nullptr || size == 0) return kInvalidValue;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (overlaps_memory(address, size)) return kHostMemoryAlreadyRegistered;
  state().memory[address] = {
      .kind = Memory::Kind::kRegistered, .size = size, .device = current_context()->device};
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuMemHostUnregister(void* pointer) {
  FAKE_CUDA_ENTER_RELEASE(cuMemHostUnregister, kContext);
  const auto found = find_start(reinterpret_cast<std::uintptr_t>(pointer), Memory::Kind::kRegistered);
  if (found == state().memory.end()) return kHostMemoryNotRegistered;
  state().memory.erase(found);
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuMemHostGetDevicePointer_v2(CudaPointer* out, void* pointer, unsigned flags) {
  FAKE_CUDA_ENTER(cuMemHostGetDevicePointer_v2, kContext);
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const Memory* const memory = find_memory(address, 1);
  if (flags != 0 || memory == nullptr) return kInvalidValue;
  if (memory->kind != Memory::Kind::kHost && memory->kind != Memory::Kind::kRegistered) return kInvalidValue;
  *out = address;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuPointerGetAttribute(void* out, int attribute, CudaPointer pointer) {
  FAKE_CUDA_ENTER(cuPointerGetAttribute, kContext);
  const Memory* const memory = find_memory(pointer, 1);
  if (memory == nullptr) return kInvalidValue;
  const bool on_device = memory->kind == Memory::Kind::kDevice || memory->kind == Memory::Kind::kImported;
  switch (attribute) {
    case kCudaPointerMemoryType: *static_cast<unsigned*>(out) = on_device ? kCudaMemoryTypeDevice : 1; break;
    case kCudaPointerDeviceOrdinal: *static_cast<int*>(out) = memory->device; break;
    case kCudaPointerRangeStart: {
      const auto after = state().memory.upper_bound(pointer);
      *static_cast<CudaPointer*>(out) = std::prev(after)->first;
      break;
    }
    case kCudaPointerRangeSize: *static_cast<std::size_t*>(out) = memory->size; break;
    default: return kInvalidValue;
  }
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuMemcpyAsync(CudaPointer to, CudaPointer from, std::size_t size,
                                        CudaStream stream) {
  FAKE_CUDA_ENTER(cuMemcpyAsync, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr) return kInvalidHandle;
  // At least one side is the device's; the other may be any memory of the process.
  if (find_memory(to, size) == nullptr && find_memory(from, size) == nullptr) return kInvalidValue;
  queue->ops.emplace_back([to, from, size] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
    return true;
  });
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuMemsetD8Async(CudaPointer to, unsigned char value, std::size_t size,
                                          CudaStream stream) {
  FAKE_CUDA_ENTER(cuMemsetD8Async, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr) return kInvalidHandle;
  if (find_memory(to, size) == nullptr) return kInvalidValue;
  queue->ops.emplace_back([to, value, size] {
    require_memory(reinterpret_cast<void*>(to), size, "target of a memset");
    std::memset(reinterpret_cast<void*>(to), value, size);
    return true;
  });
  return kCudaOk;
}

// As with the real one, the handle is that of the whole allocation.
FAKE_CUDA_EXPORT CudaCode cuIpcGetMemHandle(CudaIpcHandle* handle, CudaPointer pointer) {
  FAKE_CUDA_ENTER(cuIpcGetMemHandle, kContext);
  const Memory* const memory = find_memory(pointer, 1);
  if (memory == nullptr || memory->kind != Memory::Kind::kDevice) return kInvalidValue;
  Exported exported{{}, ::getpid(), memory->fd, memory->id, memory->size};
  std::memcpy(exported.magic, kMagic, sizeof(kMagic));
  *handle = {};
  std::memcpy(handle->bytes, &exported, sizeof(exported));
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuIpcOpenMemHandle_v2(CudaPointer* pointer, CudaIpcHandle handle,
                                                unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuIpcOpenMemHandle_v2, kContext);
  Exported exported{};
  std::memcpy(&exported, handle.bytes, sizeof(exported));
  if (std::memcmp(exported.magic, kMagic, sizeof(kMagic)) != 0) return kInvalidValue;
  if (exported.pid == ::getpid()) return kInvalidContext;
  const std::string source = memfd_name(exported.pid, exported.id);
  for (auto& [address, memory] : state().memory) {
    if (memory.kind != Memory::Kind::kImported || memory.source != source) continue;
    ++memory.references;
    *pointer = address;
    return kCudaOk;
  }
  const std::string path = "/proc/" + std::to_string(exported.pid) + "/fd/" + std::to_string(exported.fd);
  char link[128] = {};
  if (::readlink(path.c_str(), link, sizeof(link) - 1) < 0) return kInvalidValue;
  if (std::string(link).find("memfd:" + source + " ") == std::string::npos) return kInvalidValue;
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  struct stat info{};
  const bool whole = ::fstat(fd, &info) == 0 && static_cast<std::uint64_t>(info.st_size) >= exported.size;
  Memory memory{.kind = Memory::Kind::kImported, .size = exported.size, .device = current_context()->device};
  memory.source = source;
  *pointer = whole ? add_mapping(fd, memory) : 0;
  ::close(fd);
  return *pointer != 0 ? kCudaOk : kCudaOutOfMemory;
}

FAKE_CUDA_EXPORT CudaCode cuIpcCloseMemHandle(CudaPointer pointer) {
  FAKE_CUDA_ENTER_RELEASE(cuIpcCloseMemHandle, kContext);
  const auto found = find_start(pointer, Memory::Kind::kImported);
  if (found == state().memory.end()) return kInvalidValue;
  if (--found->second.references == 0) {
    ::munmap(reinterpret_cast<void*>(pointer), whole_pages(found->second.size));
    state().memory.erase(found);
  }
  return call.code;
}
