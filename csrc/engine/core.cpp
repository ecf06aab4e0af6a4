// What one engine does in a turn.
#include "engine/core.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kDefaultSlotBytes = std::size_t{1} << 20U;
constexpr std::size_t kPageBytes = 4096;
// Room for what the calls of 65,536 open transfers may say in one turn.
constexpr std::size_t kMaxBacklogBytes = std::size_t{64} << 20U;
constexpr TimeUs kBusyAfterBoxUs = 2000;
constexpr std::size_t kMaxCreditsPerMessage = 1024;

std::size_t slot_bytes_for(const Cache& cache, const CoreConfig& config) {
  if (config.slot_bytes != 0) return config.slot_bytes;
  const std::size_t pages = (cache.max_unit_bytes() + kPageBytes - 1) / kPageBytes;
  return std::max(kDefaultSlotBytes, pages * kPageBytes);
}

}  // namespace

Status Core::check(const Cache& cache, const CoreConfig& config) {
  KVPUSH_TRY(cache.validate());
  const std::size_t slot_bytes = slot_bytes_for(cache, config);
  if (slot_bytes < cache.max_unit_bytes()) {
    return {Code::kInvalidArgument,
            "slot_bytes is " + std::to_string(slot_bytes) + ", but the largest unit of the cache is " +
                std::to_string(cache.max_unit_bytes()) + " bytes; raise slot_bytes or leave it at 0"};
  }
  if (config.num_slots == 0 || config.num_leases == 0) {
    return {Code::kInvalidArgument, "num_slots is " + std::to_string(config.num_slots) +
                                        " and num_leases is " + std::to_string(config.num_leases) +
                                        "; both must be at least 1"};
  }
  if (slot_bytes * config.num_slots > config.landing_bytes) {
    return {Code::kInvalidArgument, "landing_bytes is " + std::to_string(config.landing_bytes) +
                                        ", less than one landing of " + std::to_string(config.num_slots) +
                                        " x " + std::to_string(slot_bytes) +
                                        " bytes; raise it or lower num_slots"};
  }
  return {};
}

Core::Core(const Cache& cache, const CoreConfig& config, Transport& transport, Packer& packer,
           const Incarnation& incarnation, TimeUs now, std::function<Uuid()> new_id)
    : cache_(cache),
      config_(config),
      identity_(cache.identity()),
      packer_(packer),
      incarnation_(incarnation),
      new_id_(std::move(new_id)),
      sender_(cache, config.timeouts, config.max_claims),
      receiver_(cache, config.timeouts),
      gate_(sender_, receiver_, packer),
      now_(now),
      last_turn_(now),
      moved_at_(now - kBusyAfterBoxUs) {
  config_.slot_bytes = slot_bytes_for(cache, config);
  add(transport);
}

void Core::add(Transport& transport) {
  carriers_.emplace_back(transport, config_.slot_bytes, config_.num_leases);
}

// --- what arrives

void Core::on_message(const SessionId& id, ByteView message) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.state != State::kOpen) return;
  Session& session = found->second;
  progressed_ = true;
  ++stats_.messages_received;
  std::vector<protocol::Body> bodies;
  if (const Status status = session.link.take_message(message, now_, bodies); !status.ok()) {
    actions_.breaches.emplace_back(id, status.message());
  }
  if (!session.heard && session.role == Role::kPushes) {
    if (measures(session)) {
      session.probes_left = kNumProbes;
    } else {
      say_path(id, session);
    }
  }
  session.heard = true;
  for (const protocol::Body& body : bodies) {
    if (std::holds_alternative<protocol::Bye>(body)) {
      close(id, FailCode::kPeerClosed, "the peer said goodbye");
      return;
    }
    const bool from_d = body.index() <= 4;
    if (from_d != (session.role == Role::kPushes)) {
      actions_.breaches.emplace_back(id, std::string(name_of(body)) + " from the wrong side");
    } else if (const auto* credit = std::get_if<protocol::Credit>(&body)) {
      for (const std::uint32_t slot : credit->slots) {
        const bool held =
            std::find(session.free_slots.begin(), session.free_slots.end(), slot) != session.free_slots.end();
        if (slot >= session.num_slots || held) {
          actions_.breaches.emplace_back(id, "CREDIT of slot " + std::to_string(slot) + ", which is not D's");
        } else {
          session.free_slots.push_back(slot);
        }
      }
    } else {
      session.active_at = now_;
      if (from_d) {
        sender_.on_message(id, body, now_, actions_);
      } else {
        receiver_.on_message(id, body, now_, actions_);
      }
    }
  }
}

void Core::on_notice(const SessionId& id, ByteView notice) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.state != State::kOpen) return;
  Session& session = found->second;
  progressed_ = true;
  const auto taken = session.link.take_notice(notice, now_);
  if (!taken.ok() || session.role != Role::kReceives) {
    actions_.breaches.emplace_back(id, taken.ok() ? "BOX from the wrong side" : taken.status().message());
    return;
  }
  if (!taken.value()) {
    ++stats_.boxes_discarded;
    return;
  }
  if (taken.value()->transfer == protocol::kProbe) {
    moved_at_ = now_;
    if (taken.value()->checksum != 0) measured(id, session, taken.value()->checksum);
    receiver_.on_box(id, *taken.value(), now_, actions_);
    return;
  }
  moved_at_ = session.active_at = now_;
  ++stats_.boxes_received;
  const std::size_t before = actions_.unpacks.size();
  receiver_.on_box(id, *taken.value(), now_, actions_);
  if (actions_.unpacks.size() == before) ++stats_.boxes_discarded;
}

void Core::on_completed(TicketId ticket, Fate fate) {
  const auto found = work_.find(ticket);
  if (found == work_.end()) return;
  progressed_ = true;
  const Work work = std::move(found->second);
  work_.erase(found);
  const auto owner = sessions_.find(work.session);
  if (work.kind == Work::Kind::kProbe && fate == Fate::kCompleted && owner != sessions_.end() &&
      owner->second.state == State::kOpen) {
    probed(work.session, owner->second, work);
  } else if (work.lease.data != nullptr) {
    if (fate == Fate::kUnknown) {
      work.carrier->leases.quarantine(ticket, work.lease);
    } else {
      work.carrier->leases.give_back(work.lease);
    }
  }
  if (work.kind == Work::Kind::kPost) stats_.post_us += static_cast<std::uint64_t>(now_ - work.started_at);
  if (owner == sessions_.end()) return;
  --owner->second.posts;
  if (fate == Fate::kUnknown) owner->second.unknown_fate = true;
  if (fate == Fate::kCompleted) {
    owner->second.link.box_completed();
  } else {
    close(work.session, FailCode::kTransport,
          fate == Fate::kFailed ? "a post failed" : "a post failed, its fate unknown");
  }
}

void Core::on_lost(const SessionId& id, const std::string& reason) {
  close(id, FailCode::kPeerLost, reason);
}

// --- work

void Core::carry_out() {
  while (!actions_.breaches.empty() || !actions_.unpacks.empty()) {
    for (auto& [id, why] : std::exchange(actions_.breaches, {})) {
      ++stats_.breaches;
      log(LogLevel::kWarning, "session " + to_string(id) + ": breach of protocol: " + why);
      close(id, FailCode::kBreach, std::move(why));
    }
    for (protocol::Unpack& unpack : std::exchange(actions_.unpacks, {})) start_unpack(std::move(unpack));
  }
  for (const auto& [id, slot] : std::exchange(actions_.credits, {})) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end() && found->second.state == State::kOpen)
      found->second.owed_credits.push_back(slot);
  }
  for (auto& [id, body] : std::exchange(actions_.messages, {})) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end() && found->second.state == State::kOpen) {
      enqueue(id, found->second, found->second.link.seal(std::move(body)));
    }
  }
  for (protocol::Event& event : std::exchange(actions_.events, {})) {
    const auto code = static_cast<std::size_t>(event.status);
    if (event.kind == protocol::Event::Kind::kSent) {
      ++stats_.pushes_sent;
    } else if (event.kind == protocol::Event::Kind::kReceived) {
      ++stats_.receives_done;
    } else if (event.side == protocol::Event::Side::kPush) {
      ++stats_.push_failures[code];
    } else {
      ++stats_.receive_failures[code];
    }
    events_.push_back(std::move(event));
    progressed_ = true;
  }
}

void Core::start_unpack(protocol::Unpack unpack) {
  const auto found = sessions_.find(unpack.session);
  const TicketId ticket = next_ticket_++;
  Session& session = found->second;
  std::byte* const landing = session.carrier->transport.landing(unpack.session).data;
  const PackJob job{ticket, PackJob::Kind::kUnpack, unpack.box, unpack.block_ids,
                    landing + unpack.slot * session.slot_bytes};
  ++session.local_work;
  Work work{Work::Kind::kUnpack, unpack.session, {}, std::move(unpack), 0, {}, now_, nullptr};
  work.slot = work.unpack.slot;
  work_.emplace(ticket, std::move(work));
  packer_.start(job);
}

void Core::finish_packs() {
  done_.clear();
  packer_.poll(done_);
  for (const PackDone& done : done_) {
    progressed_ = true;
    moved_at_ = now_;
    const auto found = work_.find(done.ticket);
    Work work = std::move(found->second);
    work_.erase(found);
    --sessions_.at(work.session).local_work;
    const auto spent = static_cast<std::uint64_t>(done.copy_us);
    if (work.kind == Work::Kind::kPack) {
      stats_.pack_us += spent;
      packed(std::move(work), done.ticket, done);
    } else {
      stats_.unpack_us += spent;
      stats_.bytes_received += packed_bytes(cache_, work.unpack.box);
      receiver_.unpacked(work.unpack, done.checksum, done.status, now_, actions_);
    }
  }
}

void Core::packed(Work work, TicketId ticket, const PackDone& done) {
  Session& session = sessions_.at(work.session);
  const bool wanted = sender_.packed(work.session, work.task, done.status, now_, actions_);
  if (session.state != State::kOpen || !wanted) {
    session.free_slots.push_back(work.slot);
    if (work.lease.data != nullptr) work.carrier->leases.give_back(work.lease);
    return;
  }
  Post post{ticket, work.slot, {}, {}};
  const std::size_t bytes = packed_bytes(cache_, work.task.box);
  if (work.lease.data != nullptr) post.source = ByteView(work.lease.data, bytes);
  post.notice =
      session.link.seal(protocol::BoxNotice{work.task.transfer, work.slot, work.task.box, done.checksum});
  stats_.bytes_sent += bytes;
  ++stats_.boxes_sent;
  ++stats_.network_ops;
  const SessionId id = work.session;
  work.kind = Work::Kind::kPost;
  work.started_at = now_;
  work_.emplace(ticket, std::move(work));
  session.active_at = now_;
  this->post(id, session, std::move(post));
}

void Core::post(const SessionId& id, Session& session, Post post) {
  if (session.waiting_posts.empty()) {
    const Sent sent = session.carrier->transport.post(id, post.ticket, post.source, post.slot, post.notice);
    if (sent == Sent::kYes) {
      ++session.posts;
      return;
    }
    if (sent == Sent::kLost) {
      session.waiting_posts.push_back(std::move(post));
      close(id, FailCode::kTransport, "a post was refused");
      return;
    }
  }
  session.waiting_posts.push_back(std::move(post));
}

void Core::schedule() {
  // One box per session and round, from where the last turn stopped, so that no session starves.
  bool started = true;
  while (started) {
    started = false;
    auto it = sessions_.lower_bound(next_session_);
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      if (it == sessions_.end()) it = sessions_.begin();
      const auto current = it++;
      probe(current->first, current->second);
      if (start_pack(current->first, current->second)) {
        started = true;
        next_session_ = it == sessions_.end() ? SessionId{} : it->first;
      }
    }
    progressed_ |= started;
  }
}

bool Core::start_pack(const SessionId& id, Session& session) {
  if (session.role != Role::kPushes || session.state != State::kOpen || session.free_slots.empty() ||
      session.probes_left != 0 || !session.waiting_posts.empty() || !sender_.has_work(id)) {
    return false;
  }
  const std::uint32_t slot = session.free_slots.back();
  Carrier& carrier = *session.carrier;
  Region lease;
  Region memory;
  if (carrier.capabilities.mapped_slots) {
    memory = carrier.transport.slot_memory(id, slot);
    if (memory.data == nullptr) return false;
  } else {
    const auto taken = carrier.leases.take();
    if (!taken) return false;
    lease = memory = *taken;
  }
  std::optional<protocol::BoxTask> task = sender_.next_box(id);
  if (!task) {
    if (lease.data != nullptr) carrier.leases.give_back(lease);
    return false;
  }
  session.free_slots.pop_back();
  const TicketId ticket = next_ticket_++;
  const PackJob job{ticket, PackJob::Kind::kPack, task->box, task->block_ids, memory.data};
  ++session.local_work;
  work_.emplace(ticket, Work{Work::Kind::kPack, id, std::move(*task), {}, slot, lease, now_, &carrier});
  packer_.start(job);
  return true;
}

void Core::enqueue(const SessionId& id, Session& session, Bytes message) {
  if (session.backlog_bytes + message.size() > kMaxBacklogBytes) {
    close(id, FailCode::kPeerLost,
          "the peer takes no messages: " + std::to_string(session.backlog.size()) + " of " +
              std::to_string(session.backlog_bytes) + " bytes are waiting");
    return;
  }
  session.backlog_bytes += message.size();
  session.backlog.push_back(std::move(message));
}

void Core::flush() {
  std::vector<SessionId> lost;
  for (auto& [id, session] : sessions_) {
    if (session.state != State::kOpen) continue;
    Transport& transport = session.carrier->transport;
    std::vector<std::uint32_t>& owed = session.owed_credits;
    while (!owed.empty()) {
      const auto rest =
          owed.end() - static_cast<std::ptrdiff_t>(std::min(owed.size(), kMaxCreditsPerMessage));
      session.backlog.push_back(session.link.seal(protocol::Credit{{rest, owed.end()}}));
      session.backlog_bytes += session.backlog.back().size();
      owed.erase(rest, owed.end());
    }
    Sent sent = Sent::kYes;
    while (!session.backlog.empty() && sent == Sent::kYes) {
      sent = transport.send(id, session.backlog.front());
      if (sent != Sent::kYes) break;
      session.backlog_bytes -= session.backlog.front().size();
      session.backlog.pop_front();
      ++stats_.messages_sent;
      progressed_ = true;
    }
    while (!session.waiting_posts.empty() && sent != Sent::kLost) {
      const Post& post = session.waiting_posts.front();
      const Sent posted = transport.post(id, post.ticket, post.source, post.slot, post.notice);
      if (posted == Sent::kLost) sent = posted;
      if (posted != Sent::kYes) break;
      session.waiting_posts.pop_front();
      ++session.posts;
      progressed_ = true;
    }
    if (sent == Sent::kLost) lost.push_back(id);
  }
  for (const SessionId& id : lost) close(id, FailCode::kPeerLost, "the transport refused a message");
}

void Core::keep_time() {
  sender_.tick(now_, actions_);
  receiver_.tick(now_, actions_);
  std::vector<std::pair<SessionId, std::string>> lost;
  for (auto& [id, session] : sessions_) {
    if (session.state == State::kClosed) continue;
    if (!session.heard) {
      if (now_ - session.opened_at >= config_.timeouts.handshake_us)
        lost.emplace_back(id, "the hand-shake was not completed in time");
      continue;
    }
    if (session.link.ping_due(now_)) {
      if (session.carrier->transport.send(id, session.link.seal(protocol::Ping{})) == Sent::kYes) {
        ++stats_.messages_sent;
      } else {
        session.link.ping_refused(now_);
      }
    }
    if (auto why = session.link.check(now_)) lost.emplace_back(id, *std::move(why));
  }
  for (auto& [id, why] : lost) close(id, FailCode::kPeerLost, std::move(why));
}

bool Core::turn(TimeUs now) {
  progressed_ = false;
  const TimeUs late = now - std::exchange(last_turn_, now);
  now_ = now;
  if (late > config_.timeouts.peer_us / 2) {
    for (auto& [id, session] : sessions_) {
      session.link.restart_clocks(now);
      if (!session.heard) session.opened_at = now;
    }
  }
  progressed_ |= gate_.let_pass(now, actions_);
  for (Carrier& carrier : carriers_) carrier.transport.poll(*this);
  carry_out();
  finish_packs();
  carry_out();
  schedule();
  finish_packs();
  carry_out();
  keep_time();
  carry_out();
  flush();
  carry_out();
  retire();
  return progressed_;
}

TimeUs Core::next_deadline() const {
  TimeUs next = std::min(sender_.next_deadline(), receiver_.next_deadline());
  for (const auto& [id, session] : sessions_) {
    if (session.state == State::kClosed) {
      next = std::min(next, now_ + config_.timeouts.peer_us / 10);
    } else if (!session.heard) {
      next = std::min(next, session.opened_at + config_.timeouts.handshake_us);
    } else {
      next = std::min(next, session.link.next_deadline());
    }
  }
  return next;
}

bool Core::busy(TimeUs now) const {
  return !work_.empty() || now - moved_at_ < kBusyAfterBoxUs;
}

bool Core::open() const {
  return sender_.num_pushes() != 0 || receiver_.num_transfers() != 0 || fenced();
}

bool Core::copies_unseen() const {
  return packer_.wait_fd() < 0 &&
         std::ranges::any_of(sessions_, [](const auto& entry) { return entry.second.local_work != 0; });
}

Stats Core::stats() const {
  Stats stats = stats_;
  for (const auto& [id, session] : sessions_) {
    if (session.state != State::kOpen) continue;
    ++stats.sessions;
    stats.credits += session.free_slots.size();
  }
  stats.open_pushes = sender_.num_pushes();
  stats.open_claims = sender_.num_claims();
  stats.open_receives = receiver_.num_transfers();
  for (const Carrier& carrier : carriers_) stats.leases_in_use += carrier.leases.in_use();
  stats.landing_bytes = landing_bytes_in(State::kOpen);
  stats.quarantined_bytes = quarantined_bytes();
  return stats;
}

}  // namespace kvpush
