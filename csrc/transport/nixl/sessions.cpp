// Set-up and end of sessions and of registered memory.
#include <algorithm>
#include <utility>

#include "transport/nixl/transport_impl.hpp"

namespace kvpush {
namespace {

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

bool share_a_name(const std::string& left, const std::string& right) {
  const std::string padded = "," + right + ",";
  for (std::size_t begin = 0; begin <= left.size();) {
    const std::size_t end = std::min(left.find(',', begin), left.size());
    if (padded.find("," + left.substr(begin, end - begin) + ",") != std::string::npos) return true;
    begin = end + 1;
  }
  return false;
}

Status invalid(const SessionId& session, const std::string& why) {
  return {Code::kInvalidArgument, "nixl session " + to_string(session) + ": " + why};
}

}  // namespace

NixlTransport::NixlTransport(const NixlOptions& options, std::unique_ptr<NixlAgent> agent)
    : incarnation_(options.incarnation),
      backends_(join(options.backends)),
      max_posts_(options.max_posts_per_session),
      pin_budget_us_(options.pin_budget_us),
      device_(options.device),
      counters_(options.counters ? options.counters : std::make_shared<NixlCounters>()),
      process_(this_process()),
      agent_(std::move(agent)),
      peers_(*agent_),
      posts_(*agent_),
      retired_(options.max_retired_bytes) {}

NixlTransport::~NixlTransport() {
  static_cast<void>(posts_.drive(posts_.size()));
  if (posts_.size() != 0) {
    // NIXL cannot cancel a write: what is still running keeps its agent and all memory, for good.
    counters_->leaked_requests += posts_.size();
    agent_->leak();
    for (RemoteMemory& memory : staging_) memory.leak();
    for (auto& entry : sessions_) {
      if (entry.second.memory) entry.second.memory->leak();
    }
    for (auto& entry : closed_) entry.second.memory.leak();
    return;
  }
  for (RemoteMemory& memory : staging_) static_cast<void>(agent_->deregister_memory(memory.region()));
  for (auto& [id, session] : sessions_) {
    if (!session.memory) continue;
    static_cast<void>(agent_->deregister_memory(session.memory->region()));
    const bool quiet = session.peer_quiet || !session.spoke || proven_dead(session.process, process_);
    retire(std::move(*session.memory), quiet);
  }
  for (auto& entry : closed_) {
    static_cast<void>(agent_->deregister_memory(entry.second.memory.region()));
    const bool quiet = entry.second.quiet || proven_dead(entry.second.process, process_);
    retire(std::move(entry.second.memory), quiet);
  }
  agent_.reset();
}

Result<RemoteMemory> NixlTransport::allocate(std::size_t size_bytes) {
  if (agent_->place().type != kNixlVram) return RemoteMemory::map(size_bytes, device_, pin_budget_us_);
  auto memory = RemoteMemory::allocate(size_bytes, device_);
  while (memory.status().code() == Code::kExhausted && retired_.free_oldest()) {
    counters_->retired_bytes = retired_.bytes();
    memory = RemoteMemory::allocate(size_bytes, device_);
  }
  return memory;
}

void NixlTransport::retire(RemoteMemory memory, bool quiet) {
  if (agent_->place().type != kNixlVram) return memory.retire();
  if (!quiet) return memory.leak();
  retired_.add(std::move(memory));
  counters_->retired_bytes = retired_.bytes();
}

Result<Bytes> NixlTransport::open_landing(const SessionId& session, std::size_t slot_bytes,
                                          std::uint32_t num_slots) {
  if (is_known(session)) return invalid(session, "it exists");
  if (slot_bytes == 0 || num_slots == 0 || slot_bytes > SIZE_MAX / num_slots) {
    return invalid(session, "a landing of " + std::to_string(num_slots) + " slots of " +
                                std::to_string(slot_bytes) + " bytes");
  }
  auto memory = allocate(slot_bytes * num_slots);
  if (!memory.ok()) return memory.status();
  const Region region = memory.value().region();
  KVPUSH_TRY(agent_->register_memory(region));
  auto access = agent_->access_to(region);
  if (!access.ok()) {
    static_cast<void>(agent_->deregister_memory(region));
    return access.status();
  }
  sessions_[session].memory = std::move(memory).value();
  return describe(session, {.base_address = reinterpret_cast<std::uintptr_t>(region.data),
                            .slot_bytes = slot_bytes,
                            .num_slots = num_slots,
                            .place = agent_->place(),
                            .access = std::move(access).value()});
}

Region NixlTransport::landing(const SessionId& session) {
  if (const auto open = sessions_.find(session); open != sessions_.end()) {
    const std::optional<RemoteMemory>& memory = open->second.memory;
    return memory ? memory->region() : Region{};
  }
  const auto closed = closed_.find(session);
  return closed != closed_.end() ? closed->second.memory.region() : Region{};
}

Result<Bytes> NixlTransport::accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                                    std::uint32_t num_slots) {
  if (is_known(session)) return invalid(session, "it exists");
  auto understood = understand(session, description);
  if (!understood.ok()) return understood.status();
  NixlDescription& peer = understood.value();
  if (peer.landing.base_address == 0 || peer.landing.slot_bytes != slot_bytes ||
      peer.landing.num_slots != num_slots) {
    return Status(Code::kHandshake, "nixl: the landing has " + std::to_string(peer.landing.num_slots) +
                                        " slots of " + std::to_string(peer.landing.slot_bytes) +
                                        " bytes, the offer says " + std::to_string(num_slots) + " of " +
                                        std::to_string(slot_bytes));
  }
  const std::string agent = nixl_agent_name(peer.incarnation);
  KVPUSH_TRY(peers_.acquire(agent, peer.connection));
  if (const Status loaded = agent_->load(agent, peer.landing.access); !loaded.ok()) {
    // NIXL drops all it knows of an agent when it refuses one more piece of it.
    lose_all_of(agent, loaded.message());
    peers_.release(agent, monotonic_us());
    return loaded;
  }
  NixlSession& opened = sessions_[session];
  opened.agent = agent;
  opened.remote = std::move(peer.landing);
  opened.process = std::move(peer.process);
  return describe(session, {});
}

Status NixlTransport::connect(const SessionId& session, ByteView description) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || !found->second.memory) return invalid(session, "no landing is open");
  if (!found->second.agent.empty()) return invalid(session, "it is connected already");
  auto understood = understand(session, description);
  if (!understood.ok()) return understood.status();
  const NixlDescription& peer = understood.value();
  if (peer.landing.base_address != 0) return {Code::kHandshake, "nixl: the answer carries a landing"};
  const std::string agent = nixl_agent_name(peer.incarnation);
  KVPUSH_TRY(peers_.acquire(agent, peer.connection));
  found->second.agent = agent;
  found->second.process = peer.process;
  if (found->second.closed_by == agent)
    lose(session, found->second, "the peer closed before it was connected");
  return {};
}

Result<Region> NixlTransport::allocate_staging(std::size_t size_bytes) {
  auto memory = allocate(size_bytes);
  if (!memory.ok()) return memory.status();
  const Region region = memory.value().region();
  KVPUSH_TRY(agent_->register_memory(region));
  staging_.push_back(std::move(memory).value());
  return region;
}

void NixlTransport::release_staging(Region region) {
  const auto found = std::find_if(staging_.begin(), staging_.end(), [&](const RemoteMemory& memory) {
    return memory.region().data == region.data;
  });
  if (found == staging_.end()) return;
  // Unmapping registered pages would leave a key to whatever is mapped there next.
  if (!agent_->deregister_memory(found->region()).ok()) found->leak();
  staging_.erase(found);
}

Status NixlTransport::clear_staging(Region region) {
  const auto found = std::find_if(staging_.begin(), staging_.end(), [&](const RemoteMemory& memory) {
    return memory.region().data == region.data;
  });
  if (found == staging_.end()) return {Code::kTransport, "nixl: not staging memory"};
  return found->clear(region.size_bytes);
}

void NixlTransport::close_session(const SessionId& session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  NixlSession& closing = found->second;
  for (const TicketId ticket : posts_.orphan(session)) {
    due_.emplace_back(ticket, Fate::kUnknown);
    closing.unknown.push_back(ticket);
    ++counters_->orphaned_posts;
  }
  if (closing.memory) {
    announce(closing.agent, session, Kind::kClosed);
    closed_.emplace(session,
                    NixlClosedLanding{std::move(*closing.memory), closing.agent, std::move(closing.process),
                                      closing.peer_quiet || !closing.spoke});
  } else {
    const bool quiet = closing.unknown.empty();
    announce(closing.agent, session, quiet ? Kind::kQuiet : Kind::kClosed);
    if (!quiet) {
      draining_.emplace(session,
                        NixlDraining{closing.agent, std::move(closing.process), std::move(closing.unknown)});
    }
  }
  if (!closing.agent.empty()) peers_.release(closing.agent, monotonic_us());
  sessions_.erase(found);
}

bool NixlTransport::landing_quiet(const SessionId& session) {
  const auto closed = closed_.find(session);
  if (closed == closed_.end()) return false;
  NixlClosedLanding& landing = closed->second;
  if (!landing.quiet) landing.quiet = proven_dead(landing.process, process_);
  return landing.quiet;
}

bool NixlTransport::release_landing(const SessionId& session) {
  const auto closed = closed_.find(session);
  if (closed == closed_.end()) return true;
  if (agent_->deregister_memory(closed->second.memory.region()).ok()) {
    // Whoever releases it knows that it is quiet, by landing_quiet() or from the peer itself.
    retire(std::move(closed->second.memory), true);
  } else {
    closed->second.memory.leak();
  }
  closed_.erase(closed);
  return true;
}

bool NixlTransport::is_known(const SessionId& session) const {
  return sessions_.contains(session) || closed_.contains(session) || draining_.contains(session);
}

Bytes NixlTransport::describe(const SessionId& session, NixlLandingInfo landing) const {
  return encode({.session = session,
                 .incarnation = incarnation_,
                 .backends = backends_,
                 .process = process_,
                 .connection = agent_->connection(),
                 .landing = std::move(landing)});
}

Result<NixlDescription> NixlTransport::understand(const SessionId& session, ByteView description) const {
  auto decoded = decode_nixl_description(description);
  if (!decoded.ok()) return decoded;
  const NixlDescription& peer = decoded.value();
  if (peer.session != session) {
    return Status(Code::kHandshake, "nixl: the description is of session " + to_string(peer.session) +
                                        ", expected " + to_string(session));
  }
  if (peer.incarnation == incarnation_) {
    return Status(Code::kHandshake, "nixl: the peer is this engine itself, " + to_string(incarnation_));
  }
  if (!share_a_name(peer.backends, backends_)) {
    return Status(Code::kHandshake,
                  "nixl: no backend in common: the peer has " + peer.backends + ", here is " + backends_);
  }
  return decoded;
}

}  // namespace kvpush
