// The remote agents that are loaded, each once, whatever the number of sessions with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "transport/nixl/agent.hpp"

namespace kvpush {

/// Counts the users (sessions and unfinished requests) of each loaded agent.
///
/// An agent without users stays loaded for kLingerUs: closing an endpoint of UCX breaks the peer's side
/// of it as well, and the peer may not have closed its session yet when a new one is made.
/// Progress thread only.
class NixlPeers {
 public:
  static constexpr TimeUs kLingerUs = 60'000'000;

  explicit NixlPeers(NixlAgent& agent) : agent_(agent) {}

  /// Adds a user, after loading `connection` unless the agent is loaded and works.
  Status acquire(const std::string& agent, ByteView connection);
  /// Adds a user of an agent that has one; tells which of its connections that is.
  std::uint64_t retain(const std::string& agent);
  void release(const std::string& agent, TimeUs now);
  /// Marks the connection as unusable: the next acquire() loads it anew. False if it was marked before.
  bool mark_broken(const std::string& agent);
  /// Whether `agent` is loaded and not marked.
  [[nodiscard]] bool is_usable(const std::string& agent) const;
  /// Whether `connection`, as retain() told it, is still the one in use.
  [[nodiscard]] bool is_current(const std::string& agent, std::uint64_t connection) const;
  /// Forgets agents that have had no user for kLingerUs, and broken ones at once.
  void sweep(TimeUs now);

 private:
  struct Peer {
    std::size_t num_users = 0;
    std::uint64_t connection = 0;
    bool broken = false;
    TimeUs idle_since = kNever;
  };

  NixlAgent& agent_;
  std::uint64_t num_connections_ = 0;
  std::unordered_map<std::string, Peer> peers_;
};

}  // namespace kvpush
