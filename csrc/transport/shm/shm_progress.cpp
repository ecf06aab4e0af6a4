// poll(): what arrives at the sockets and in the rings.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "transport/shm/segment.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/shm/socket.hpp"

namespace kvpush {

using shm::Phase;
using shm::Role;

namespace {

constexpr std::uint64_t kListenerToken = 0;
constexpr std::size_t kEventsPerPoll = 64;
constexpr int kAcceptsPerPoll = 64;
constexpr std::size_t kMaxStrangers = 256;

}  // namespace

void ShmTransport::poll(TransportSink& sink) {
  if (armed_) {
    armed_ = false;
    for (const auto& [id, session] : sessions_) {
      if (session->phase == Phase::kOpen) session->disarm();
    }
  }
  completing_.swap(completed_);
  for (const TicketId ticket : completing_) sink.on_completed(ticket, Fate::kCompleted);
  completing_.clear();

  take_events();

  // The sink may open and close sessions: walk a copy.
  loss_owed_ = false;
  for (const auto& [id, session] : sessions_) turn_.push_back(session);
  for (const SessionPtr& session : turn_) serve(*session, sink);
  turn_.clear();
}

void ShmTransport::serve(shm::Session& session, TransportSink& sink) {
  if (session.phase == Phase::kOpen) {
    // Looked at before the rings: whoever hung up had published everything by then.
    const bool is_last = session.hung_up;
    drain(session, sink);
    if (session.phase == Phase::kOpen && is_last) lose(session, "the peer closed the session or died");
  }
  if (session.phase == Phase::kLost && !session.loss_reported) {
    session.loss_reported = true;
    sink.on_lost(session.id, session.loss);
  }
}

void ShmTransport::drain(shm::Session& session, TransportSink& sink) {
  if (!session.in.snapshot()) {
    lose(session, "the peer's write index is impossible: its memory is damaged");
    return;
  }
  if (session.role == Role::kLanding && !session.is_settled && session.in.has_data()) {
    if (const Status status = settle_landing(session); !status.ok()) return lose(session, status.message());
  }
  bool freed = false;
  shm::RingConsumer::Record record;
  while (session.phase == Phase::kOpen) {
    const shm::RingConsumer::Pop popped = session.in.pop(record_, record);
    if (popped == shm::RingConsumer::Pop::kEmpty) break;
    if (popped == shm::RingConsumer::Pop::kCorrupt) {
      lose(session, "a record of the peer has an impossible length or kind: its memory is damaged");
      return;
    }
    freed = true;
    if (record.kind == shm::RecordKind::kMessage) {
      sink.on_message(session.id, record.payload);
    } else if (session.role == Role::kLanding) {
      sink.on_notice(session.id, record.payload);
    } else {
      lose(session, "the landing's side sent a notice: only the source may");
    }
  }
  if (freed && session.phase == Phase::kOpen && session.must_wake(shm::kWantsSpace)) {
    shm::send_wake(session.socket);
  }
}

Status ShmTransport::watch(const shm::Fd& socket, std::uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) {
    return {Code::kTransport, std::string("epoll_ctl: ") + std::strerror(errno)};
  }
  return {};
}

void ShmTransport::unwatch(const shm::Fd& socket) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
}

void ShmTransport::watch_hang_up_only(const shm::Session& session) {
  // P is done with the socket until it closes; D still waits for P's end to close. EPOLLHUP always comes.
  if (session.role == Role::kSource || shm::is_hung_up(session.socket)) {
    unwatch(session.socket);
    return;
  }
  epoll_event event{};
  event.data.u64 = session.token;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, session.socket.get(), &event);
}

void ShmTransport::take_events() {
  std::array<epoll_event, kEventsPerPoll> events{};
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const std::uint64_t token = event.data.u64;
    if (token == kListenerToken) {
      accept_connections();
    } else if (const auto found = by_token_.find(token); found != by_token_.end()) {
      on_socket(*SessionPtr(found->second), event.events);
    } else {
      greet(token);
    }
  }
}

void ShmTransport::accept_connections() {
  for (int i = 0; i < kAcceptsPerPoll; ++i) {
    shm::Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.ok()) {
      if (errno != EMFILE && errno != ENFILE) return;
      // Left in the backlog, it would keep wait_fd() readable for ever.
      spare_.reset();
      shm::Fd turned_away(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (turned_away.ok()) ++counters_.dropped_connections;
      turned_away.reset();
      spare_ = shm::Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      return;
    }
    if (strangers_.size() >= kMaxStrangers) {
      ++counters_.dropped_connections;
      strangers_.erase(strangers_.begin());
    }
    const std::uint64_t token = next_token_++;
    if (!watch(socket, token).ok()) {
      ++counters_.dropped_connections;
      continue;
    }
    strangers_.emplace(token, std::move(socket));
    greet(token);
  }
}

void ShmTransport::greet(std::uint64_t token) {
  const auto found = strangers_.find(token);
  if (found == strangers_.end()) return;
  shm::Hello hello;
  const shm::Greeting greeting = shm::receive_hello(found->second, hello);
  if (greeting == shm::Greeting::kNothing) return;
  shm::Fd socket = std::move(found->second);
  strangers_.erase(found);
  const SessionPtr session = greeting == shm::Greeting::kHello ? find(hello.session) : nullptr;
  bool adopted = false;
  if (session && session->role == Role::kSource && session->phase == Phase::kOffered) {
    const shm::Extent extent = session->on_device ? shm::Extent::kRings : shm::Extent::kAll;
    Result<shm::Mapping> segment = shm::open_segment(hello.memfd, session->layout, session->id, extent);
    if (segment.ok()) {
      session->attach(std::move(segment).value());
      session->socket = std::move(socket);
      session->token = token;
      session->phase = Phase::kOpen;
      by_token_.emplace(token, session);
      adopted = true;
      const Status status = settle_source(*session, hello.memfd);
      if (!status.ok()) lose(*session, status.message());
    }
  }
  if (!adopted) ++counters_.dropped_connections;
}

void ShmTransport::on_socket(shm::Session& session, std::uint32_t events) {
  if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    session.hung_up = true;
    unwatch(session.socket);
    if (session.phase == Phase::kClosed && is_quiet(session)) drop_socket(session);
    return;
  }
  switch (shm::drain_wakes(session.socket)) {
    case shm::Inbox::kEmpty: break;
    case shm::Inbox::kEnded:
      session.hung_up = true;
      watch_hang_up_only(session);
      break;
    case shm::Inbox::kBroken:
      if (session.phase == Phase::kOpen)
        lose(session, "the peer sent something unknown on the session's socket");
      break;
  }
}

void ShmTransport::drop_socket(shm::Session& session) {
  if (!session.socket.ok()) return;
  by_token_.erase(session.token);
  unwatch(session.socket);
  // Also ends the connection when a forked child still holds a copy of the descriptor.
  ::shutdown(session.socket.get(), SHUT_RDWR);
  session.socket.reset();
}

}  // namespace kvpush
