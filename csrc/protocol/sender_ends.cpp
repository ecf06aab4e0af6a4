// How a push of P ends: sent, failed, or too late.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "protocol/sender.hpp"

namespace kvpush::protocol {

void Sender::end_push(HandleId handle, FailCode code, std::string detail, TimeUs now, Actions& out) {
  const auto found = pushes_.find(handle);
  if (found == pushes_.end() || found->second.ending != FailCode::kNone) return;
  Push& push = found->second;
  push.ending = code;
  push.detail = std::move(detail);
  push_deadlines_.disarm(handle);

  Key& entry = keys_.at(push.key);
  entry.push = 0;
  entry.tombstone = code;
  key_deadlines_.arm(push.key, now + timeouts_.pairing_us);
  const std::vector<ClaimId> claims = entry.claims;
  for (const ClaimId& id : claims) {
    fail_claim(id, code, out);
  }
  settle(handle, now, out);
}

/// Brings a push as far as it can go: more boxes, END and `sent`, or `failed`.
void Sender::settle(HandleId handle, TimeUs now, Actions& out) {
  const auto found = pushes_.find(handle);
  if (found == pushes_.end()) return;
  Push& push = found->second;
  Event event;
  event.side = Event::Side::kPush;
  event.handle = handle;
  event.key = push.key;
  if (push.ending != FailCode::kNone) {
    if (push.packing != 0) return;
    event.kind = Event::Kind::kFailed;
    event.status = push.ending;
    event.detail = push.detail;
    out.events.push_back(std::move(event));
    pushes_.erase(found);
    return;
  }
  if (!push.claim) return;
  const ClaimId id = *push.claim;
  Claim& claim = claims_.at(id);
  bool missing = false;
  if (wants_more(claim, push, missing)) {
    if (missing) {
      fail_claim(id, FailCode::kMissing, out);
      if (keys_.at(push.key).claims.empty()) {
        end_push(handle, FailCode::kMissing, "D wanted a position that was never advanced", now, out);
      } else {
        arm(handle, now);
      }
    } else {
      queue_if_ready(id, claim);
    }
    return;
  }
  if (!push.finished || push.packing != 0) return;
  out.messages.emplace_back(id.first, End{id.second, claim.num_boxes, claim.num_units});
  claim.ended = true;
  claim.push = 0;
  event.kind = Event::Kind::kSent;
  event.session = id.first;
  event.transfer = id.second;
  event.bytes = claim.num_bytes;
  event.boxes = claim.num_boxes;
  event.timings = {{"pairing_us", push.paired_at - push.pushed_at},
                   {"sent_after_finish_us", now - push.finished_at},
                   {"total_us", now - push.pushed_at}};
  out.events.push_back(std::move(event));
  const std::string key = push.key;
  Key& entry = keys_.at(key);
  entry.push = 0;
  std::erase(entry.claims, id);
  push_deadlines_.disarm(handle);
  pushes_.erase(found);
  drop_key_if_idle(key);
}

void Sender::arm(HandleId handle, TimeUs now) {
  const auto found = pushes_.find(handle);
  if (found == pushes_.end()) return;
  const Push& push = found->second;
  if (!push.finished || push.claim || push.ending != FailCode::kNone) return;
  const bool claimed = !keys_.at(push.key).claims.empty();
  push_deadlines_.arm(handle, claimed ? push.finished_at + timeouts_.claim_us : now + timeouts_.unclaimed_us);
}

/// D cancels what does not move; one that does not even do that must not keep P's blocks.
void Sender::await_room(HandleId handle, const Push& push, TimeUs now) {
  if (push.finished && push.claim) push_deadlines_.arm(handle, now + timeouts_.progress_us);
}

void Sender::tick(TimeUs now, Actions& out) {
  for (const HandleId handle : push_deadlines_.take_due(now)) {
    const Push& push = pushes_.at(handle);
    if (push.claim) {
      // Its turn may not have come: what counts is that D takes boxes at all.
      const TimeUs due = sessions_.at(push.claim->first).moved_at + timeouts_.progress_us;
      if (due > now) {
        push_deadlines_.arm(handle, due);
        continue;
      }
      end_push(handle, FailCode::kProgressTimeout, "D made no room for a box in time", now, out);
      continue;
    }
    const bool claimed = !keys_.at(push.key).claims.empty();
    end_push(handle, claimed ? FailCode::kClaimExpired : FailCode::kUnclaimed,
             claimed ? "claimed but not opened in time" : "no D asked for it in time", now, out);
  }
  for (const std::string& key : key_deadlines_.take_due(now)) {
    Key& entry = keys_.at(key);
    entry.tombstone = FailCode::kNone;
    set_only_cancelled(entry, false);
    drop_key_if_idle(key);
  }
}

TimeUs Sender::next_deadline() const {
  return std::min(push_deadlines_.next(), key_deadlines_.next());
}

void Sender::set_only_cancelled(Key& entry, bool only_cancelled) {
  if (entry.only_cancelled == only_cancelled) return;
  entry.only_cancelled = only_cancelled;
  if (only_cancelled) {
    ++num_only_cancelled_;
  } else {
    --num_only_cancelled_;
  }
}

void Sender::drop_key_if_idle(const std::string& key) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return;
  const Key& entry = found->second;
  if (entry.push == 0 && entry.claims.empty() && entry.tombstone == FailCode::kNone &&
      !entry.only_cancelled) {
    key_deadlines_.disarm(key);
    keys_.erase(found);
  }
}

}  // namespace kvpush::protocol
