// The data path: posts, messages, and what polling finds.
#include "transport/nixl/nixl_transport.hpp"

#include <cstring>
#include <utility>

#include "transport/nixl/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kMaxChecksPerPoll = 128;
constexpr TimeUs kSweepEveryUs = 1'000'000;
// NIXL queues any number of notifications without telling: bound what one turn of a session may add.
constexpr std::uint32_t kMaxSendsPerPoll = 1024;

// An agent serves many sessions: every notification starts with the session's id and its kind.
constexpr std::size_t kPrefixBytes = sizeof(Uuid::bytes) + 1;

}  // namespace

Sent NixlTransport::post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
                         ByteView notice) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lost || found->second.memory) return Sent::kLost;
  NixlSession& to = found->second;
  // Before D has spoken it counts its landing as quiet.
  if (!to.heard || to.num_posts >= max_posts_) return Sent::kAgain;
  if (slot >= to.remote.num_slots || source.size() > to.remote.slot_bytes ||
      notice.size() > kNixlMaxMessageBytes) {
    due_.emplace_back(ticket, Fate::kFailed);
    return Sent::kYes;
  }
  const ByteView payload = frame(session, Kind::kNotice, notice);
  if (source.empty()) {
    const Sent sent = notify(to, payload);
    if (sent == Sent::kYes) due_.emplace_back(ticket, Fate::kCompleted);
    return sent;
  }
  const std::uint64_t destination = to.remote.base_address + slot * to.remote.slot_bytes;
  auto request = agent_->create_write(to.agent, source, destination, to.remote.place, payload);
  if (!request.ok()) {
    if (!agent_->knows(to.agent)) {
      lose_all_of(to.agent, request.status().message());
      return Sent::kLost;
    }
    due_.emplace_back(ticket, Fate::kFailed);
    return Sent::kYes;
  }
  to.spoke = true;
  const NixlCode code = agent_->post(request.value());
  NixlPost posted{.request = request.value(), .session = session, .ticket = ticket, .agent = to.agent};
  posted.connection = peers_.retain(to.agent);
  ++to.num_posts;
  if (code == kNixlInProgress) {
    posts_.add(std::move(posted));
  } else {
    agent_->release(request.value());
    on_ended({std::move(posted), code});
  }
  return Sent::kYes;
}

Sent NixlTransport::send(const SessionId& session, ByteView message) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lost) return Sent::kLost;
  NixlSession& to = found->second;
  const bool speaks_first = to.memory.has_value();
  if (to.agent.empty() || (!speaks_first && !to.heard)) return Sent::kAgain;
  if (message.size() > kNixlMaxMessageBytes) {
    lose(session, to,
         "a message of " + std::to_string(message.size()) + " bytes, the limit is " +
             std::to_string(kNixlMaxMessageBytes));
    return Sent::kLost;
  }
  if (std::exchange(to.turn, turn_) != turn_) to.num_sends = 0;
  if (to.num_sends >= kMaxSendsPerPoll) return Sent::kAgain;
  ++to.num_sends;
  return notify(to, frame(session, Kind::kMessage, message));
}

void NixlTransport::poll(TransportSink& sink) {
  ++turn_;
  for (const NixlPosts::Ended& ended : posts_.drive(kMaxChecksPerPoll)) on_ended(ended);
  deliver(sink);
  agent_->notifications([&](const char* agent, ByteView payload) { dispatch(sink, agent, payload); });
  deliver(sink);
  if (const TimeUs now = monotonic_us(); now >= next_sweep_) {
    next_sweep_ = now + kSweepEveryUs;
    find_dead_peers();
    peers_.sweep(now);
  }
}

ByteView NixlTransport::frame(const SessionId& session, Kind kind, ByteView payload) {
  const ByteView id = std::as_bytes(std::span(session.bytes));
  frame_.assign(id.begin(), id.end());
  frame_.push_back(static_cast<std::byte>(kind));
  frame_.insert(frame_.end(), payload.begin(), payload.end());
  return frame_;
}

Sent NixlTransport::notify(NixlSession& session, ByteView payload) {
  const NixlCode code = agent_->notify(session.agent, payload);
  if (code >= 0) {
    session.spoke = true;
    return Sent::kYes;
  }
  lose_all_of(session.agent, "nixl gen_notif: " + describe_nixl_code(code));
  return Sent::kLost;
}

void NixlTransport::lose(const SessionId& id, NixlSession& session, const std::string& reason) {
  if (std::exchange(session.lost, true)) return;
  lost_.emplace_back(id, reason);
}

void NixlTransport::lose_all_of(const std::string& agent, const std::string& reason) {
  if (peers_.mark_broken(agent)) ++counters_->broken_peers;
  for (auto& [id, session] : sessions_) {
    if (session.agent == agent) lose(id, session, reason);
  }
}

void NixlTransport::on_ended(const NixlPosts::Ended& ended) {
  const NixlPost& post = ended.post;
  settle_account(post, ended.code == kNixlOk);
  if (!post.orphaned) {
    due_.emplace_back(post.ticket, ended.code == kNixlOk ? Fate::kCompleted : Fate::kUnknown);
  }
  if (ended.leaked) ++counters_->leaked_requests;
  if (ended.code != kNixlOk) {
    ++counters_->failed_posts;
    const std::string reason = "nixl write: " + describe_nixl_code(ended.code);
    // All sessions with an agent share its endpoint, and that does not recover from an error.
    if (peers_.is_current(post.agent, post.connection)) lose_all_of(post.agent, reason);
    if (const auto found = sessions_.find(post.session); found != sessions_.end()) {
      lose(post.session, found->second, reason);
    }
  }
  peers_.release(post.agent, monotonic_us());
}

void NixlTransport::settle_account(const NixlPost& post, bool completed) {
  if (const auto open = sessions_.find(post.session); open != sessions_.end()) {
    --open->second.num_posts;
    if (!completed) open->second.unknown.push_back(post.ticket);
    return;
  }
  const auto draining = draining_.find(post.session);
  if (draining == draining_.end() || !completed) return;
  std::vector<TicketId>& unknown = draining->second.unknown;
  if (std::erase(unknown, post.ticket) != 0) settled_.push_back(post.ticket);
  if (!unknown.empty()) return;
  announce(draining->second.agent, post.session, Kind::kQuiet);
  draining_.erase(draining);
}

void NixlTransport::announce(const std::string& agent, const SessionId& session, Kind kind) {
  if (peers_.is_usable(agent)) static_cast<void>(agent_->notify(agent, frame(session, kind, {})));
}

void NixlTransport::on_closed(const SessionId& session, const std::string& agent, Kind kind) {
  if (const auto closed = closed_.find(session); closed != closed_.end() && closed->second.agent == agent) {
    closed->second.quiet |= kind == Kind::kQuiet;
    return;
  }
  const auto open = sessions_.find(session);
  if (open == sessions_.end()) return;
  if (open->second.agent.empty()) open->second.closed_by = agent;
  if (open->second.agent != agent) return;
  open->second.peer_quiet |= kind == Kind::kQuiet;
  lose(session, open->second, "the peer closed the session");
}

void NixlTransport::find_dead_peers() {
  for (const auto& [id, session] : sessions_) {
    if (session.lost || session.agent.empty() || !proven_dead(session.process, process_)) continue;
    lose_all_of(session.agent, "process " + std::to_string(session.process.pid) + " of the peer is gone");
  }
  std::erase_if(draining_, [&](const auto& entry) {
    if (!proven_dead(entry.second.process, process_)) return false;
    const std::vector<TicketId>& unknown = entry.second.unknown;
    settled_.insert(settled_.end(), unknown.begin(), unknown.end());
    return true;
  });
}

void NixlTransport::dispatch(TransportSink& sink, const char* agent, ByteView payload) {
  if (payload.size() < kPrefixBytes || payload.size() > kPrefixBytes + kNixlMaxMessageBytes) {
    ++counters_->dropped_notifications;
    return;
  }
  SessionId id;
  std::memcpy(id.bytes.data(), payload.data(), id.bytes.size());
  const auto kind = static_cast<Kind>(payload[kPrefixBytes - 1]);
  if (kind == Kind::kClosed || kind == Kind::kQuiet) return on_closed(id, agent, kind);
  const auto found = sessions_.find(id);
  // A notice to the side without a landing is as foreign as one of another agent.
  const bool expected = found != sessions_.end() && !found->second.lost && found->second.agent == agent &&
                        (kind == Kind::kMessage || (kind == Kind::kNotice && found->second.memory));
  if (!expected) {
    ++counters_->dropped_notifications;
    return;
  }
  found->second.heard = true;
  if (kind == Kind::kMessage) {
    sink.on_message(id, payload.subspan(kPrefixBytes));
  } else {
    sink.on_notice(id, payload.subspan(kPrefixBytes));
  }
}

void NixlTransport::deliver(TransportSink& sink) {
  for (const auto& [ticket, fate] : std::exchange(due_, {})) sink.on_completed(ticket, fate);
  for (const TicketId ticket : std::exchange(settled_, {})) sink.on_settled(ticket);
  for (const auto& [session, reason] : std::exchange(lost_, {})) {
    if (sessions_.contains(session)) sink.on_lost(session, reason);
  }
}

Result<std::unique_ptr<Transport>> make_nixl_transport(const NixlOptions& options) {
  if (options.backends.empty() || options.max_posts_per_session == 0) {
    return Status(Code::kInvalidArgument, "nixl: name at least one backend, and allow at least one post");
  }
  if (options.device_slots && !options.device) {
    return Status(Code::kInvalidArgument,
                  "nixl_device_memory (KVPUSH_NIXL_DEVICE_MEMORY) is set and this "
                  "engine's cache is in host memory: set it to false");
  }
  if (options.device_slots && options.device->direct_writes() == CudaDirectWrites::kUnordered) {
    return Status(
        Code::kUnsupported,
        "nixl_device_memory (KVPUSH_NIXL_DEVICE_MEMORY) is set and " + options.device->name() +
            " can neither order nor flush what a NIC writes into its memory, so that a box could be "
            "read before it is there: set it to false");
  }
  auto api = load_nixl_api(options.library_path);
  if (!api.ok()) return api.status();
  auto agent = NixlAgent::create(std::move(api).value(), nixl_agent_name(options.incarnation),
                                 options.backends, options.device_slots ? options.device : nullptr);
  if (!agent.ok()) return agent.status();
  return std::unique_ptr<Transport>(std::make_unique<NixlTransport>(options, std::move(agent).value()));
}

}  // namespace kvpush
