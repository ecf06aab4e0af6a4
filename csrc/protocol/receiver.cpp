#include "protocol/receiver.hpp"

#include <algorithm>
#include <utility>

namespace kvpush::protocol {

Wanted wanted_of(const Destination& destination) {
  Wanted wanted(destination.blocks.size());
  for (std::size_t g = 0; g < wanted.size(); ++g) {
    std::uint32_t pos = destination.first[g];
    for (const std::int32_t block : destination.blocks[g]) {
      if (block >= 0) {
        if (!wanted[g].empty() && wanted[g].back().end == pos) {
          ++wanted[g].back().end;
        } else {
          wanted[g].push_back({pos, pos + 1});
        }
      }
      ++pos;
    }
  }
  return wanted;
}

void Receiver::expect(const SessionId& session, TransferId transfer, const std::string& key, TimeUs,
                      Actions& out) {
  Transfer& entry = transfers_[transfer];
  entry.session = session;
  entry.key = key;
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) {
    // The session ended while the call was on its way; receive() will report it.
    entry.ending = FailCode::kPeerLost;
    entry.detail = "the session has ended";
    return;
  }
  found->second.last_transfer = transfer;
  entry.claimed = true;
  out.messages.emplace_back(session, Intent{transfer, key});
}

void Receiver::receive(const SessionId& session, TransferId transfer, HandleId handle, const std::string& key,
                       Bytes digest, Destination destination, TimeUs now, Actions& out) {
  const auto found = sessions_.find(session);
  const auto claim = transfers_.find(transfer);
  const bool gone =
      claim == transfers_.end() && found != sessions_.end() && transfer <= found->second.last_transfer;
  if (gone ||
      (claim != transfers_.end() && (claim->second.handle != 0 || claim->second.session != session))) {
    Event event;
    event.side = Event::Side::kReceive;
    event.handle = handle;
    event.key = key;
    event.transfer = transfer;
    event.session = session;
    event.status = FailCode::kCancelled;
    event.detail = "its claim was used or cancelled before";
    out.events.push_back(std::move(event));
    return;
  }
  Transfer& entry = transfers_[transfer];
  entry.session = session;
  entry.key = key;
  entry.handle = handle;
  entry.opened_at = now;
  if (found == sessions_.end() && entry.ending == FailCode::kNone) {
    entry.ending = FailCode::kPeerLost;
    entry.detail = "the session has ended";
  }
  if (entry.ending != FailCode::kNone) {
    settle(transfer, now, out);
    return;
  }
  found->second.last_transfer = std::max(found->second.last_transfer, transfer);
  Wanted wanted = wanted_of(destination);
  for (std::size_t g = 0; g < wanted.size(); ++g) {
    entry.group_begin.push_back(entry.arrived.size());
    entry.arrived.resize(entry.arrived.size() +
                         cache_.groups[g].planes.size() * destination.blocks[g].size());
    for (const PositionRange& range : wanted[g]) {
      entry.units_wanted += std::uint64_t{range.end - range.begin} * cache_.groups[g].planes.size();
    }
  }
  entry.destination = std::move(destination);
  if (entry.units_wanted == 0) {
    // P learns that its push is not needed; nothing is waited for.
    if (!entry.claimed) out.messages.emplace_back(session, Intent{transfer, key});
    out.messages.emplace_back(session, Cancel{transfer});
    entry.claimed = false;
    entry.end = End{transfer, 0, 0};
    settle(transfer, now, out);
    return;
  }
  entry.claimed = true;
  out.messages.emplace_back(session, Open{transfer, key, std::move(digest), std::move(wanted)});
  deadlines_.arm(transfer, now + timeouts_.pairing_us);
}

void Receiver::cancel(TransferId transfer, Actions& out) {
  const auto found = transfers_.find(transfer);
  if (found == transfers_.end()) return;
  const bool only_claimed = found->second.handle == 0;
  fail(transfer, FailCode::kCancelled, "cancelled here", true, out);
  if (only_claimed) transfers_.erase(found);
}

void Receiver::open_session(const SessionId& session, std::size_t slot_bytes, std::uint32_t num_slots) {
  sessions_[session] = Session{slot_bytes, std::vector<bool>(num_slots, true), 0};
}

void Receiver::close_session(const SessionId& session, FailCode code, Actions& out) {
  sessions_.erase(session);
  std::vector<TransferId> lost;
  for (const auto& [transfer, entry] : transfers_) {
    if (entry.session == session) lost.push_back(transfer);
  }
  for (const TransferId transfer : lost) fail(transfer, code, "the session ended", false, out);
}

void Receiver::on_message(const SessionId& session, const Body& body, TimeUs now, Actions& out) {
  TransferId transfer = 0;
  if (const auto* accept = std::get_if<Accept>(&body)) transfer = accept->transfer;
  if (const auto* end = std::get_if<End>(&body)) transfer = end->transfer;
  if (const auto* fail = std::get_if<Fail>(&body)) transfer = fail->transfer;

  const auto found = transfers_.find(transfer);
  if (found == transfers_.end() || found->second.session != session) {
    if (found != transfers_.end() || transfer > sessions_.at(session).last_transfer) {
      out.breaches.emplace_back(session, std::string(name_of(body)) + " of transfer " +
                                             std::to_string(transfer) + ", which was never issued to it");
    }
    return;
  }
  Transfer& entry = found->second;
  if (entry.ending != FailCode::kNone) return;
  if (const auto* failed = std::get_if<Fail>(&body)) {
    entry.claimed = false;
    fail(transfer, failed->code, "told by P", false, out);
    return;
  }
  if (entry.handle == 0) {
    out.breaches.emplace_back(session, std::string(name_of(body)) + " of transfer " +
                                           std::to_string(transfer) + " before its OPEN");
    return;
  }
  if (!entry.accepted) {
    entry.accepted = true;
    entry.accepted_at = now;
    deadlines_.arm(transfer, now + timeouts_.progress_us);
  }
  if (const auto* end = std::get_if<End>(&body)) {
    if (end->num_units != entry.units_wanted) {
      fail(transfer, FailCode::kBreach,
           "P ended with " + std::to_string(end->num_units) + " units, wanted were " +
               std::to_string(entry.units_wanted),
           true, out);
      return;
    }
    entry.end = *end;
    settle(transfer, now, out);
  }
}

void Receiver::on_box(const SessionId& session_id, const BoxNotice& box, TimeUs now, Actions& out) {
  Session& session = sessions_.at(session_id);
  if (box.slot >= session.with_peer.size() || !session.with_peer[box.slot]) {
    out.breaches.emplace_back(session_id,
                              "BOX in slot " + std::to_string(box.slot) + ", which was not credited");
    return;
  }
  session.with_peer[box.slot] = false;
  if (box.transfer == kProbe) return give_back(session_id, box.slot, out);
  const auto found = transfers_.find(box.transfer);
  const bool known = found != transfers_.end() && found->second.session == session_id;
  if ((!known && box.transfer > session.last_transfer) || (known && found->second.handle == 0)) {
    out.breaches.emplace_back(session_id, "BOX of transfer " + std::to_string(box.transfer) + ", not opened");
    return;
  }
  if (!known || found->second.ending != FailCode::kNone) {
    give_back(session_id, box.slot, out);
    return;
  }
  Transfer& entry = found->second;
  if (const std::string why = objection(entry, session, box.box); !why.empty()) {
    give_back(session_id, box.slot, out);
    fail(box.transfer, FailCode::kBreach, why, true, out);
    return;
  }
  for (std::uint32_t plane = box.box.plane_begin; plane < box.box.plane_end; ++plane) {
    for (std::uint32_t pos = box.box.pos_begin; pos < box.box.pos_end; ++pos) {
      entry.arrived[unit_index(entry, box.box, plane, pos)] = true;
    }
  }
  // A box can overtake the ACCEPT: notices and messages travel apart.
  if (!entry.accepted) {
    entry.accepted = true;
    entry.accepted_at = now;
  }
  if (entry.first_box_at == 0) entry.first_box_at = now;
  deadlines_.arm(box.transfer, now + timeouts_.progress_us);
  ++entry.unpacking;
  const auto& blocks = entry.destination.blocks[box.box.group];
  const std::uint32_t first = entry.destination.first[box.box.group];
  Unpack unpack{session_id, box.transfer, box.slot, box.box, box.checksum, {}};
  unpack.block_ids.assign(blocks.begin() + (box.box.pos_begin - first),
                          blocks.begin() + (box.box.pos_end - first));
  out.unpacks.push_back(std::move(unpack));
}

void Receiver::unpacked(const Unpack& unpack, std::uint64_t checksum, const Status& status, TimeUs now,
                        Actions& out) {
  give_back(unpack.session, unpack.slot, out);
  Transfer& entry = transfers_.at(unpack.transfer);
  --entry.unpacking;
  if (entry.ending == FailCode::kNone) {
    if (!status.ok()) {
      fail(unpack.transfer, FailCode::kPack, status.message(), true, out);
      return;
    }
    if (checksum != unpack.checksum) {
      fail(unpack.transfer, FailCode::kChecksum,
           "a box of " + std::to_string(unpack.box.num_units()) + " units", true, out);
      return;
    }
    entry.units_done += unpack.box.num_units();
    entry.num_bytes += packed_bytes(cache_, unpack.box);
    ++entry.num_boxes;
  }
  settle(unpack.transfer, now, out);
}

void Receiver::tick(TimeUs now, Actions& out) {
  for (const TransferId transfer : deadlines_.take_due(now)) {
    const bool accepted = transfers_.at(transfer).accepted;
    fail(transfer, accepted ? FailCode::kProgressTimeout : FailCode::kPairingTimeout,
         accepted ? "no box in time" : "no push of this key appeared at P in time", true, out);
  }
}

bool Receiver::busy(const SessionId& session) const {
  return std::any_of(transfers_.begin(), transfers_.end(),
                     [&](const auto& entry) { return entry.second.session == session; });
}

std::optional<TransferId> Receiver::last_transfer(const SessionId& session) const {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return std::nullopt;
  return found->second.last_transfer;
}

void Receiver::fail(TransferId transfer, FailCode code, std::string detail, bool tell, Actions& out) {
  const auto found = transfers_.find(transfer);
  if (found == transfers_.end()) return;
  Transfer& entry = found->second;
  if (entry.ending == FailCode::kNone) {
    entry.ending = code;
    entry.detail = std::move(detail);
    deadlines_.disarm(transfer);
    if (tell && entry.claimed) out.messages.emplace_back(entry.session, Cancel{transfer});
  }
  // A claim that P or the session ended stays until the caller opens or cancels it.
  if (entry.handle != 0) settle(transfer, 0, out);
}

/// Reports the transfer's end once nothing of it runs here.
void Receiver::settle(TransferId transfer, TimeUs now, Actions& out) {
  const auto found = transfers_.find(transfer);
  Transfer& entry = found->second;
  if (entry.unpacking != 0) return;
  if (entry.ending == FailCode::kNone) {
    if (!entry.end || entry.units_done != entry.units_wanted) return;
    if (entry.end->num_boxes != entry.num_boxes) {
      fail(transfer, FailCode::kBreach,
           "P counted " + std::to_string(entry.end->num_boxes) + " boxes, D " +
               std::to_string(entry.num_boxes),
           true, out);
      return;
    }
    if (entry.claimed) out.messages.emplace_back(entry.session, Done{transfer});
  }
  Event event;
  event.kind = entry.ending == FailCode::kNone ? Event::Kind::kReceived : Event::Kind::kFailed;
  event.side = Event::Side::kReceive;
  event.handle = entry.handle;
  event.key = entry.key;
  event.transfer = transfer;
  event.session = entry.session;
  event.status = entry.ending;
  event.detail = entry.detail;
  event.bytes = entry.num_bytes;
  event.boxes = entry.num_boxes;
  if (event.kind == Event::Kind::kReceived && entry.first_box_at != 0) {
    event.timings = {{"pairing_us", entry.accepted_at - entry.opened_at},
                     {"transfer_us", now - entry.first_box_at},
                     {"total_us", now - entry.opened_at}};
  }
  out.events.push_back(std::move(event));
  deadlines_.disarm(transfer);
  transfers_.erase(found);
}

void Receiver::give_back(const SessionId& session, std::uint32_t slot, Actions& out) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  found->second.with_peer[slot] = true;
  out.credits.emplace_back(session, slot);
}

std::string Receiver::objection(const Transfer& transfer, const Session& session, const Box& box) const {
  if (!box_fits(cache_, box)) return "box outside the cache";
  if (packed_bytes(cache_, box) > session.slot_bytes) return "box larger than its slot";
  const auto& blocks = transfer.destination.blocks[box.group];
  const std::uint32_t first = transfer.destination.first[box.group];
  if (box.pos_begin < first || box.pos_end - first > blocks.size()) return "box outside the wanted positions";
  for (std::uint32_t pos = box.pos_begin; pos < box.pos_end; ++pos) {
    if (blocks[pos - first] < 0) return "box over a hole";
    for (std::uint32_t plane = box.plane_begin; plane < box.plane_end; ++plane) {
      if (transfer.arrived[unit_index(transfer, box, plane, pos)]) return "units sent twice";
    }
  }
  return {};
}

std::size_t Receiver::unit_index(const Transfer& transfer, const Box& box, std::uint32_t plane,
                                 std::uint32_t pos) const {
  const std::size_t num_positions = transfer.destination.blocks[box.group].size();
  return transfer.group_begin[box.group] + plane * num_positions +
         (pos - transfer.destination.first[box.group]);
}

}  // namespace kvpush::protocol
