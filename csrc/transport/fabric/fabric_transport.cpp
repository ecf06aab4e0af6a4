// The data path: posts, messages, polling.
#include "transport/fabric/fabric_transport.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "transport/fabric/revocation.hpp"
#include "transport/fabric/topology.hpp"
#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr TimeUs kSweepEveryUs = 1'000'000;
constexpr TimeUs kAnnounceForUs = 10'000'000;
constexpr std::size_t kPartAlignment = 4096;

}  // namespace

Sent FabricTransport::post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
                           ByteView notice) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.lost || found->second.landing) return Sent::kLost;
  FabricSession& to = found->second;
  // Before D has spoken it counts its landing as quiet.
  if (!to.heard || to.num_posts >= max_posts_) return Sent::kAgain;
  if (slot >= to.remote.num_slots || source.size() > to.remote.slot_bytes ||
      notice.size() > kFabricMaxMessageBytes) {
    due_.emplace_back(ticket, Fate::kFailed);
    return Sent::kYes;
  }
  const std::size_t part_bytes = part_of(source.size(), *to.peer, to.remote.max_writes);
  const std::size_t num_writes = source.size() / part_bytes + (source.size() % part_bytes == 0 ? 0 : 1);
  // A rail that lags behind the others must not take the 16 bits of a number round: half of what D can tell
  // apart, since D may read the queue of one rail later than another's.
  const std::uint64_t oldest = to.unfinished.empty() ? to.num_writes : *to.unfinished.begin();
  if (to.num_writes + num_writes - oldest > FabricArrivals::kWindow / 2) return Sent::kAgain;
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
          .staging = staging_of(source),
          .part_bytes = part_bytes,
          .offset = slot * to.remote.slot_bytes,
          .index = to.remote.index,
          .first_write = to.num_writes,
          .num_writes = num_writes,
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
  if (num_writes != 0) to.unfinished.insert(to.num_writes);
  to.num_writes += num_writes;
  if (started == FabricStart::kAgain) unstarted_.push_back(id);
  return Sent::kYes;
}

std::size_t FabricTransport::part_of(std::size_t size_bytes, const FabricPeer& peer,
                                     std::uint32_t max_writes) const {
  const std::size_t num_stripes = std::clamp<std::size_t>(
      size_bytes / min_stripe_bytes_, 1, std::min<std::size_t>(num_best_lanes(peer), max_writes));
  const std::size_t stripe = (size_bytes + num_stripes - 1) / num_stripes;
  const std::size_t aligned = (stripe + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  return std::max<std::size_t>(1, std::min({aligned, size_bytes, max_write_bytes_}));
}

FabricStart FabricTransport::advance(PostId id, FabricPost& post) {
  FabricStart started = FabricStart::kYes;
  while (started == FabricStart::kYes && !post.source.empty()) {
    started = start_write(id, post);
    if (started == FabricStart::kYes) ++post.num_started;
  }
  if (started == FabricStart::kYes && post.notice != nullptr) {
    started = start_message(*post.notice, *post.peer);
    if (started == FabricStart::kYes) {
      ++post.num_started;
      ++post.peer->num_users;
      post.notice = nullptr;
    }
  }
  if (started == FabricStart::kNo) {
    lose(post.session, "no rail takes a box: " + refusal_);
    post.failed = true;
    stop(post);
  }
  return started;
}

void FabricTransport::stop(FabricPost& post) {
  post.source = {};
  if (post.notice != nullptr) operations_.give_back(*std::exchange(post.notice, nullptr));
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
    ++to.peer->num_users;
    to.spoke = true;
    return Sent::kYes;
  }
  operations_.give_back(*taken);
  if (started == FabricStart::kAgain) return Sent::kAgain;
  lose(session, "no rail takes a message: " + refusal_);
  return Sent::kLost;
}

void FabricTransport::poll(TransportSink& sink) {
  if (std::exchange(pins_, false)) pin_thread();
  refused_ = false;
  deliver(sink);
  for (std::uint32_t rail = 0; rail < rails_.size(); ++rail) read_queue(sink, rail);
  post_receives();
  resend();
  resume();
  send_announcements();
  start_trials();
  if (const TimeUs now = monotonic_us(); now >= next_sweep_) {
    next_sweep_ = now + kSweepEveryUs;
    find_dead_peers();
    sweep_peers(now);
  }
  deliver(sink);
}

void FabricTransport::pin_thread() {
  const int node = rails_.front().numa_node;
  const bool pinned = node >= 0 && Topology(sysfs_).pin_thread(node);
  log(pinned ? LogLevel::kInfo : LogLevel::kWarning,
      std::string("fabric: the progress thread is ") + (pinned ? "" : "not ") + "pinned to NUMA node " +
          std::to_string(node) + " of rail " + rails_.front().label);
}

bool FabricTransport::arm_wait() {
  const bool has_news = !due_.empty() || !settled_.empty() || !lost_.empty();
  // What the provider had no room for is tried again at a poll: not every provider tells of room by its fd.
  const bool has_work = refused_ || !unstarted_.empty() || !announcements_.empty() || !resends_.empty();
  return has_news || has_work || std::any_of(rails_.begin(), rails_.end(), [](FabricRail& rail) {
           return !rail.out && (!rail.idle_receives.empty() || !rail.endpoint->may_wait());
         });
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
      if (started == FabricStart::kYes) {
        ++next.peer->num_users;
      } else {
        operations_.give_back(*message);
      }
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
    if (post.num_writes != 0) open->second.unfinished.erase(post.first_write);
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

void FabricTransport::deliver(TransportSink& sink) {
  for (const auto& [ticket, fate] : std::exchange(due_, {})) sink.on_completed(ticket, fate);
  for (const TicketId ticket : std::exchange(settled_, {})) sink.on_settled(ticket);
  for (const auto& [session, reason] : std::exchange(lost_, {})) {
    if (sessions_.contains(session)) sink.on_lost(session, reason);
  }
}

namespace {

Result<std::unique_ptr<Transport>> make_over(const std::shared_ptr<const FabricApi>& api,
                                             const FabricOptions& options, FabricRailInfos chosen) {
  std::vector<FabricRail> rails;
  for (std::size_t i = 0; i < chosen.infos.size(); ++i) {
    auto endpoint =
        FabricEndpoint::open(api, std::move(chosen.infos[i]), chosen.delivers, options.queue_entries,
                             options.device_slots ? options.device : nullptr);
    if (!endpoint.ok()) return endpoint.status();
    const FabricNic& nic = chosen.nics[i];
    FabricRail& rail = rails.emplace_back();
    rail.label = nic.domain + (nic.address.empty() ? "" : " " + nic.address);
    rail.numa_node = nic.numa_node;
    rail.endpoint = std::move(endpoint).value();
    log(LogLevel::kInfo, "fabric rail " + std::to_string(i) + ": " + nic.protocol + ", " + rail.label +
                             ", PCI " + (nic.pci.empty() ? "unknown" : nic.pci) + ", NUMA node " +
                             std::to_string(nic.numa_node));
  }
  const FabricRevocation revocation = fabric_revocation(chosen.nics.front().provider);
  log(LogLevel::kInfo, std::string("fabric: access to landings ") +
                           (revocation.revokes ? "is revoked: " : "cannot be revoked: ") + revocation.reason);
  auto transport = std::make_unique<FabricTransport>(options, chosen.nics.front().protocol, std::move(rails),
                                                     chosen.delivers, revocation.revokes);
  KVPUSH_TRY(transport->start());
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace

Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& api,
                                                         const FabricOptions& options) {
  if (options.max_posts_per_session == 0 || options.max_write_bytes == 0 || options.min_stripe_bytes == 0 ||
      options.queue_entries < kFabricMinQueueEntries) {
    return Status(Code::kInvalidArgument, "fabric: allow at least one post, writes and stripes of a byte, " +
                                              std::to_string(kFabricMinQueueEntries) + " queue entries");
  }
  if (options.rails.size() > kFabricMaxRails) {
    return Status(Code::kInvalidArgument, "fabric_rails: " + std::to_string(options.rails.size()) +
                                              " rails, the limit is " + std::to_string(kFabricMaxRails));
  }
  if (options.device_slots && !options.device) {
    return Status(Code::kInvalidArgument,
                  "fabric_device_memory (KVPUSH_FABRIC_DEVICE_MEMORY) is set and this engine's cache is in "
                  "host memory: set it to false");
  }
  if (options.device_slots && options.device->direct_writes() == CudaDirectWrites::kUnordered) {
    return Status(
        Code::kUnsupported,
        "fabric_device_memory (KVPUSH_FABRIC_DEVICE_MEMORY) is set and " + options.device->name() +
            " can neither order nor flush what a NIC writes into its memory, so that a box could be "
            "read before it is there: set it to false");
  }
  const FabricChoice choice{.provider = options.provider,
                            .rails = options.rails,
                            .gpu_pci = options.device ? options.device->pci() : std::string(),
                            .device_memory = options.device_slots,
                            .sysfs = options.sysfs};
  Status why;
  for (const bool delivers : {true, false}) {
    auto chosen = choose_fabric_nics(*api, choice, delivers);
    why = chosen.status();
    if (!why.ok()) continue;
    auto made = make_over(api, options, std::move(chosen).value());
    if (made.ok()) return made;
    why = made.status();
  }
  if (!options.device_slots || why.code() != Code::kUnsupported) return why;
  return Status(why.code(), why.message() +
                                "; fabric_device_memory (KVPUSH_FABRIC_DEVICE_MEMORY) set to "
                                "false uses pinned host memory");
}

}  // namespace kvpush
