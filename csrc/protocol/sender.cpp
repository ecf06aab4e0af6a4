#include "protocol/sender.hpp"

#include <algorithm>

namespace kvpush::protocol {
namespace {

// A transfer with much to send lets the next one in after this many boxes.
constexpr std::uint32_t kBoxesPerTurn = 8;

bool valid(const Wanted& wanted, std::size_t num_groups) {
  if (wanted.size() != num_groups) return false;
  for (const auto& ranges : wanted) {
    std::uint32_t last = 0;
    bool first = true;
    for (const PositionRange& range : ranges) {
      if (range.begin >= range.end || range.end > INT32_MAX || (!first && range.begin <= last)) return false;
      last = range.end;
      first = false;
    }
  }
  return true;
}

}  // namespace

void Sender::push(HandleId handle, const std::string& key, Bytes digest, TimeUs now, Actions& out) {
  Push& push = pushes_[handle];
  push.key = key;
  push.digest = std::move(digest);
  push.ids.resize(cache_.groups.size());
  push.pushed_at = now;

  Key& entry = keys_[key];
  entry.push = handle;
  entry.tombstone = FailCode::kNone;
  const bool dropped = entry.only_cancelled && entry.claims.empty();
  set_only_cancelled(entry, false);
  key_deadlines_.disarm(key);
  if (dropped) {
    end_push(handle, FailCode::kCancelled, "every claim was cancelled before the push", now, out);
    return;
  }
  const std::vector<ClaimId> waiting = entry.claims;
  for (const ClaimId& id : waiting) {
    if (claims_.at(id).opened) try_pair(id, now, out);
  }
}

void Sender::advance(HandleId handle, const std::vector<std::vector<std::int32_t>>& ids, TimeUs now,
                     Actions& out) {
  const auto found = pushes_.find(handle);
  if (found == pushes_.end() || found->second.ending != FailCode::kNone) return;
  Push& push = found->second;
  push.fenced = false;
  for (std::size_t g = 0; g < push.ids.size(); ++g) {
    push.ids[g].insert(push.ids[g].end(), ids[g].begin(), ids[g].end());
  }
  settle(handle, now, out);
}

void Sender::finish(HandleId handle, TimeUs now, Actions& out) {
  const auto found = pushes_.find(handle);
  if (found == pushes_.end() || found->second.ending != FailCode::kNone || found->second.finished) return;
  found->second.finished = true;
  found->second.fenced = false;
  found->second.finished_at = now;
  arm(handle, now);
  await_room(handle, found->second, now);
  settle(handle, now, out);
}

void Sender::abort(HandleId handle, FailCode code, std::string detail, TimeUs now, Actions& out) {
  end_push(handle, code, std::move(detail), now, out);
}

void Sender::abort_all(FailCode code, const std::string& detail, TimeUs now, Actions& out) {
  std::vector<HandleId> handles;
  handles.reserve(pushes_.size());
  for (const auto& [handle, push] : pushes_) handles.push_back(handle);
  for (const HandleId handle : handles) end_push(handle, code, detail, now, out);
}

void Sender::fence(HandleId handle) {
  const auto found = pushes_.find(handle);
  if (found != pushes_.end()) found->second.fenced = true;
}

bool Sender::quiescent(HandleId handle) const {
  const auto found = pushes_.find(handle);
  return found == pushes_.end() || found->second.packing == 0;
}

std::vector<std::uint32_t> Sender::resume(HandleId handle) {
  const auto found = pushes_.find(handle);
  std::vector<std::uint32_t> positions(cache_.groups.size(), 0);
  if (found == pushes_.end()) return positions;
  Push& push = found->second;
  // Whoever fences is about to compute these blocks again: there is more to come.
  push.finished = false;
  push_deadlines_.disarm(handle);
  for (std::size_t g = 0; g < positions.size(); ++g) {
    auto& ids = push.ids[g];
    if (push.claim) {
      const std::uint32_t packed = claims_.at(*push.claim).cursors[g].position();
      positions[g] = std::min(packed, static_cast<std::uint32_t>(ids.size()));
    }
    ids.resize(positions[g]);
    std::fill(ids.begin(), ids.end(), -1);
  }
  return positions;
}

void Sender::evict(std::uint32_t count, TimeUs now, Actions& out) {
  std::vector<std::pair<TimeUs, HandleId>> candidates;
  for (const auto& [handle, push] : pushes_) {
    if (push.finished && !push.claim && push.ending == FailCode::kNone) {
      candidates.emplace_back(push.finished_at, handle);
    }
  }
  std::sort(candidates.begin(), candidates.end());
  candidates.resize(std::min<std::size_t>(candidates.size(), count));
  for (const auto& [finished_at, handle] : candidates) {
    end_push(handle, FailCode::kEvicted, "blocks were needed", now, out);
  }
}

void Sender::open_session(const SessionId& session, std::size_t box_bytes) {
  sessions_[session].box_bytes = box_bytes;
}

void Sender::close_session(const SessionId& session, FailCode code, TimeUs now, Actions& out) {
  sessions_.erase(session);
  std::vector<ClaimId> lost;
  for (auto it = claims_.lower_bound({session, 0}); it != claims_.end() && it->first.first == session; ++it) {
    lost.push_back(it->first);
  }
  for (const ClaimId& id : lost) {
    const HandleId handle = claims_.at(id).push;
    const std::string key = claims_.at(id).key;
    const bool served = claims_.at(id).ended;
    erase_claim(id);
    const auto entry = keys_.find(key);
    if (served || entry == keys_.end()) continue;
    const HandleId waiting = entry->second.push;
    if (handle != 0 && entry->second.claims.empty()) {
      end_push(handle, code, "the session ended", now, out);
    } else if (waiting != 0) {
      arm(waiting, now);
    }
    drop_key_if_idle(key);
  }
}

void Sender::on_message(const SessionId& session, const Body& body, TimeUs now, Actions& out) {
  if (const auto* intent = std::get_if<Intent>(&body)) {
    on_claim(session, intent->transfer, intent->key, nullptr, now, out);
  } else if (const auto* open = std::get_if<Open>(&body)) {
    on_claim(session, open->transfer, open->key, open, now, out);
  } else if (const auto* cancel = std::get_if<Cancel>(&body)) {
    on_release(session, cancel->transfer, true, now, out);
  } else if (const auto* done = std::get_if<Done>(&body)) {
    on_release(session, done->transfer, false, now, out);
  }
}

void Sender::on_claim(const SessionId& session, TransferId transfer, const std::string& key, const Open* open,
                      TimeUs now, Actions& out) {
  const ClaimId id{session, transfer};
  auto found = claims_.find(id);
  if (found == claims_.end()) {
    TransferId& last = sessions_.at(session).last_transfer;
    // Old ids belong to claims that have ended: their FAIL is on its way.
    if (transfer <= last) return;
    last = transfer;
    std::size_t& num_claims = sessions_.at(session).num_claims;
    if (num_claims >= max_claims_) {
      out.breaches.emplace_back(session, "more than " + std::to_string(max_claims_) + " claims at a time");
      return;
    }
    if (const auto entry = keys_.find(key);
        entry != keys_.end() && entry->second.claims.size() >= kMaxClaimsPerKey) {
      out.messages.emplace_back(session, Fail{transfer, FailCode::kTaken});
      return;
    }
    ++num_claims;
    found = claims_.emplace(id, Claim{}).first;
    found->second.key = key;
    Key& entry = keys_[key];
    entry.claims.push_back(id);
    set_only_cancelled(entry, false);
    if (entry.tombstone == FailCode::kNone) key_deadlines_.disarm(key);
    if (entry.push != 0) arm(entry.push, now);
  } else if (open == nullptr || found->second.opened || found->second.key != key) {
    out.breaches.emplace_back(session, "transfer " + std::to_string(transfer) + " was claimed twice");
    return;
  }
  Claim& claim = found->second;
  if (open != nullptr) {
    if (open->digest.empty() || !valid(open->wanted, cache_.groups.size())) {
      out.breaches.emplace_back(session, "OPEN of transfer " + std::to_string(transfer) + " is malformed");
      return;
    }
    claim.opened = true;
    claim.digest = open->digest;
    claim.wanted = open->wanted;
  }
  const Key& entry = keys_.at(key);
  if (entry.tombstone != FailCode::kNone) {
    fail_claim(id, entry.tombstone, out);
  } else if (claim.opened && entry.push != 0) {
    try_pair(id, now, out);
  }
}

void Sender::on_release(const SessionId& session, TransferId transfer, bool cancelled, TimeUs now,
                        Actions& out) {
  const ClaimId id{session, transfer};
  const auto found = claims_.find(id);
  if (found == claims_.end()) {
    if (transfer > sessions_.at(session).last_transfer) {
      out.breaches.emplace_back(session, "transfer " + std::to_string(transfer) + " was never claimed");
    }
    return;
  }
  if (!cancelled && !found->second.ended) {
    out.breaches.emplace_back(session, "DONE of transfer " + std::to_string(transfer) + " before its END");
    return;
  }
  const std::string key = found->second.key;
  const bool served = found->second.ended;
  erase_claim(id);
  if (served) return;
  Key& entry = keys_.at(key);
  if (!entry.claims.empty()) {
    if (entry.push != 0) arm(entry.push, now);
  } else if (entry.push != 0) {
    end_push(entry.push, FailCode::kCancelled, "D cancelled", now, out);
  } else if (entry.tombstone == FailCode::kNone) {
    // Past the limit it is forgotten: a push of this key then waits to be unclaimed.
    if (num_only_cancelled_ >= max_claims_) {
      drop_key_if_idle(key);
      return;
    }
    set_only_cancelled(entry, true);
    key_deadlines_.arm(key, now + timeouts_.pairing_us);
  }
}

void Sender::try_pair(const ClaimId& id, TimeUs now, Actions& out) {
  Claim& claim = claims_.at(id);
  const HandleId handle = keys_.at(claim.key).push;
  Push& push = pushes_.at(handle);
  if (push.digest != claim.digest) {
    fail_claim(id, FailCode::kDigestMismatch, out);
    arm(handle, now);
    return;
  }
  if (push.claim) {
    fail_claim(id, FailCode::kTaken, out);
    return;
  }
  push.claim = id;
  push.paired_at = now;
  push_deadlines_.disarm(handle);
  await_room(handle, push, now);
  claim.push = handle;
  const std::size_t box_bytes = sessions_.at(id.first).box_bytes;
  for (std::size_t g = 0; g < cache_.groups.size(); ++g) {
    claim.cursors.emplace_back(cache_.groups[g], static_cast<std::uint32_t>(g), claim.wanted[g], box_bytes);
  }
  out.messages.emplace_back(id.first, Accept{id.second});
  settle(handle, now, out);
}

void Sender::fail_claim(const ClaimId& id, FailCode code, Actions& out) {
  out.messages.emplace_back(id.first, Fail{id.second, code});
  const std::string key = claims_.at(id).key;
  erase_claim(id);
  drop_key_if_idle(key);
}

void Sender::erase_claim(const ClaimId& id) {
  const auto found = claims_.find(id);
  const auto entry = keys_.find(found->second.key);
  if (entry != keys_.end()) std::erase(entry->second.claims, id);
  if (const auto push = pushes_.find(found->second.push); push != pushes_.end()) push->second.claim.reset();
  // A session that is being closed is gone already.
  if (const auto session = sessions_.find(id.first); session != sessions_.end()) --session->second.num_claims;
  claims_.erase(found);
}

bool Sender::wants_more(const Claim& claim, const Push& push, bool& missing) const {
  bool more = false;
  for (std::size_t g = 0; g < claim.cursors.size(); ++g) {
    const Cursor& cursor = claim.cursors[g];
    if (cursor.exhausted()) continue;
    more = true;
    const auto& ids = push.ids[g];
    const std::size_t end = *cursor.needs() + std::size_t{1};
    const auto from =
        ids.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(cursor.position(), ids.size()));
    const auto to = ids.begin() + static_cast<std::ptrdiff_t>(std::min(end, ids.size()));
    if ((end > ids.size() && push.finished) || std::find(from, to, -1) != to) missing = true;
  }
  return more;
}

void Sender::queue_if_ready(const ClaimId& id, Claim& claim) {
  const Push& push = pushes_.at(claim.push);
  if (claim.queued || push.fenced) return;
  for (std::size_t g = 0; g < claim.cursors.size(); ++g) {
    if (claim.cursors[g].ready(static_cast<std::uint32_t>(push.ids[g].size()))) {
      claim.queued = true;
      sessions_.at(id.first).ready.push_back(id.second);
      return;
    }
  }
}

bool Sender::has_work(const SessionId& session) const {
  const auto found = sessions_.find(session);
  return found != sessions_.end() && !found->second.ready.empty();
}

std::optional<BoxTask> Sender::next_box(const SessionId& session_id) {
  Session& session = sessions_.at(session_id);
  while (!session.ready.empty()) {
    const TransferId transfer = session.ready.front();
    const auto found = claims_.find({session_id, transfer});
    const auto leave = [&] {
      session.ready.pop_front();
      session.turn = 0;
    };
    if (found == claims_.end() || found->second.push == 0) {
      leave();
      continue;
    }
    Claim& claim = found->second;
    Push& push = pushes_.at(claim.push);
    const auto take = [&](std::size_t g) -> std::optional<BoxTask> {
      const auto& ids = push.ids[g];
      auto num_ready = static_cast<std::uint32_t>(ids.size());
      if (!claim.cursors[g].ready(num_ready)) return std::nullopt;
      // A stripe ends before a hole; a wanted hole itself is found by settle().
      const auto from = ids.begin() + claim.cursors[g].position();
      num_ready = static_cast<std::uint32_t>(std::find(from, ids.end(), -1) - ids.begin());
      if (!claim.cursors[g].ready(num_ready)) return std::nullopt;
      BoxTask task{claim.push, transfer, claim.cursors[g].next(num_ready), {}};
      task.block_ids.assign(ids.begin() + task.box.pos_begin, ids.begin() + task.box.pos_end);
      return task;
    };
    std::optional<BoxTask> task;
    if (!push.fenced && push.ending == FailCode::kNone) {
      for (std::size_t g = 0; g < claim.cursors.size() && !task; ++g) task = take(g);
    }
    if (!task) {
      claim.queued = false;
      leave();
      continue;
    }
    ++push.packing;
    if (++session.turn >= kBoxesPerTurn) {
      leave();
      session.ready.push_back(transfer);
    }
    return task;
  }
  return std::nullopt;
}

bool Sender::packed(const SessionId& session, const BoxTask& task, const Status& status, TimeUs now,
                    Actions& out) {
  const auto found_push = pushes_.find(task.handle);
  if (found_push != pushes_.end()) --found_push->second.packing;
  const auto found = claims_.find({session, task.transfer});
  bool wanted = found != claims_.end() && found->second.push == task.handle;
  if (wanted) {
    Claim& claim = found->second;
    if (status.ok()) {
      sessions_.at(session).moved_at = now;
      await_room(task.handle, found_push->second, now);
      ++claim.num_boxes;
      claim.num_units += task.box.num_units();
      claim.num_bytes += packed_bytes(cache_, task.box);
    } else {
      wanted = false;
      end_push(task.handle, FailCode::kPack, status.message(), now, out);
    }
  }
  settle(task.handle, now, out);
  return wanted;
}

}  // namespace kvpush::protocol
