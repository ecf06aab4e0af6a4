// What the caller has open, as far as a call can be judged on the caller's own thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "cache/cache.hpp"
#include "protocol/receiver.hpp"

namespace kvpush {

/// Open pushes by key, and which blocks open receives will write to. Externally synchronised.
class Registry {
 public:
  Registry(const Cache& cache, std::size_t max_open_transfers);

  /// DuplicateKey, QueueFull.
  Status add_push(HandleId handle, const std::string& key);
  /// QueueFull; InvalidArgument for an id out of range, twice in the call, or in another open receive.
  Status add_receive(HandleId handle, const protocol::Destination& destination);
  /// QueueFull. A claim counts as open until it is received or cancelled.
  Status add_claim(TransferId transfer);
  /// Whether it was open.
  bool remove_claim(TransferId transfer) { return claims_.erase(transfer) != 0; }

  /// A session of which this engine is D, from establish() until its `lost` event.
  void add_session(const SessionId& session) { sessions_.insert(session); }
  void remove_session(const SessionId& session) { sessions_.erase(session); }
  /// PeerLost
  [[nodiscard]] Status check_session(const SessionId& session) const;

  /// The handle's terminal event is out.
  void remove(HandleId handle);

  /// InvalidArgument when an id is neither -1 nor a block of its group.
  [[nodiscard]] Status check_ids(const std::vector<std::vector<std::int32_t>>& ids) const;
  [[nodiscard]] std::size_t num_open() const { return pushes_.size() + receives_.size() + claims_.size(); }

 private:
  [[nodiscard]] Status check_room() const;

  const Cache& cache_;
  std::size_t max_open_transfers_;
  std::unordered_set<TransferId> claims_;
  std::unordered_set<SessionId> sessions_;
  std::unordered_map<HandleId, std::string> pushes_;
  std::unordered_map<std::string, HandleId> keys_;
  std::unordered_map<HandleId, std::vector<std::vector<std::int32_t>>> receives_;
  std::vector<std::vector<HandleId>> owners_;  ///< per group and block: the receive that writes to it
};

}  // namespace kvpush
