#include "transport/nixl/peers.hpp"

#include <iterator>
#include <utility>

namespace kvpush {

Status NixlPeers::acquire(const std::string& agent, ByteView connection) {
  const auto known = peers_.find(agent);
  if (known != peers_.end() && !known->second.broken && agent_.knows(agent)) {
    ++known->second.num_users;
    return {};
  }
  agent_.forget(agent);
  KVPUSH_TRY(agent_.load(agent, connection));
  Peer& peer = peers_[agent];
  ++peer.num_users;
  peer.broken = false;
  peer.connection = ++num_connections_;
  return {};
}

std::uint64_t NixlPeers::retain(const std::string& agent) {
  Peer& peer = peers_[agent];
  ++peer.num_users;
  return peer.connection;
}

void NixlPeers::release(const std::string& agent, TimeUs now) {
  const auto known = peers_.find(agent);
  if (known == peers_.end() || known->second.num_users == 0) return;
  if (--known->second.num_users == 0) known->second.idle_since = now;
}

bool NixlPeers::mark_broken(const std::string& agent) {
  const auto known = peers_.find(agent);
  return known != peers_.end() && !std::exchange(known->second.broken, true);
}

bool NixlPeers::is_usable(const std::string& agent) const {
  const auto known = peers_.find(agent);
  return known != peers_.end() && !known->second.broken;
}

bool NixlPeers::is_current(const std::string& agent, std::uint64_t connection) const {
  const auto known = peers_.find(agent);
  return known != peers_.end() && known->second.connection == connection;
}

void NixlPeers::sweep(TimeUs now) {
  for (auto it = peers_.begin(); it != peers_.end();) {
    const Peer& peer = it->second;
    const bool over = peer.num_users == 0 && (peer.broken || now - peer.idle_since >= kLingerUs);
    if (over) agent_.forget(it->first);
    it = over ? peers_.erase(it) : std::next(it);
  }
}

}  // namespace kvpush
