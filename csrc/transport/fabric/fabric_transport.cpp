// The data path: posts, messages, polling.
#include "transport/fabric/fabric_transport.hpp"

#include <algorithm>
#include <utility>

#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr TimeUs kSweepEveryUs = 1'000'000;
constexpr TimeUs kAnnounceForUs = 10'000'000;
constexpr std::size_t kMaxWritesPerBox = 4096;

}  // namespace

Sent FabricTransport::post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
                           ByteView notice) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lost || found->second.landing) return Sent::kLost;
  FabricSession& to = found->second;
  // Before D has spoken it counts its landing as quiet.
  if (!to.heard || to.num_posts >= max_posts_) return Sent::kAgain;
  const std::size_t num_writes =
      source.size() / max_write_bytes_ + (source.size() % max_write_bytes_ == 0 ? 0 : 1);
  if (slot >= to.remote.num_slots || source.size() > to.remote.slot_bytes ||
      notice.size() > kFabricMaxMessageBytes || num_writes > kMaxWritesPerBox) {
    due_.emplace_back(ticket, Fate::kFailed);
    return Sent::kYes;
  }
  FabricMessage* const message = operations_.take_message(
      session, FabricKind::kNotice, static_cast<std::uint32_t>(num_writes), to.num_writes, notice);
  if (message == nullptr) return Sent::kAgain;
  const PostId id = next_post_++;
  message->post = id;
  FabricPost& post = posts_[id];
  post = {.session = session,
          .ticket = ticket,
          .peer = to.peer,
          .source = source,
          .descriptor = descriptor_of(source),
          .address = to.remote.base + slot * to.remote.slot_bytes,
          .key = to.remote.key,
          .index = to.remote.index,
          .next_write = to.num_writes,
          .notice = message};
  const FabricStart started = advance(id, post);
  if (post.num_started == 0) {
    stop(post);
    posts_.erase(id);
    return started == FabricStart::kAgain ? Sent::kAgain : Sent::kLost;
  }
  ++to.peer->num_users;
  ++to.num_posts;
  to.num_writes += num_writes;
  if (started == FabricStart::kAgain) unstarted_.push_back(id);
  return Sent::kYes;
}

FabricStart FabricTransport::advance(PostId id, FabricPost& post) {
  FabricStart started = FabricStart::kYes;
  while (started == FabricStart::kYes && !post.source.empty()) {
    const ByteView part = post.source.first(std::min(post.source.size(), max_write_bytes_));
    FabricOperation& write = operations_.take_write();
    write.session = post.session;
    write.peer = post.peer;
    write.post = id;
    const std::uint32_t immediate =
        std::uint32_t{post.index} << 16U | static_cast<std::uint16_t>(post.next_write);
    started = endpoint_->write(post.peer->address, part, post.descriptor, immediate, post.address, post.key,
                               &write);
    if (started != FabricStart::kYes) {
      operations_.give_back(write);
      break;
    }
    ++post.num_started;
    ++post.next_write;
    post.address += part.size();
    post.source = post.source.subspan(part.size());
  }
  if (started == FabricStart::kYes && post.notice != nullptr) {
    started = start_message(*post.notice, *post.peer);
    if (started == FabricStart::kYes) {
      ++post.num_started;
      post.notice = nullptr;
    }
  }
  if (started == FabricStart::kAgain) refused_ = true;
  if (started == FabricStart::kNo) {
    lose(post.session, "libfabric refuses a box: " + endpoint_->error());
    post.failed = true;
    stop(post);
  }
  return started;
}

void FabricTransport::stop(FabricPost& post) {
  post.source = {};
  if (post.notice != nullptr) operations_.give_back(*std::exchange(post.notice, nullptr));
}

FabricStart FabricTransport::start_message(FabricMessage& message, FabricPeer& peer) {
  message.peer = &peer;
  const FabricStart started = endpoint_->send(peer.address, message.buffer.first(message.size_bytes),
                                              buffers_->registration->mem_desc, &message);
  if (started == FabricStart::kYes) ++peer.num_users;
  return started;
}

Sent FabricTransport::send(const SessionId& session, ByteView message) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lost) return Sent::kLost;
  FabricSession& to = found->second;
  const bool speaks_first = to.landing.has_value();
  if (to.peer == nullptr || (!speaks_first && !to.heard)) return Sent::kAgain;
  if (message.size() > kFabricMaxMessageBytes) {
    lose(session, "a message of " + std::to_string(message.size()) + " bytes, the limit is " +
                      std::to_string(kFabricMaxMessageBytes));
    return Sent::kLost;
  }
  FabricMessage* const taken = operations_.take_message(session, FabricKind::kMessage, 0, 0, message);
  if (taken == nullptr) return Sent::kAgain;
  const FabricStart started = start_message(*taken, *to.peer);
  if (started == FabricStart::kYes) {
    to.spoke = true;
    return Sent::kYes;
  }
  operations_.give_back(*taken);
  if (started == FabricStart::kAgain) {
    refused_ = true;
    return Sent::kAgain;
  }
  lose(session, "libfabric refuses a message: " + endpoint_->error());
  return Sent::kLost;
}

void FabricTransport::poll(TransportSink& sink) {
  refused_ = false;
  deliver(sink);
  read_queue(sink);
  post_receives();
  resume();
  send_announcements();
  if (const TimeUs now = monotonic_us(); now >= next_sweep_) {
    next_sweep_ = now + kSweepEveryUs;
    find_dead_peers();
    sweep_peers(now);
  }
  deliver(sink);
}

bool FabricTransport::arm_wait() {
  const bool has_news = !due_.empty() || !settled_.empty() || !lost_.empty();
  // What the provider had no room for is tried again at a poll: not every provider tells of room by its fd.
  const bool has_work =
      refused_ || !unstarted_.empty() || !announcements_.empty() || !operations_.idle_receives().empty();
  return has_news || has_work || !endpoint_->may_wait();
}

void FabricTransport::resume() {
  for (std::size_t left = unstarted_.size(); left > 0; --left) {
    const PostId id = unstarted_.front();
    unstarted_.pop_front();
    const auto found = posts_.find(id);
    if (found == posts_.end()) continue;
    if (advance(id, found->second) == FabricStart::kAgain) {
      unstarted_.push_back(id);
    } else {
      finish_if_over(id);
    }
  }
}

void FabricTransport::announce(FabricPeer& peer, const SessionId& session, FabricKind kind) {
  ++peer.num_users;
  announcements_.push_back(
      {.peer = &peer, .session = session, .kind = kind, .give_up_at = monotonic_us() + kAnnounceForUs});
  send_announcements();
}

void FabricTransport::send_announcements() {
  const TimeUs now = announcements_.empty() ? 0 : monotonic_us();
  for (std::size_t left = announcements_.size(); left > 0; --left) {
    const Announcement next = announcements_.front();
    announcements_.pop_front();
    FabricMessage* const message = operations_.take_message(next.session, next.kind, 0, 0, {});
    FabricStart started = FabricStart::kAgain;
    if (message != nullptr) {
      started = start_message(*message, *next.peer);
      if (started != FabricStart::kYes) operations_.give_back(*message);
    }
    if (started == FabricStart::kAgain && now < next.give_up_at) {
      announcements_.push_back(next);
    } else {
      release(*next.peer);
    }
  }
}

void FabricTransport::finish_if_over(PostId id) {
  const auto found = posts_.find(id);
  if (found == posts_.end()) return;
  const FabricPost& post = found->second;
  if (post.num_started != 0 || !post.source.empty() || post.notice != nullptr) return;
  on_post_over(post);
  posts_.erase(found);
}

void FabricTransport::on_post_over(const FabricPost& post) {
  release(*post.peer);
  // After an error libfabric leaves the source alone, but what it has sent may still arrive.
  if (!post.orphaned) due_.emplace_back(post.ticket, post.failed ? Fate::kUnknown : Fate::kCompleted);
  if ((post.orphaned || post.failed) && !post.settled) settled_.push_back(post.ticket);
  if (const auto open = sessions_.find(post.session); open != sessions_.end()) {
    --open->second.num_posts;
    open->second.uncertain |= post.failed;
    return;
  }
  const auto found = draining_.find(post.session);
  if (found == draining_.end()) return;
  FabricDraining& draining = found->second;
  draining.uncertain |= post.failed;
  if (--draining.num_posts != 0) return;
  if (!draining.uncertain) announce(*draining.peer, post.session, FabricKind::kQuiet);
  release(*draining.peer);
  draining_.erase(found);
}

void FabricTransport::lose(const SessionId& id, const std::string& reason) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || std::exchange(found->second.lost, true)) return;
  lost_.emplace_back(id, reason);
}

void FabricTransport::lose_all(const std::string& reason) {
  for (const auto& entry : sessions_) lose(entry.first, reason);
}

void FabricTransport::deliver(TransportSink& sink) {
  for (const auto& [ticket, fate] : std::exchange(due_, {})) sink.on_completed(ticket, fate);
  for (const TicketId ticket : std::exchange(settled_, {})) sink.on_settled(ticket);
  for (const auto& [session, reason] : std::exchange(lost_, {})) {
    if (sessions_.contains(session)) sink.on_lost(session, reason);
  }
}

Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& api,
                                                         const FabricOptions& options) {
  if (options.max_posts_per_session == 0 || options.max_write_bytes == 0) {
    return Status(Code::kInvalidArgument, "fabric: allow at least one post, and writes of a byte");
  }
  auto endpoint = FabricEndpoint::open(api, options.provider, kFabricBufferBytes);
  if (!endpoint.ok()) return endpoint.status();
  auto transport = std::make_unique<FabricTransport>(options, std::move(endpoint).value());
  KVPUSH_TRY(transport->start());
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvpush
