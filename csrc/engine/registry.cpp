#include "engine/registry.hpp"

namespace kvpush {

Registry::Registry(const Cache& cache, std::size_t max_open_transfers)
    : cache_(cache), max_open_transfers_(max_open_transfers) {
  for (const Group& group : cache.groups) {
    owners_.emplace_back(static_cast<std::size_t>(group.num_blocks()), HandleId{0});
  }
}

Status Registry::check_room() const {
  if (num_open() < max_open_transfers_) return {};
  return {Code::kQueueFull, "max_open_transfers (" + std::to_string(max_open_transfers_) +
                                ") pushes, claims and receives are open; wait for their events, or raise it"};
}

Status Registry::add_claim(TransferId transfer) {
  KVPUSH_TRY(check_room());
  claims_.insert(transfer);
  return {};
}

Status Registry::check_session(const SessionId& session) const {
  if (sessions_.contains(session)) return {};
  return {Code::kPeerLost, "no open session " + to_string(session) + "; make a new offer to this peer"};
}

Status Registry::add_push(HandleId handle, const std::string& key) {
  KVPUSH_TRY(check_room());
  if (!keys_.try_emplace(key, handle).second) {
    return {Code::kDuplicateKey, "a push of key '" + key + "' is open until its event"};
  }
  pushes_.emplace(handle, key);
  return {};
}

Status Registry::add_receive(HandleId handle, const protocol::Destination& destination) {
  KVPUSH_TRY(check_room());
  KVPUSH_TRY(check_ids(destination.blocks));
  const auto undo = [&] {
    for (std::size_t g = 0; g < destination.blocks.size(); ++g) {
      for (const std::int32_t block : destination.blocks[g]) {
        if (block < 0) continue;
        HandleId& owner = owners_[g][static_cast<std::size_t>(block)];
        if (owner == handle) owner = 0;
      }
    }
  };
  for (std::size_t g = 0; g < destination.blocks.size(); ++g) {
    for (const std::int32_t block : destination.blocks[g]) {
      if (block < 0) continue;
      HandleId& owner = owners_[g][static_cast<std::size_t>(block)];
      if (owner != 0) {
        const bool twice = owner == handle;
        undo();
        return {Code::kInvalidArgument, "block " + std::to_string(block) + " of group " + std::to_string(g) +
                                            (twice ? " is given twice" : " belongs to another open receive")};
      }
      owner = handle;
    }
  }
  receives_.emplace(handle, destination.blocks);
  return {};
}

void Registry::remove(HandleId handle) {
  if (const auto push = pushes_.find(handle); push != pushes_.end()) {
    keys_.erase(push->second);
    pushes_.erase(push);
  }
  if (const auto receive = receives_.find(handle); receive != receives_.end()) {
    for (std::size_t g = 0; g < receive->second.size(); ++g) {
      for (const std::int32_t block : receive->second[g]) {
        if (block >= 0) owners_[g][static_cast<std::size_t>(block)] = 0;
      }
    }
    receives_.erase(receive);
  }
}

Status Registry::check_ids(const std::vector<std::vector<std::int32_t>>& ids) const {
  if (ids.size() != cache_.groups.size()) {
    return {Code::kInvalidArgument, "blocks of " + std::to_string(ids.size()) + " groups, the cache has " +
                                        std::to_string(cache_.groups.size())};
  }
  for (std::size_t g = 0; g < ids.size(); ++g) {
    const std::int64_t num_blocks = cache_.groups[g].num_blocks();
    for (const std::int32_t block : ids[g]) {
      if (block < -1 || block >= num_blocks) {
        return {Code::kInvalidArgument, "block " + std::to_string(block) + " of group " + std::to_string(g) +
                                            " is outside [0, " + std::to_string(num_blocks) +
                                            "); -1 marks a hole"};
      }
    }
  }
  return {};
}

}  // namespace kvpush
