#include "transport/fabric/wait.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace kvpush {

FabricWait::~FabricWait() {
  if (is_own_) close(fd_);
}

Status FabricWait::open(const std::vector<int>& fds) {
  if (std::find(fds.begin(), fds.end(), -1) != fds.end()) return {};
  if (fds.size() == 1) {
    fd_ = fds.front();
    return {};
  }
  fd_ = epoll_create1(EPOLL_CLOEXEC);
  is_own_ = fd_ >= 0;
  int code = is_own_ ? 0 : -1;
  for (const int fd : fds) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (code == 0) code = epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event);
  }
  if (code == 0) return {};
  return {Code::kExhausted, std::string("cannot wait on several rails: ") + std::strerror(errno)};
}

void FabricWait::drop(int fd) const noexcept {
  if (is_own_) static_cast<void>(epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr));
}

}  // namespace kvpush
