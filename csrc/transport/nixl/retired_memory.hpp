// Device memory of ended landings that is not given back at once.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "transport/remote_memory.hpp"

namespace kvpush {

/// An address that is allocated again would soon be a landing again, and a peer that knows it under another
/// key refuses that. Host memory keeps its addresses without its pages; device memory can only be kept whole,
/// so that this is bounded: above `max_bytes` the oldest is freed. Externally synchronised.
class RetiredMemory {
 public:
  explicit RetiredMemory(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  /// Takes deregistered memory into which no write can be on its way.
  void add(RemoteMemory memory) {
    bytes_ += memory.region().size_bytes;
    kept_.push_back(std::move(memory));
    while (bytes_ > max_bytes_) free_oldest();
  }
  /// False when there is none.
  bool free_oldest() {
    if (kept_.empty()) return false;
    bytes_ -= kept_.front().region().size_bytes;
    kept_.pop_front();
    return true;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  const std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  std::deque<RemoteMemory> kept_;
};

}  // namespace kvpush
