// Wakes the progress thread out of its wait.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.hpp"

namespace kvpush {

/// An eventfd, and the wait on it and more descriptors. notify() from any thread.
class Wake {
 public:
  Wake() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  Wake(const Wake&) = delete;
  Wake& operator=(const Wake&) = delete;
  ~Wake() {
    if (fd_ >= 0) ::close(fd_);
  }

  void notify() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof(one));
  }

  /// Until notify(), a readable one of `others` (-1: none), or the timeout.
  void wait(std::span<const int> others, TimeUs timeout_us) {
    fds_.assign(1, {fd_, POLLIN, 0});
    for (const int fd : others) fds_.push_back({fd, POLLIN, 0});
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(timeout_us / 1'000'000);
    timeout.tv_nsec = static_cast<long>(timeout_us % 1'000'000) * 1000;
    ::ppoll(fds_.data(), fds_.size(), &timeout, nullptr);
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(fd_, &count, sizeof(count));
  }

 private:
  int fd_;
  std::vector<pollfd> fds_;
};

}  // namespace kvpush
