// Set-up and end of sessions and of registered memory.
#include <algorithm>
#include <thread>
#include <utility>

#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr TimeUs kLastWordsUs = 200'000;
constexpr std::size_t kMaxWritesPerBox = 4096;

struct Deaf final : TransportSink {
  void on_message(const SessionId& /*session*/, ByteView /*message*/) override {}
  void on_notice(const SessionId& /*session*/, ByteView /*notice*/) override {}
  void on_completed(TicketId /*ticket*/, Fate /*fate*/) override {}
  void on_lost(const SessionId& /*session*/, const std::string& /*reason*/) override {}
  void on_settled(TicketId /*ticket*/) override {}
};

Status invalid(const SessionId& session, const std::string& why) {
  return {Code::kInvalidArgument, "fabric session " + to_string(session) + ": " + why};
}

}  // namespace

FabricTransport::FabricTransport(const FabricOptions& options, std::string protocol,
                                 std::vector<FabricRail> rails, bool delivers, bool revokes)
    : incarnation_(options.incarnation),
      protocol_(std::move(protocol)),
      max_posts_(options.max_posts_per_session),
      min_stripe_bytes_(options.min_stripe_bytes),
      try_again_us_(options.try_again_us),
      stall_us_(options.stall_us),
      revoke_after_us_(options.revoke_after_us),
      pin_budget_us_(options.pin_budget_us),
      delivers_(delivers),
      revokes_(revokes),
      sysfs_(options.sysfs),
      pins_(options.pin_thread),
      device_(options.device),
      device_slots_(options.device_slots),
      counters_(options.counters ? options.counters : std::make_shared<FabricCounters>()),
      process_(this_process()),
      rails_(std::move(rails)),
      max_write_bytes_(options.max_write_bytes) {
  for (const FabricRail& rail : rails_) {
    max_write_bytes_ = std::min(max_write_bytes_, rail.endpoint->max_write_bytes());
    queue_entries_ = std::min(queue_entries_, rail.endpoint->queue_entries());
  }
}

Status FabricTransport::start() {
  // Messages are the CPU's, also where slots are a GPU's.
  auto buffers = register_everywhere(
      RemoteMemory::map(FabricOperations::buffer_bytes(rails_.size()), nullptr, 0), kFiSend | kFiRecv, false);
  if (!buffers.ok()) return buffers.status();
  buffers_ = std::move(buffers).value();
  operations_.use(buffers_->memory.region().data);
  std::vector<int> fds;
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    const FabricEndpoint& endpoint = *rails_[i].endpoint;
    rails_[i].idle_receives =
        operations_.add_receives(static_cast<std::uint32_t>(i), endpoint.max_receives());
    fds.push_back(endpoint.wait_fd());
  }
  post_receives();
  return wait_.open(fds);
}

FabricTransport::~FabricTransport() {
  // Closing the endpoints would drop the last words: that a session is closed, that its landing is quiet.
  Deaf nobody;
  for (const TimeUs end = monotonic_us() + kLastWordsUs;
       (!announcements_.empty() || operations_.num_messages() != 0) && monotonic_us() < end;) {
    poll(nobody);
    std::this_thread::yield();
  }
  // Ends all operations, so that nothing of this side is read or written any more.
  for (FabricRail& rail : rails_) rail.endpoint->shut();
  for (auto& [id, session] : sessions_) {
    if (session.landing) free_landing(*session.landing);
  }
  for (auto& [id, closed] : closed_) free_landing(closed.landing);
}

Result<FabricMemory> FabricTransport::allocate_slots(std::size_t size_bytes, std::uint64_t access) const {
  return register_everywhere(device_slots_ ? RemoteMemory::allocate(size_bytes, device_)
                                           : RemoteMemory::map(size_bytes, device_, pin_budget_us_),
                             access, device_slots_);
}

Result<FabricMemory> FabricTransport::register_everywhere(Result<RemoteMemory> memory, std::uint64_t access,
                                                          bool on_device) const {
  if (!memory.ok()) return memory.status();
  FabricMemory registered{std::move(memory).value(), {}};
  for (const FabricRail& rail : rails_) {
    registered.registrations.emplace_back();
    if (rail.out) continue;
    auto registration = rail.endpoint->register_memory(registered.memory.region(), access, on_device);
    if (!registration.ok()) return registration.status();
    registered.registrations.back() = std::move(registration).value();
  }
  return registered;
}

void FabricTransport::free_landing(FabricLanding& landing) {
  landing.memory.registrations.clear();
  landing.memory.memory.retire();
  by_index_.erase(landing.index);
  num_kept_entries_ -= landing.num_entries;
}

Result<std::uint16_t> FabricTransport::take_index(const SessionId& session) {
  constexpr std::size_t kNumIndices = std::size_t{UINT16_MAX} + 1;
  if (by_index_.size() == kNumIndices) return Status(Code::kExhausted, "fabric: 65536 landings are open");
  // In turn, so that a late immediate of a session that has ended finds nobody.
  while (by_index_.contains(next_index_)) ++next_index_;
  by_index_.emplace(next_index_, session);
  return next_index_++;
}

Result<std::size_t> FabricTransport::keep_entries(std::uint32_t num_slots, std::uint32_t max_writes) const {
  // A quarter is for this side's writes. Each landing may get all of its boxes over one rail at once.
  const std::size_t for_messages = FabricOperations::kNumSends + FabricOperations::kNumReceives;
  const std::size_t room = queue_entries_ - queue_entries_ / 4 - for_messages;
  const std::size_t wanted = std::size_t{num_slots} * max_writes;
  if (wanted <= room - num_kept_entries_) return wanted;
  return Status(Code::kExhausted,
                "fabric: a landing of " + std::to_string(num_slots) + " slots needs " +
                    std::to_string(wanted) + " entries of the completion queue, which has " +
                    std::to_string(room - num_kept_entries_) + " of " + std::to_string(room) + " left");
}

std::size_t FabricTransport::num_parts(std::size_t size_bytes) const {
  return size_bytes / max_write_bytes_ + (size_bytes % max_write_bytes_ == 0 ? 0 : 1);
}

Result<Bytes> FabricTransport::open_landing(const SessionId& session, std::size_t slot_bytes,
                                            std::uint32_t num_slots) {
  if (is_known(session)) return invalid(session, "it exists");
  if (slot_bytes == 0 || num_slots == 0 || slot_bytes > SIZE_MAX / num_slots) {
    return invalid(session, "a landing of " + std::to_string(num_slots) + " slots of " +
                                std::to_string(slot_bytes) + " bytes");
  }
  if (std::all_of(rails_.begin(), rails_.end(), [](const FabricRail& rail) { return rail.out; })) {
    return Status(Code::kTransport, "fabric: no rail is left; an engine made anew opens them again");
  }
  const std::size_t max_writes = std::max(rails_.size(), num_parts(slot_bytes));
  if (max_writes > kMaxWritesPerBox) {
    return invalid(session, "slots of " + std::to_string(slot_bytes) + " bytes, in writes of " +
                                std::to_string(max_write_bytes_));
  }
  const auto kept = keep_entries(num_slots, static_cast<std::uint32_t>(max_writes));
  if (!kept.ok()) return kept.status();
  auto memory = allocate_slots(slot_bytes * num_slots, kFiRemoteWrite);
  if (!memory.ok()) return memory.status();
  const auto index = take_index(session);
  if (!index.ok()) return index.status();
  num_kept_entries_ += kept.value();
  FabricSession& opened = sessions_[session];
  opened.landing = FabricLanding{std::move(memory).value(), index.value(), kept.value()};
  return describe(session, &opened.landing->memory,
                  {.slot_bytes = slot_bytes,
                   .num_slots = num_slots,
                   .max_writes = static_cast<std::uint32_t>(max_writes),
                   .index = index.value()});
}

Region FabricTransport::landing(const SessionId& session) {
  if (const auto open = sessions_.find(session); open != sessions_.end()) {
    return open->second.landing ? open->second.landing->memory.memory.region() : Region{};
  }
  const auto closed = closed_.find(session);
  return closed != closed_.end() ? closed->second.landing.memory.memory.region() : Region{};
}

Result<Bytes> FabricTransport::accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                                      std::uint32_t num_slots) {
  if (is_known(session)) return invalid(session, "it exists");
  auto understood = understand(session, description);
  if (!understood.ok()) return understood.status();
  const FabricDescription& peer = understood.value();
  if (peer.landing.num_slots == 0 || peer.landing.slot_bytes != slot_bytes ||
      peer.landing.num_slots != num_slots) {
    return Status(Code::kHandshake, "fabric: the landing has " + std::to_string(peer.landing.num_slots) +
                                        " slots of " + std::to_string(peer.landing.slot_bytes) +
                                        " bytes, the offer says " + std::to_string(num_slots) + " of " +
                                        std::to_string(slot_bytes));
  }
  if (num_parts(slot_bytes) > peer.landing.max_writes) {
    return Status(Code::kHandshake, "fabric: slots of " + std::to_string(slot_bytes) + " bytes take " +
                                        std::to_string(num_parts(slot_bytes)) + " writes of " +
                                        std::to_string(max_write_bytes_) +
                                        " bytes here, the peer has room for " +
                                        std::to_string(peer.landing.max_writes));
  }
  const auto acquired = acquire(peer);
  if (!acquired.ok()) return acquired.status();
  FabricSession& opened = sessions_[session];
  opened.peer = acquired.value();
  opened.remote = peer.landing;
  opened.remote_rails = peer.rails;
  opened.process = peer.process;
  return describe(session, nullptr, {});
}

Status FabricTransport::connect(const SessionId& session, ByteView description) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || !found->second.landing) return invalid(session, "no landing is open");
  if (found->second.peer != nullptr) return invalid(session, "it is connected already");
  const auto understood = understand(session, description);
  if (!understood.ok()) return understood.status();
  const FabricDescription& peer = understood.value();
  if (peer.landing.num_slots != 0) return {Code::kHandshake, "fabric: the answer carries a landing"};
  const auto acquired = acquire(peer);
  if (!acquired.ok()) return acquired.status();
  found->second.peer = acquired.value();
  found->second.process = peer.process;
  if (found->second.closed_early) lose(session, "the peer closed before it was connected");
  return {};
}

Result<FabricPeer*> FabricTransport::acquire(const FabricDescription& peer) {
  auto known = peers_.find(peer.incarnation);
  if (known == peers_.end()) {
    auto made = make_peer(peer);
    if (!made.ok()) return made.status();
    known = peers_.emplace(peer.incarnation, std::move(made).value()).first;
  }
  bool reaches = false;
  for (FabricLane& lane : known->second.lanes) {
    if (lane.remote >= peer.rails.size() || !peer.rails[lane.remote].alive) {
      lane.state = FabricLane::State::kGone;
    }
    reaches |= lane.state != FabricLane::State::kGone;
  }
  if (!reaches) return Status(Code::kHandshake, "fabric: no rail that still works leads to the peer");
  ++known->second.num_users;
  return &known->second;
}

void FabricTransport::release(FabricPeer& peer) {
  if (--peer.num_users == 0) peer.idle_since = monotonic_us();
}

Result<Region> FabricTransport::allocate_staging(std::size_t size_bytes) {
  auto memory = allocate_slots(size_bytes, kFiWrite);
  if (!memory.ok()) return memory.status();
  staging_.push_back(std::move(memory).value());
  return staging_.back().memory.region();
}

void FabricTransport::release_staging(Region region) {
  std::erase_if(staging_, [&](const FabricMemory& each) { return each.memory.region().data == region.data; });
}

Status FabricTransport::clear_staging(Region region) {
  const FabricMemory* const staging = staging_of({region.data, region.size_bytes});
  if (staging == nullptr) return {Code::kTransport, "fabric: not staging memory"};
  return staging->memory.clear(region.size_bytes);
}

const FabricMemory* FabricTransport::staging_of(ByteView source) const {
  for (const FabricMemory& each : staging_) {
    const Region region = each.memory.region();
    if (source.data() >= region.data && source.data() < region.data + region.size_bytes) return &each;
  }
  return nullptr;
}

void FabricTransport::close_session(const SessionId& session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  FabricSession closing = std::move(found->second);
  sessions_.erase(found);
  if (closing.landing) {
    if (closing.peer != nullptr) announce(*closing.peer, session, FabricKind::kClosed);
    closed_.emplace(session, FabricClosedLanding{.landing = std::move(*closing.landing),
                                                 .process = std::move(closing.process),
                                                 .revoke_at = monotonic_us() + revoke_after_us_,
                                                 .quiet = closing.peer_quiet || !closing.spoke});
  } else {
    const bool quiet = closing.num_posts == 0 && !closing.uncertain && delivers_;
    announce(*closing.peer, session, quiet ? FabricKind::kQuiet : FabricKind::kClosed);
    if (closing.num_posts != 0) {
      ++closing.peer->num_users;
      draining_.emplace(session, FabricDraining{.peer = closing.peer,
                                                .process = std::move(closing.process),
                                                .num_posts = closing.num_posts,
                                                .uncertain = closing.uncertain || !delivers_});
      orphan_posts(session);
    }
  }
  if (closing.peer != nullptr) release(*closing.peer);
}

void FabricTransport::orphan_posts(const SessionId& session) {
  std::vector<PostId> orphans;
  for (auto& [id, post] : posts_) {
    if (post.session != session || std::exchange(post.orphaned, true)) continue;
    due_.emplace_back(post.ticket, Fate::kUnknown);
    ++counters_->orphaned_posts;
    stop(post);
    orphans.push_back(id);
  }
  for (const PostId id : orphans) finish_if_over(id);
}

bool FabricTransport::landing_quiet(const SessionId& session) {
  const auto closed = closed_.find(session);
  if (closed == closed_.end()) return false;
  return is_quiet(closed->second);
}

bool FabricTransport::is_quiet(FabricClosedLanding& closed) const {
  if (!closed.quiet) closed.quiet = proven_dead(closed.process, process_);
  // Not at once: a write that is refused ends its whole connection, and the peer may be about to say that it
  // has written its last.
  if (!closed.quiet && revokes_ && monotonic_us() >= closed.revoke_at) {
    bool revoked = true;
    for (FidHandle<FidMr>& registration : closed.landing.memory.registrations) {
      if (registration == nullptr) continue;
      FidMr* const region = registration.release();
      revoked &= region->fid.ops->close(&region->fid) == 0;
    }
    closed.quiet = revoked;
    closed.revoke_at = kNever;
  }
  return closed.quiet;
}

bool FabricTransport::release_landing(const SessionId& session) {
  const auto closed = closed_.find(session);
  if (closed == closed_.end()) return true;
  if (!landing_quiet(session)) return false;
  free_landing(closed->second.landing);
  closed_.erase(closed);
  return true;
}

bool FabricTransport::is_known(const SessionId& session) const {
  return sessions_.contains(session) || closed_.contains(session) || draining_.contains(session);
}

Bytes FabricTransport::describe(const SessionId& session, const FabricMemory* memory,
                                const FabricLandingInfo& landing) const {
  FabricDescription description{.session = session,
                                .incarnation = incarnation_,
                                .protocol = protocol_,
                                .process = process_,
                                .rails = {},
                                .landing = landing};
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    FabricRailInfo& rail = description.rails.emplace_back();
    rail.endpoint = rails_[i].endpoint->name();
    rail.alive = !rails_[i].out;
    if (memory == nullptr || rails_[i].out) continue;
    if (rails_[i].endpoint->by_address()) {
      rail.base = reinterpret_cast<std::uintptr_t>(memory->memory.region().data);
    }
    rail.key = memory->registrations[i]->key;
  }
  return encode(description);
}

Result<FabricDescription> FabricTransport::understand(const SessionId& session, ByteView description) const {
  auto decoded = decode_fabric_description(description);
  if (!decoded.ok()) return decoded;
  const FabricDescription& peer = decoded.value();
  if (peer.session != session) {
    return Status(Code::kHandshake, "fabric: the description is of session " + to_string(peer.session) +
                                        ", expected " + to_string(session));
  }
  if (peer.incarnation == incarnation_) {
    return Status(Code::kHandshake, "fabric: the peer is this engine itself, " + to_string(incarnation_));
  }
  if (peer.protocol != protocol_) {
    return Status(Code::kHandshake,
                  "fabric: the peer's provider is " + peer.protocol + ", here it is " + protocol_);
  }
  return decoded;
}

}  // namespace kvpush
