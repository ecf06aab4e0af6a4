// Page-aligned memory that a remote agent may address.
#pragma once

#include <cstddef>

#include "base/status.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// Anonymous pages, zeroed and all present. Move-only; the destructor unmaps them.
///
/// A remote key or address of such memory can outlive its registration: NIXL cannot revoke one, and it
/// refuses a second landing of one agent at the same address with other keys. retire() therefore gives
/// the pages back but keeps the address range mapped and unused, so that a late write lands in pages that
/// nobody reads. Ranges are given up oldest first once 16 TiB of addresses are retired.
class NixlMemory {
 public:
  /// Maps at least `size_bytes`, rounded up to whole pages. Exhausted when the system refuses.
  static Result<NixlMemory> map(std::size_t size_bytes);

  NixlMemory(NixlMemory&& other) noexcept;
  NixlMemory& operator=(NixlMemory&& other) noexcept;
  NixlMemory(const NixlMemory&) = delete;
  NixlMemory& operator=(const NixlMemory&) = delete;
  ~NixlMemory();

  /// What was asked for, not the rounded size.
  [[nodiscard]] Region region() const noexcept { return {data_, size_bytes_}; }

  /// Gives the pages back and retires the address range. Deregister first. Threads: any.
  void retire() noexcept;
  /// Leaves pages and range as they are, writable, for good: for memory of unknown fate at the end.
  void leak() noexcept { data_ = nullptr; }

 private:
  NixlMemory(std::byte* data, std::size_t size_bytes, std::size_t mapped_bytes)
      : data_(data), size_bytes_(size_bytes), mapped_bytes_(mapped_bytes) {}

  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
};

}  // namespace kvpush
