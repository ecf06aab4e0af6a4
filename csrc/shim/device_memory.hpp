// Memory that a GPU works on beside its cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush {

/// Owns one range that kernels of `device` reach by its address: allocated on the device, opened from
/// another process, or pages of the host that are pinned for it. Move-only; the destructor gives it back, and
/// what the driver says to that is ignored: a device that failed, or a process that ends, has nothing to
/// lose. Any thread, externally synchronised: every call makes the device's context current for itself.
class DeviceMemory {
 public:
  DeviceMemory() = default;

  /// Memory of the device, whole blocks of 2 MiB: a smaller allocation would share its block with others of
  /// this process, and a peer that opens the handle would reach those too. Zeroed, all of it: a peer could
  /// read what another one's KV was in there before. Errors: Exhausted (no such memory left), Transport.
  static Result<DeviceMemory> allocate(std::shared_ptr<const CudaDevice> device, std::size_t size_bytes);

  /// Opens what another process of this host has shared. A device other than the exporter's needs peer
  /// access to it. The exporter must not free the memory before this is gone.
  /// Errors: Transport, e.g. for a handle of this process itself, a device that this process cannot see, or
  /// memory of less than `size_bytes`: writing past its end would take down the whole context.
  static Result<DeviceMemory> import(std::shared_ptr<const CudaDevice> device, const CudaIpcHandle& handle,
                                     std::size_t size_bytes);

  /// Pins mapped pages of the host, for every context of the process. `data` is aligned to a page; the pages
  /// must stay mapped until this is gone. Errors: Exhausted (not all of it within `budget_us`), Unsupported
  /// (the device would see them at another address), Transport.
  static Result<DeviceMemory> pin(std::shared_ptr<const CudaDevice> device, std::byte* data,
                                  std::size_t size_bytes, TimeUs budget_us);

  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    DeviceMemory taken(std::move(other));
    swap(taken);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { reset(); }

  [[nodiscard]] bool ok() const noexcept { return data_ != nullptr; }
  /// Of device memory an address that only the device may follow.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

  /// What another process imports allocated memory with. Errors: Transport.
  [[nodiscard]] Result<CudaIpcHandle> share() const;
  /// Zeroes the first `size_bytes` of allocated memory, and returns when they are. It waits for nothing else
  /// that runs on the device. Errors: Transport.
  [[nodiscard]] Status clear(std::size_t size_bytes) const;

  void reset() noexcept;
  /// Keeps the memory, and the context that it belongs to, until the process ends: someone may still use it.
  void leak() noexcept;

 private:
  enum class Kind : std::uint8_t { kAllocated, kImported, kPinned };

  DeviceMemory(std::shared_ptr<const CudaDevice> device, Kind kind, std::byte* data, std::size_t size_bytes)
      : device_(std::move(device)), kind_(kind), data_(data), size_(size_bytes) {}
  void swap(DeviceMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(kind_, other.kind_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  std::shared_ptr<const CudaDevice> device_;
  Kind kind_ = Kind::kAllocated;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvpush
