// One descriptor to wait on for those of all rails.
#pragma once

#include <vector>

#include "base/status.hpp"

namespace kvpush {

class FabricWait {
 public:
  FabricWait() = default;
  FabricWait(const FabricWait&) = delete;
  FabricWait& operator=(const FabricWait&) = delete;
  ~FabricWait();

  /// -1 among `fds`: there is nothing to wait on. Errors: Exhausted.
  Status open(const std::vector<int>& fds);
  /// One of several is watched no longer.
  void drop(int fd) const noexcept;
  /// -1: none.
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  int fd_ = -1;
  bool is_own_ = false;
};

}  // namespace kvpush
