// Memory that a peer on a network may address.
#pragma once

#include <cstddef>

#include "base/status.hpp"
#include "shim/device_memory.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// Anonymous pages, zeroed and all present, or device memory. Move-only; the destructor frees it.
///
/// A remote key or address of such memory can outlive its registration. NIXL cannot revoke one, and
/// refuses a second landing of one agent at the same address with other keys. retire() therefore gives
/// the pages back but keeps the address range mapped and unused, so that a late write lands in pages that
/// nobody reads. Ranges are given up oldest first once 16 TiB of addresses are retired. Device memory has no
/// addresses without memory: it is freed, so only its owner can say when that is safe.
class RemoteMemory {
 public:
  /// Maps at least `size_bytes`, rounded up to whole pages, and with a `device` pins them for it, in
  /// `pin_budget_us`.
  /// Errors: Exhausted (the system refuses), those of DeviceMemory::pin().
  static Result<RemoteMemory> map(std::size_t size_bytes, const std::shared_ptr<const CudaDevice>& device,
                                  TimeUs pin_budget_us);
  /// Zeroed memory of the device itself. Errors: those of DeviceMemory::allocate() and clear().
  static Result<RemoteMemory> allocate(std::size_t size_bytes,
                                       const std::shared_ptr<const CudaDevice>& device);

  RemoteMemory(RemoteMemory&& other) noexcept;
  RemoteMemory& operator=(RemoteMemory&& other) noexcept;
  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;
  ~RemoteMemory();

  /// What was asked for, not the rounded size.
  [[nodiscard]] Region region() const noexcept { return {data_, size_bytes_}; }

  /// Zeroes the first `size_bytes`. Errors: those of DeviceMemory::clear().
  [[nodiscard]] Status clear(std::size_t size_bytes) const;
  /// Gives the pages back and retires the address range. Deregister first. Threads: any.
  void retire() noexcept;
  /// Leaves pages and range as they are, writable, for good: for memory of unknown fate at the end.
  void leak() noexcept;

 private:
  RemoteMemory(std::byte* data, std::size_t size_bytes, std::size_t mapped_bytes)
      : data_(data), size_bytes_(size_bytes), mapped_bytes_(mapped_bytes) {}

  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;  // 0: data_ is device_'s
  DeviceMemory device_;           // pins the pages, or is the memory itself
};

}  // namespace kvpush
