// How sessions of one engine begin and end.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "engine/core.hpp"

namespace kvpush {
namespace {

// Peers whose ended sessions are remembered. One that is forgotten frees its landing when this engine dies.
constexpr std::size_t kMaxQuietPeers = 256;

}  // namespace

// --- set-up

std::size_t Core::landing_bytes_in(State state) const {
  std::size_t bytes = 0;
  for (const auto& [id, session] : sessions_) {
    const bool closed = session.state == State::kClosed;
    if (session.role == Role::kReceives && closed == (state == State::kClosed)) {
      bytes += session.slot_bytes * session.num_slots;
    }
  }
  return bytes;
}

std::size_t Core::quarantined_bytes() const {
  std::size_t bytes = landing_bytes_in(State::kClosed);
  for (const Carrier& carrier : carriers_) bytes += carrier.leases.quarantined_bytes();
  return bytes;
}

Status Core::make_room(std::size_t bytes, TimeUs now) {
  const std::size_t quarantined = quarantined_bytes();
  if (quarantined > config_.max_quarantined_bytes) {
    return {Code::kExhausted,
            std::to_string(quarantined) +
                " bytes may still be written by peers that are gone; max_quarantined_bytes is " +
                std::to_string(config_.max_quarantined_bytes)};
  }
  if (sessions_.size() >= config_.max_sessions) {
    return {Code::kExhausted, "max_sessions (" + std::to_string(config_.max_sessions) + ") are open"};
  }
  while (landing_bytes_in(State::kOpen) + bytes > config_.landing_bytes) {
    auto idle = sessions_.end();
    for (auto it = sessions_.begin(); it != sessions_.end(); ++it) {
      const Session& session = it->second;
      if (session.role != Role::kReceives || session.state != State::kOpen || receiver_.busy(it->first))
        continue;
      if (idle == sessions_.end() || session.active_at < idle->second.active_at) idle = it;
    }
    if (idle == sessions_.end()) {
      return {Code::kExhausted,
              "landing_bytes (" + std::to_string(config_.landing_bytes) +
                  ") is spent and no session is idle; raise it or lower num_slots x slot_bytes"};
    }
    const SessionId id = idle->first;
    KVPUSH_TRY(disconnect(id, now));
  }
  return {};
}

/// P: one D may not fill all sessions. A landing that it never spoke for gives way to the next.
Status Core::make_room_for(const Incarnation& peer) {
  std::size_t num_open = 0;
  auto oldest = sessions_.end();
  for (auto it = sessions_.begin(); it != sessions_.end(); ++it) {
    const Session& session = it->second;
    if (session.role != Role::kPushes || session.state != State::kOpen || session.peer != peer) continue;
    ++num_open;
    if (!session.heard && (oldest == sessions_.end() || session.opened_at < oldest->second.opened_at)) {
      oldest = it;
    }
  }
  if (num_open < kMaxLandingsPerPeer) return {};
  if (oldest == sessions_.end()) {
    return {Code::kExhausted, "engine " + to_string(peer) + " has " + std::to_string(num_open) +
                                  " sessions here, the most allowed"};
  }
  close(oldest->first, FailCode::kPeerLost, "its D made further offers and never spoke here");
  return {};
}

Carrier* Core::find_carrier(std::string_view name) {
  const auto found =
      std::ranges::find_if(carriers_, [&](Carrier& carrier) { return carrier.transport.name() == name; });
  return found == carriers_.end() ? nullptr : &*found;
}

Result<Bytes> Core::offer(TimeUs now, const Choice& choice) {
  now_ = now;
  Carrier* const carrier = choice.transport.empty() ? &carriers_.front() : find_carrier(choice.transport);
  if (carrier == nullptr) {
    return Status(Code::kUnsupported, "transport '" + choice.transport + "' is not open here");
  }
  const std::size_t bytes = config_.slot_bytes * config_.num_slots;
  KVPUSH_TRY(make_room(bytes, now));
  Offer offer;
  static_cast<Uuid&>(offer.session) = new_id_();
  Result<Bytes> description =
      carrier->transport.open_landing(offer.session, config_.slot_bytes, config_.num_slots);
  if (!description.ok()) return description.status();
  offer.engine = incarnation_;
  offer.transport = carrier->transport.name();
  offer.slot_bytes = config_.slot_bytes;
  offer.num_slots = config_.num_slots;
  offer.identity = identity_;
  offer.description = std::move(description).value();
  Session session(Role::kReceives, State::kOffered, {}, *carrier, link_to({}, now), now);
  session.rated_as = choice.peer;
  session.awaits_rate = choice.tells_rate && !carrier->capabilities.mapped_slots;
  session.num_slots = config_.num_slots;
  session.slot_bytes = config_.slot_bytes;
  sessions_.emplace(offer.session, std::move(session));
  return encode(offer);
}

Result<Bytes> Core::answer(ByteView bytes, TimeUs now) {
  now_ = now;
  Result<Offer> decoded = decode_offer(bytes);
  if (!decoded.ok()) return decoded.status();
  const Offer& offer = decoded.value();
  if (offer.engine == incarnation_) return Status(Code::kHandshake, "the offer is this engine's own");
  if (const auto found = sessions_.find(offer.session); found != sessions_.end()) {
    if (found->second.role == Role::kPushes && found->second.state == State::kOpen)
      return found->second.answer;
    return Status(Code::kHandshake, "this offer's session has ended; make a new offer");
  }
  Carrier* const carrier = find_carrier(offer.transport);
  if (carrier == nullptr) {
    std::string ours;
    for (const Carrier& one : carriers_)
      ours += (ours.empty() ? "" : ", ") + std::string(one.transport.name());
    return Status(Code::kHandshake, "transport: theirs " + offer.transport + ", ours " + ours +
                                        "; configure the same on both sides");
  }
  if (const std::string difference = first_difference(offer.identity, identity_); !difference.empty()) {
    return Status(Code::kHandshake, difference);
  }
  const std::size_t box_bytes = carrier->capabilities.mapped_slots
                                    ? offer.slot_bytes
                                    : std::min<std::size_t>(offer.slot_bytes, carrier->leases.lease_bytes());
  if (box_bytes < cache_.max_unit_bytes() || offer.num_slots == 0 || offer.num_slots > kMaxSlots) {
    return Status(Code::kHandshake, "slots: theirs " + std::to_string(offer.num_slots) + " x " +
                                        std::to_string(offer.slot_bytes) + " bytes; 1 to " +
                                        std::to_string(kMaxSlots) + " are allowed, and our largest unit is " +
                                        std::to_string(cache_.max_unit_bytes()) + " bytes");
  }
  KVPUSH_TRY(make_room(0, now));
  KVPUSH_TRY(make_room_for(offer.engine));
  Result<Bytes> description =
      carrier->transport.accept(offer.session, offer.description, offer.slot_bytes, offer.num_slots);
  if (!description.ok()) return description.status();

  Answer answer;
  answer.engine = incarnation_;
  answer.session = offer.session;
  answer.box_bytes = box_bytes;
  if (const auto quiet = quiet_.find(offer.engine); quiet != quiet_.end()) {
    answer.quiet_sessions.assign(quiet->second.begin(), quiet->second.end());
  }
  answer.description = std::move(description).value();

  Session session(Role::kPushes, State::kOpen, offer.engine, *carrier, link_to(offer.engine, now), now);
  session.awaits_rate = measures(session);
  session.num_slots = offer.num_slots;
  session.slot_bytes = offer.slot_bytes;
  for (std::uint32_t slot = 0; slot < offer.num_slots; ++slot) session.free_slots.push_back(slot);
  session.answer = encode(answer);
  sender_.open_session(offer.session, box_bytes);
  ++stats_.sessions_opened;
  return sessions_.emplace(offer.session, std::move(session)).first->second.answer;
}

Result<SessionId> Core::establish(ByteView bytes, TimeUs now) {
  now_ = now;
  Result<Answer> decoded = decode_answer(bytes);
  if (!decoded.ok()) return decoded.status();
  const Answer& answer = decoded.value();
  const auto found = sessions_.find(answer.session);
  if (found == sessions_.end() || found->second.role != Role::kReceives) {
    return Status(Code::kHandshake,
                  "the answer is to an offer that this engine did not make, or that has expired");
  }
  Session& session = found->second;
  if (session.state != State::kOffered) {
    return Status(Code::kHandshake, "the offer was answered before, or has expired; make a new one");
  }
  if (answer.box_bytes < cache_.max_unit_bytes() || answer.box_bytes > session.slot_bytes) {
    return Status(Code::kHandshake, "box size: theirs " + std::to_string(answer.box_bytes) + ", our slots " +
                                        std::to_string(session.slot_bytes) + " bytes");
  }
  if (Status status = session.carrier->transport.connect(answer.session, answer.description); !status.ok()) {
    if (session.rated_as != Incarnation{}) {
      rates_.note(session.rated_as, std::string(session.carrier->transport.name()), 0);
    }
    close(answer.session, FailCode::kTransport, status.message());
    return status;
  }
  // A session that ended since the last turn is told of before it goes.
  carry_out();
  retire();
  for (const SessionId& quiet : answer.quiet_sessions) {
    const auto old = sessions_.find(quiet);
    if (old == sessions_.end()) continue;
    // Whose the peer of an offer was that this engine gave up before the answer came, only the peer knows.
    const bool theirs = old->second.peer == answer.engine || old->second.peer == Incarnation{};
    if (theirs && old->second.state == State::kClosed && old->second.local_work == 0 &&
        old->second.role == Role::kReceives && old->second.carrier->transport.release_landing(quiet)) {
      sessions_.erase(old);
    }
  }
  session.state = State::kOpen;
  session.peer = answer.engine;
  session.link = link_to(answer.engine, now);
  session.heard = true;
  session.active_at = now;
  receiver_.open_session(answer.session, answer.box_bytes, session.num_slots);
  ++stats_.sessions_opened;
  const bool is_over_hello = session.rated_as != Incarnation{};
  if (session.carrier->capabilities.mapped_slots || (is_over_hello && !session.awaits_rate)) {
    say_path(answer.session, session);
  }
  return answer.session;
}

Result<Core::Link> Core::link(const SessionId& id) const {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.state != State::kOpen) {
    return Status(Code::kPeerLost, "no open session " + to_string(id));
  }
  const Session& session = found->second;
  return Link{std::string(session.carrier->transport.name()), session.bytes_per_s, session.awaits_rate};
}

Status Core::withdraw(ByteView bytes, TimeUs now) {
  now_ = now;
  const Result<Offer> offer = decode_offer(bytes);
  if (!offer.ok()) return offer.status();
  if (offer.value().engine != incarnation_) return {Code::kHandshake, "the offer is another engine's"};
  const auto found = sessions_.find(offer.value().session);
  if (found != sessions_.end() && found->second.state == State::kOffered) {
    close(found->first, FailCode::kCancelled, "the offer was withdrawn");
  }
  return {};
}

Status Core::disconnect(const SessionId& id, TimeUs now) {
  now_ = now;
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.state != State::kOpen) {
    return {Code::kPeerLost, "no open session " + to_string(id)};
  }
  if (found->second.heard) say_bye(id, found->second);
  close(id, FailCode::kPeerClosed, "disconnected here");
  carry_out();
  return {};
}

void Core::say_bye(const SessionId& id, Session& session) {
  flush();
  const Bytes bye = session.link.seal(protocol::Bye{});
  if (session.backlog.empty() && session.carrier->transport.send(id, bye) == Sent::kYes) {
    ++stats_.messages_sent;
  }
}

void Core::shut_down(TimeUs now) {
  now_ = now;
  sender_.abort_all(FailCode::kEngineClosed, "the engine was closed", now, actions_);
  carry_out();
  std::vector<SessionId> open;
  for (const auto& [id, session] : sessions_) {
    if (session.state != State::kClosed) open.push_back(id);
  }
  for (const SessionId& id : open) {
    Session& session = sessions_.at(id);
    if (session.state == State::kOpen && session.heard) say_bye(id, session);
    close(id, FailCode::kEngineClosed, "the engine was closed");
  }
  gate_.close(now, actions_);
  carry_out();
}

// --- sessions end

void Core::close(const SessionId& id, FailCode code, std::string reason) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.state == State::kClosed) return;
  Session& session = found->second;
  const bool was_open = session.state == State::kOpen;
  progressed_ = true;
  session.state = State::kClosed;
  session.ended = code;
  session.reason = std::move(reason);
  session.lost_reported = !was_open;
  log(was_open ? LogLevel::kInfo : LogLevel::kDebug,
      "session " + to_string(id) + " ended: " + std::string(to_string(code)) + ": " + session.reason);
  Leases& leases = session.carrier->leases;
  for (const Post& post : session.waiting_posts) {
    const auto work = work_.find(post.ticket);
    if (work->second.lease.data != nullptr) leases.give_back(work->second.lease);
    work_.erase(work);
  }
  session.waiting_posts.clear();
  if (session.probe_lease.data != nullptr) leases.give_back(std::exchange(session.probe_lease, {}));
  session.backlog.clear();
  session.backlog_bytes = 0;
  if (session.role == Role::kPushes) {
    sender_.close_session(id, code, now_, actions_);
  } else if (was_open) {
    // A path that never carried what should measure it is tried last.
    if (session.awaits_rate && session.rated_as != Incarnation{} &&
        (code == FailCode::kPeerLost || code == FailCode::kTransport)) {
      rates_.note(session.rated_as, std::string(session.carrier->transport.name()), 0);
    }
    gate_.close_session(id, now_, actions_);
    receiver_.close_session(id, code, actions_);
  }
  if (was_open) ++stats_.sessions_ended;
}

void Core::retire() {
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    Session& session = it->second;
    if (session.state != State::kClosed || session.local_work != 0) {
      ++it;
      continue;
    }
    if (!session.lost_reported) {
      session.lost_reported = true;
      protocol::Event event;
      event.kind = protocol::Event::Kind::kLost;
      event.session = it->first;
      event.status = session.ended;
      event.detail = session.reason;
      events_.push_back(std::move(event));
    }
    // Not before: a running pack may be writing into a mapped slot.
    Transport& transport = session.carrier->transport;
    if (!std::exchange(session.transport_closed, true)) transport.close_session(it->first);
    bool over = false;
    if (session.role == Role::kReceives) {
      over = transport.landing_quiet(it->first) && transport.release_landing(it->first);
    } else if (session.posts == 0) {
      over = true;
      if (!session.unknown_fate) {
        if (quiet_.size() > kMaxQuietPeers) quiet_.erase(quiet_.begin());
        auto& quiet = quiet_[session.peer];
        quiet.push_back(it->first);
        if (quiet.size() > kMaxQuietSessions) quiet.pop_front();
      }
    }
    it = over ? sessions_.erase(it) : std::next(it);
  }
}

}  // namespace kvpush
