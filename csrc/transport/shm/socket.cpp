#include "transport/shm/socket.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/bytes.hpp"

namespace kvpush::shm {
namespace {

constexpr std::uint32_t kHelloMagic = 0x4853564bU;
constexpr std::size_t kHelloBytes = sizeof(kHelloMagic) + sizeof(Uuid);
constexpr unsigned kTruncated = unsigned{MSG_TRUNC} | unsigned{MSG_CTRUNC};
constexpr char kWake = 'W';
constexpr int kMaxWakesPerDrain = 64;
// As many as the kernel passes at once (SCM_MAX_FD), so that none is left open unseen.
constexpr std::size_t kMaxPassedFds = 253;

Status os_error(const char* call, int error) {
  return {Code::kTransport, std::string(call) + " on a unix socket: " + std::strerror(error)};
}

struct Address {
  sockaddr_un un{};
  socklen_t size = 0;
};

Address address_of(const Incarnation& engine) {
  const std::string name = "kvpush-" + to_string(engine);
  Address address;
  address.un.sun_family = AF_UNIX;
  static_assert(sizeof(address.un.sun_path) > 1 + 7 + 32);
  std::memcpy(address.un.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

void collect_fds(msghdr& message, std::vector<Fd>& out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      out.emplace_back(fd);
    }
  }
}

}  // namespace

Result<Fd> listen_as(const Incarnation& engine) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.ok()) return os_error("socket", errno);
  const Address address = address_of(engine);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.un), address.size) != 0) {
    return os_error("bind", errno);
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return os_error("listen", errno);
  return socket;
}

Result<Fd> connect_to(const Incarnation& engine, TimeUs budget_us) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.ok()) return os_error("socket", errno);
  // The send timeout also bounds connect() of a unix socket; zero would mean for ever.
  timeval budget{};
  const TimeUs bounded_us = std::max<TimeUs>(budget_us, 1);
  budget.tv_sec = bounded_us / 1'000'000;
  budget.tv_usec = bounded_us % 1'000'000;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &budget, sizeof(budget)) != 0) {
    return os_error("setsockopt", errno);
  }
  const Address address = address_of(engine);
  int rc = 0;
  do {
    rc = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.un), address.size);
  } while (rc != 0 && errno == EINTR);
  if (rc != 0 && errno == ECONNREFUSED) {
    return Status(Code::kPeerLost, "no engine " + to_string(engine) + " listens on this host any more");
  }
  if (rc != 0) return os_error("connect", errno);
  if (::fcntl(socket.get(), F_SETFL, O_NONBLOCK) != 0) return os_error("fcntl", errno);
  return socket;
}

Status send_hello(const Fd& socket, const SessionId& session, const Fd& memfd) {
  ByteWriter hello;
  hello.put(kHelloMagic);
  hello.put_raw(std::as_bytes(std::span(session.bytes)));
  Bytes payload = std::move(hello).take();
  iovec part{payload.data(), payload.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = memfd.get();
  std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) !=
      static_cast<ssize_t>(payload.size())) {
    return os_error("sendmsg", errno);
  }
  return {};
}

Greeting receive_hello(const Fd& socket, Hello& hello) {
  std::array<std::byte, kHelloBytes> payload{};
  iovec part{payload.data(), payload.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxPassedFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = ::recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size < 0) return errno == EAGAIN || errno == EINTR ? Greeting::kNothing : Greeting::kGarbage;
  std::vector<Fd> fds;
  collect_fds(message, fds);
  if (size != static_cast<ssize_t>(kHelloBytes) ||
      (static_cast<unsigned>(message.msg_flags) & kTruncated) != 0 || fds.size() != 1) {
    return Greeting::kGarbage;
  }
  ByteReader in(payload);
  if (in.get<std::uint32_t>() != kHelloMagic) return Greeting::kGarbage;
  std::memcpy(hello.session.bytes.data(), in.get_raw(sizeof(Uuid)).data(), sizeof(Uuid));
  hello.memfd = std::move(fds.front());
  return Greeting::kHello;
}

void send_wake(const Fd& socket) noexcept {
  [[maybe_unused]] const ssize_t sent = ::send(socket.get(), &kWake, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

Inbox drain_wakes(const Fd& socket) noexcept {
  for (int i = 0; i < kMaxWakesPerDrain; ++i) {
    std::array<char, 2> packet{};
    const ssize_t size = ::recv(socket.get(), packet.data(), packet.size(), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR ? Inbox::kEmpty : Inbox::kEnded;
    if (size == 0) return Inbox::kEnded;
    if (size != 1 || packet[0] != kWake) return Inbox::kBroken;
  }
  return Inbox::kEmpty;
}

bool is_hung_up(const Fd& socket) noexcept {
  pollfd entry{socket.get(), 0, 0};
  return ::poll(&entry, 1, 0) > 0 && (static_cast<unsigned>(entry.revents) & unsigned{POLLHUP}) != 0;
}

}  // namespace kvpush::shm
