// The unix socket beside each session: it carries the memory file once, wake-ups, and the peer's death.
#pragma once

#include <cstdint>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "transport/shm/fd.hpp"

namespace kvpush::shm {

/// What D says first on its connection.
struct Hello {
  SessionId session;
  Fd memfd;
};

/// Listens on the abstract name of `engine`; non-blocking. Errors: Transport (name taken, no descriptors).
Result<Fd> listen_as(const Incarnation& engine);

/// Connects to the listener of `engine` and returns a non-blocking socket. Waits at most `budget_us`, and
/// only while the listener's backlog is full. Errors: PeerLost (nobody listens), Transport.
Result<Fd> connect_to(const Incarnation& engine, TimeUs budget_us);

/// Passes `memfd` for `session`. Errors: Transport.
Status send_hello(const Fd& socket, const SessionId& session, const Fd& memfd);

enum class Greeting : std::uint8_t {
  kNothing,  ///< not there yet
  kHello,
  kGarbage,  ///< anything else, or the end; every stray descriptor is closed
};
/// Reads the first packet of a connection into `hello`.
Greeting receive_hello(const Fd& socket, Hello& hello);

/// Makes the peer's wait end. Never blocks; a full socket holds a wake-up already.
void send_wake(const Fd& socket) noexcept;

enum class Inbox : std::uint8_t {
  kEmpty,   ///< the wake-ups, if any, are consumed
  kEnded,   ///< the peer has shut its side
  kBroken,  ///< something that is not a wake-up
};
Inbox drain_wakes(const Fd& socket) noexcept;

/// Whether the peer's end is closed: by itself, or because its process is gone.
[[nodiscard]] bool is_hung_up(const Fd& socket) noexcept;

}  // namespace kvpush::shm
