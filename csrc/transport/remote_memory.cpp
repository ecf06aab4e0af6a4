#include "transport/remote_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

namespace kvpush {
namespace {

// An eighth of the 47 bits of a process's addresses on x86-64.
constexpr std::size_t kMaxRetiredBytes = std::size_t{16} << 40U;

class RetiredRanges {
 public:
  void add(void* data, std::size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    ranges_.emplace_back(data, num_bytes);
    total_bytes_ += num_bytes;
    while (total_bytes_ > kMaxRetiredBytes) {
      munmap(ranges_.front().first, ranges_.front().second);
      total_bytes_ -= ranges_.front().second;
      ranges_.pop_front();
    }
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<void*, std::size_t>> ranges_;
  std::size_t total_bytes_ = 0;
};

// Never destroyed: engines may be closed by other statics' destructors.
RetiredRanges& retired_ranges() {
  static auto* const ranges = new RetiredRanges;
  return *ranges;
}

}  // namespace

Result<RemoteMemory> RemoteMemory::map(std::size_t size_bytes,
                                       const std::shared_ptr<const CudaDevice>& device,
                                       TimeUs pin_budget_us) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size_bytes == 0 || size_bytes > SIZE_MAX - page_bytes) {
    return Status(Code::kInvalidArgument, "cannot map " + std::to_string(size_bytes) + " bytes");
  }
  const std::size_t mapped_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
  void* data = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status(Code::kExhausted,
                  "cannot map " + std::to_string(mapped_bytes) + " bytes: " + std::strerror(errno));
  }
  // Writes into absent pages halve the rate of the first transfers.
  std::memset(data, 0, mapped_bytes);
  RemoteMemory memory(static_cast<std::byte*>(data), size_bytes, mapped_bytes);
  if (device) {
    auto pinned = DeviceMemory::pin(device, memory.data_, mapped_bytes, pin_budget_us);
    if (!pinned.ok()) return pinned.status();
    memory.device_ = std::move(pinned).value();
  }
  return memory;
}

Result<RemoteMemory> RemoteMemory::allocate(std::size_t size_bytes,
                                            const std::shared_ptr<const CudaDevice>& device) {
  auto allocated = DeviceMemory::allocate(device, size_bytes);
  if (!allocated.ok()) return allocated.status();
  RemoteMemory memory(allocated.value().data(), size_bytes, 0);
  memory.device_ = std::move(allocated).value();
  return memory;
}

RemoteMemory::RemoteMemory(RemoteMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(other.size_bytes_),
      mapped_bytes_(other.mapped_bytes_),
      device_(std::move(other.device_)) {}

RemoteMemory& RemoteMemory::operator=(RemoteMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(device_, other.device_);
  return *this;
}

RemoteMemory::~RemoteMemory() {
  device_.reset();
  if (data_ != nullptr && mapped_bytes_ != 0) munmap(data_, mapped_bytes_);
}

Status RemoteMemory::clear(std::size_t size_bytes) const {
  if (mapped_bytes_ == 0) return device_.clear(size_bytes);
  std::memset(data_, 0, size_bytes);
  return {};
}

void RemoteMemory::leak() noexcept {
  device_.leak();
  data_ = nullptr;
}

void RemoteMemory::retire() noexcept {
  device_.reset();
  if (mapped_bytes_ == 0) data_ = nullptr;
  if (data_ == nullptr) return;
  // Mapping anew also returns the range's share of the commit limit; failing that, the old pages stay.
  const void* fresh = mmap(data_, mapped_bytes_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  void* const range = std::exchange(data_, nullptr);
  if (fresh != MAP_FAILED) retired_ranges().add(range, mapped_bytes_);
}

}  // namespace kvpush
