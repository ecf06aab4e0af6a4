// Wakes the progress thread out of its wait.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "base/clock.hpp"

namespace kvpush {

/// An eventfd, and the wait on it and up to two more descriptors. notify() from any thread.
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

  /// Until notify(), a readable descriptor (-1: none), or the timeout.
  void wait(int first_fd, int second_fd, TimeUs timeout_us) noexcept {
    std::array<pollfd, 3> fds{{{fd_, POLLIN, 0}, {first_fd, POLLIN, 0}, {second_fd, POLLIN, 0}}};
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(timeout_us / 1'000'000);
    timeout.tv_nsec = static_cast<long>(timeout_us % 1'000'000) * 1000;
    ::ppoll(fds.data(), fds.size(), &timeout, nullptr);
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(fd_, &count, sizeof(count));
  }

 private:
  int fd_;
};

}  // namespace kvpush
