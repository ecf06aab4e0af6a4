// Set-up and end of sessions and of registered memory.
#include <algorithm>
#include <thread>
#include <utility>

#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr TimeUs kLastWordsUs = 200'000;

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

FabricTransport::FabricTransport(const FabricOptions& options, std::unique_ptr<FabricEndpoint> endpoint)
    : incarnation_(options.incarnation),
      max_posts_(options.max_posts_per_session),
      max_write_bytes_(std::min(options.max_write_bytes, endpoint->max_write_bytes())),
      pin_budget_us_(options.pin_budget_us),
      device_(options.device),
      counters_(options.counters ? options.counters : std::make_shared<FabricCounters>()),
      process_(this_process()),
      endpoint_(std::move(endpoint)) {}

Status FabricTransport::start() {
  auto buffers = allocate(FabricOperations::kBufferBytes, kFiSend | kFiRecv);
  if (!buffers.ok()) return buffers.status();
  buffers_ = std::move(buffers).value();
  operations_.use(buffers_->memory.region().data, endpoint_->max_receives());
  post_receives();
  return {};
}

FabricTransport::~FabricTransport() {
  // Closing the endpoint would drop the last words: that a session is closed, that its landing is quiet.
  Deaf nobody;
  for (const TimeUs end = monotonic_us() + kLastWordsUs;
       (!announcements_.empty() || operations_.num_messages() != 0) && monotonic_us() < end;) {
    poll(nobody);
    std::this_thread::yield();
  }
  // Ends all operations, so that nothing of this side is read or written any more.
  endpoint_->shut();
  for (auto& [id, session] : sessions_) {
    if (session.landing) free_landing(*session.landing);
  }
  for (auto& [id, closed] : closed_) free_landing(closed.landing);
}

Result<FabricMemory> FabricTransport::allocate(std::size_t size_bytes, std::uint64_t access) const {
  auto memory = RemoteMemory::map(size_bytes, device_, pin_budget_us_);
  if (!memory.ok()) return memory.status();
  auto registration = endpoint_->register_memory(memory.value().region(), access);
  if (!registration.ok()) return registration.status();
  return FabricMemory{std::move(memory).value(), std::move(registration).value()};
}

void FabricTransport::free_landing(FabricMemory& landing) {
  landing.registration.reset();
  landing.memory.retire();
}

Result<std::uint16_t> FabricTransport::take_index(const SessionId& session) {
  constexpr std::size_t kNumIndices = std::size_t{UINT16_MAX} + 1;
  if (by_index_.size() == kNumIndices) return Status(Code::kExhausted, "fabric: 65536 landings are open");
  // In turn, so that a late immediate of a session that has ended finds nobody.
  while (by_index_.contains(next_index_)) ++next_index_;
  by_index_.emplace(next_index_, session);
  return next_index_++;
}

Result<Bytes> FabricTransport::open_landing(const SessionId& session, std::size_t slot_bytes,
                                            std::uint32_t num_slots) {
  if (is_known(session)) return invalid(session, "it exists");
  if (slot_bytes == 0 || num_slots == 0 || slot_bytes > SIZE_MAX / num_slots) {
    return invalid(session, "a landing of " + std::to_string(num_slots) + " slots of " +
                                std::to_string(slot_bytes) + " bytes");
  }
  auto landing = allocate(slot_bytes * num_slots, kFiRemoteWrite);
  if (!landing.ok()) return landing.status();
  const auto index = take_index(session);
  if (!index.ok()) return index.status();
  FabricSession& opened = sessions_[session];
  opened.landing = std::move(landing).value();
  opened.index = index.value();
  const auto address = reinterpret_cast<std::uintptr_t>(opened.landing->memory.region().data);
  return describe(session, {.base = endpoint_->by_address() ? address : 0,
                            .key = opened.landing->registration->key,
                            .slot_bytes = slot_bytes,
                            .num_slots = num_slots,
                            .index = opened.index});
}

Region FabricTransport::landing(const SessionId& session) {
  if (const auto open = sessions_.find(session); open != sessions_.end()) {
    return open->second.landing ? open->second.landing->memory.region() : Region{};
  }
  const auto closed = closed_.find(session);
  return closed != closed_.end() ? closed->second.landing.memory.region() : Region{};
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
  const auto acquired = acquire(peer);
  if (!acquired.ok()) return acquired.status();
  FabricSession& opened = sessions_[session];
  opened.peer = acquired.value();
  opened.remote = peer.landing;
  opened.process = peer.process;
  return describe(session, {});
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
    const auto address = endpoint_->insert(peer.endpoint);
    if (!address.ok()) return address.status();
    known = peers_.emplace(peer.incarnation, FabricPeer{.address = address.value()}).first;
  }
  ++known->second.num_users;
  return &known->second;
}

void FabricTransport::release(FabricPeer& peer) {
  if (--peer.num_users == 0) peer.idle_since = monotonic_us();
}

Result<Region> FabricTransport::allocate_staging(std::size_t size_bytes) {
  auto memory = allocate(size_bytes, kFiWrite);
  if (!memory.ok()) return memory.status();
  staging_.push_back(std::move(memory).value());
  return staging_.back().memory.region();
}

void FabricTransport::release_staging(Region region) {
  std::erase_if(staging_, [&](const FabricMemory& each) { return each.memory.region().data == region.data; });
}

void* FabricTransport::descriptor_of(ByteView source) const {
  for (const FabricMemory& each : staging_) {
    const Region region = each.memory.region();
    if (source.data() >= region.data && source.data() < region.data + region.size_bytes) {
      return each.registration->mem_desc;
    }
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
                                                 .index = closing.index,
                                                 .process = std::move(closing.process),
                                                 .quiet = closing.peer_quiet || !closing.spoke});
  } else {
    const bool quiet = closing.num_posts == 0 && !closing.uncertain && endpoint_->delivers();
    announce(*closing.peer, session, quiet ? FabricKind::kQuiet : FabricKind::kClosed);
    if (closing.num_posts != 0) {
      ++closing.peer->num_users;
      draining_.emplace(session, FabricDraining{.peer = closing.peer,
                                                .process = std::move(closing.process),
                                                .num_posts = closing.num_posts,
                                                .uncertain = closing.uncertain || !endpoint_->delivers()});
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
  FabricClosedLanding& landing = closed->second;
  if (!landing.quiet) landing.quiet = proven_dead(landing.process, process_);
  return landing.quiet;
}

bool FabricTransport::release_landing(const SessionId& session) {
  const auto closed = closed_.find(session);
  if (closed == closed_.end()) return true;
  if (!landing_quiet(session)) return false;
  by_index_.erase(closed->second.index);
  free_landing(closed->second.landing);
  closed_.erase(closed);
  return true;
}

bool FabricTransport::is_known(const SessionId& session) const {
  return sessions_.contains(session) || closed_.contains(session) || draining_.contains(session);
}

Bytes FabricTransport::describe(const SessionId& session, const FabricLandingInfo& landing) const {
  return encode({.session = session,
                 .incarnation = incarnation_,
                 .protocol = endpoint_->protocol(),
                 .process = process_,
                 .endpoint = endpoint_->name(),
                 .landing = landing});
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
  if (peer.protocol != endpoint_->protocol()) {
    return Status(Code::kHandshake, "fabric: the peer's provider is " + peer.protocol + ", here it is " +
                                        endpoint_->protocol());
  }
  return decoded;
}

}  // namespace kvpush
