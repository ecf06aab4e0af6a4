// The calls of the seam. What arrives at sockets and rings is in shm_progress.cpp.
#include "transport/shm/shm_transport.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/shm/segment.hpp"
#include "transport/shm/socket.hpp"

namespace kvpush {

using shm::DescriptionKind;
using shm::Phase;
using shm::RecordKind;
using shm::Role;

ShmTransport::ShmTransport(const Incarnation& self, TimeUs call_budget_us,
                           std::shared_ptr<const CudaDevice> device, std::string host)
    : self_(self),
      call_budget_us_(call_budget_us),
      device_(std::move(device)),
      host_(std::move(host)),
      process_(this_process()),
      record_(shm::kMaxRecordBytes) {}

Result<std::unique_ptr<ShmTransport>> ShmTransport::make(const Incarnation& self, TimeUs call_budget_us,
                                                         std::shared_ptr<const CudaDevice> device) {
  Result<std::string> host = shm::host_identity();
  if (!host.ok()) return host.status();
  std::unique_ptr<ShmTransport> transport(
      new ShmTransport(self, call_budget_us, std::move(device), std::move(host).value()));
  KVPUSH_TRY(transport->start());
  return transport;
}

Status ShmTransport::start() {
  Result<shm::Fd> listener = shm::listen_as(self_);
  if (!listener.ok()) return listener.status();
  listener_ = std::move(listener).value();
  epoll_ = shm::Fd(::epoll_create1(EPOLL_CLOEXEC));
  spare_ = shm::Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!epoll_.ok() || !spare_.ok()) return {Code::kTransport, std::string("epoll: ") + std::strerror(errno)};
  return watch(listener_, 0);
}

ShmTransport::~ShmTransport() {
  for (const auto& [id, session] : sessions_) {
    free_memory(*session);
    drop_socket(*session);
  }
}

Capabilities ShmTransport::capabilities() const {
  return {.mapped_slots = true, .can_wait = true, .max_message_bytes = shm::kMaxRecordBytes};
}

ShmTransport::SessionPtr ShmTransport::find(const SessionId& session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : found->second;
}

shm::Description ShmTransport::describe(const shm::Session& session, DescriptionKind kind) const {
  return {.kind = kind,
          .host = host_,
          .engine = self_,
          .session = session.id,
          .pid = static_cast<std::int32_t>(::getpid()),
          .slot_bytes = session.layout.slot_bytes,
          .num_slots = session.layout.num_slots,
          .process = shm::process_identity(),
          .life = process_,
          .on_device = session.on_device,
          .device = session.offered};
}

Status ShmTransport::add_session(SessionPtr session) {
  const SessionId id = session->id;
  if (!sessions_.emplace(id, std::move(session)).second) {
    return {Code::kInvalidArgument, "session " + to_string(id) + " exists already"};
  }
  return {};
}

Result<Bytes> ShmTransport::open_landing(const SessionId& session, std::size_t slot_bytes,
                                         std::uint32_t num_slots) {
  Result<shm::SegmentLayout> layout = shm::plan_segment(slot_bytes, num_slots);
  if (!layout.ok()) return layout.status();
  auto opened = std::make_shared<shm::Session>(session, Role::kLanding, layout.value());
  KVPUSH_TRY(add_session(opened));
  if (device_) offer_device(*opened);
  // Slots that are not used take no memory.
  const shm::Extent extent = opened->on_device ? shm::Extent::kRings : shm::Extent::kAll;
  Result<shm::Segment> segment = shm::create_segment(layout.value(), session, extent, call_budget_us_);
  if (!segment.ok()) {
    sessions_.erase(session);
    return segment.status();
  }
  opened->memfd = std::move(segment.value().memfd);
  opened->attach(std::move(segment.value().mapping));
  opened->slots = opened->on_device ? opened->device.data() : opened->mapping.slots();
  return encode(describe(*opened, DescriptionKind::kOffer));
}

Region ShmTransport::landing(const SessionId& session) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kLanding) return {};
  return {found->slots, found->layout.slot_bytes * found->layout.num_slots};
}

Result<Bytes> ShmTransport::accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                                   std::uint32_t num_slots) {
  Result<shm::SegmentLayout> layout = shm::plan_segment(slot_bytes, num_slots);
  if (!layout.ok()) return layout.status();
  auto accepted = std::make_shared<shm::Session>(session, Role::kSource, layout.value());
  const shm::Description expected = describe(*accepted, DescriptionKind::kOffer);
  Result<shm::Description> peer = decode_matching(description, expected);
  if (!peer.ok()) return peer.status();
  KVPUSH_TRY(add_session(accepted));
  accepted->on_device = may_take_device(*accepted, peer.value());
  return encode(describe(*accepted, DescriptionKind::kAnswer));
}

Status ShmTransport::connect(const SessionId& session, ByteView description) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kLanding || found->phase != Phase::kOffered) {
    return {Code::kInvalidArgument,
            "session " + to_string(session) + " has no landing that waits for an answer"};
  }
  Result<shm::Description> peer = decode_matching(description, describe(*found, DescriptionKind::kAnswer));
  if (!peer.ok()) return peer.status();
  if (peer.value().on_device && !found->on_device) {
    return {Code::kHandshake, "shared memory: the answer takes device memory that was not offered"};
  }
  if (!peer.value().on_device && found->on_device) {
    KVPUSH_TRY(shm::allocate_slots(found->memfd, found->layout, call_budget_us_));
  }
  if (!peer.value().on_device) KVPUSH_TRY(use_segment(*found));
  found->peer = peer.value().life;
  Result<shm::Fd> socket = shm::connect_to(peer.value().engine, call_budget_us_);
  if (!socket.ok()) return socket.status();
  const std::uint64_t token = next_token_++;
  KVPUSH_TRY(watch(socket.value(), token));
  KVPUSH_TRY(shm::send_hello(socket.value(), session, found->memfd));
  found->is_exposed = true;
  found->memfd.reset();
  found->socket = std::move(socket).value();
  found->token = token;
  found->phase = Phase::kOpen;
  by_token_.emplace(token, found);
  return {};
}

Region ShmTransport::slot_memory(const SessionId& session, std::uint32_t slot) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kSource || found->slots == nullptr || slot >= found->layout.num_slots)
    return {};
  return {found->slots + slot * found->layout.slot_bytes, found->layout.slot_bytes};
}

Result<Region> ShmTransport::allocate_staging(std::size_t size_bytes) {
  return Status(Code::kUnsupported, "shared memory has mapped slots: pack into slot_memory() instead of " +
                                        std::to_string(size_bytes) + " bytes of staging");
}

void ShmTransport::release_staging(Region /*region*/) {}

Sent ShmTransport::push(shm::Session& session, RecordKind kind, ByteView payload) {
  if (session.phase == Phase::kOffered) return Sent::kAgain;
  if (session.phase != Phase::kOpen) return Sent::kLost;
  if (payload.size() > shm::kMaxRecordBytes) {
    lose(session, "asked to send " + std::to_string(payload.size()) + " bytes, at most " +
                      std::to_string(shm::kMaxRecordBytes) + " are allowed");
    return Sent::kLost;
  }
  switch (session.push(kind, payload)) {
    case shm::RingProducer::Push::kFull: return Sent::kAgain;
    case shm::RingProducer::Push::kCorrupt:
      lose(session, "the peer's read index is impossible: its memory is damaged");
      return Sent::kLost;
    case shm::RingProducer::Push::kDone: break;
  }
  if (session.must_wake(shm::kWantsData)) shm::send_wake(session.socket);
  return Sent::kYes;
}

Sent ShmTransport::post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
                        ByteView notice) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kSource) return Sent::kLost;
  if (found->phase == Phase::kOpen && (slot >= found->layout.num_slots || !source.empty())) {
    lose(*found, "asked to post " + std::to_string(source.size()) + " bytes to slot " + std::to_string(slot) +
                     " of " + std::to_string(found->layout.num_slots) +
                     ": slots are mapped, a post has no source");
  }
  const Sent sent = push(*found, RecordKind::kNotice, notice);
  if (sent == Sent::kYes) completed_.push_back(ticket);
  return sent;
}

Sent ShmTransport::send(const SessionId& session, ByteView message) {
  const SessionPtr found = find(session);
  return found ? push(*found, RecordKind::kMessage, message) : Sent::kLost;
}

bool ShmTransport::arm_wait() {
  if (!completed_.empty() || loss_owed_) return true;
  armed_ = true;
  // Arm all, then look at all: what is published after the look finds its flag set.
  for (const auto& [id, session] : sessions_) {
    if (session->phase == Phase::kOpen) session->arm();
  }
  for (const auto& [id, session] : sessions_) {
    if (session->phase == Phase::kOpen && session->is_ready()) return true;
  }
  return false;
}

void ShmTransport::lose(shm::Session& session, std::string reason) {
  session.phase = Phase::kLost;
  session.loss = std::move(reason);
  loss_owed_ = true;
  if (session.socket.ok()) watch_hang_up_only(session);
}

void ShmTransport::close_session(const SessionId& session) {
  const SessionPtr found = find(session);
  if (!found || found->phase == Phase::kClosed) return;
  found->phase = Phase::kClosed;
  if (found->role == Role::kSource) {
    free_memory(*found);
    drop_socket(*found);
    sessions_.erase(session);
    return;
  }
  found->memfd.reset();
  if (!found->socket.ok()) return;
  watch_hang_up_only(*found);
  ::shutdown(found->socket.get(), SHUT_WR);
}

bool ShmTransport::landing_quiet(const SessionId& session) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kLanding || !found->is_exposed) return true;
  if (is_quiet(*found) && found->phase == Phase::kClosed) drop_socket(*found);
  return found->is_quiet;
}

bool ShmTransport::release_landing(const SessionId& session) {
  const SessionPtr found = find(session);
  if (!found || found->role != Role::kLanding || found->phase != Phase::kClosed) return true;
  // A peer that has device memory open must close it first.
  if (found->on_device && !landing_quiet(session)) return false;
  free_memory(*found);
  drop_socket(*found);
  sessions_.erase(session);
  return true;
}

Result<std::unique_ptr<Transport>> make_shm_transport(const Incarnation& self, TimeUs call_budget_us,
                                                      std::shared_ptr<const CudaDevice> device) {
  Result<std::unique_ptr<ShmTransport>> made = ShmTransport::make(self, call_budget_us, std::move(device));
  if (!made.ok()) return made.status();
  return std::unique_ptr<Transport>(std::move(made).value());
}

}  // namespace kvpush
