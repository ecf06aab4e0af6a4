// Where the slots of a session are: in the segment, or in device memory.
#include <unistd.h>

#include <atomic>
#include <bit>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "transport/shm/segment.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/shm/socket.hpp"

namespace kvpush {

using shm::Role;

/// D: without device memory the session is one with slots in the segment, which is slower and no error.
void ShmTransport::offer_device(shm::Session& session) const {
  const std::size_t size_bytes = session.layout.slot_bytes * session.layout.num_slots;
  Result<DeviceMemory> memory = DeviceMemory::allocate(device_, size_bytes);
  Status status = memory.status();
  if (memory.ok()) {
    Result<CudaIpcHandle> handle = memory.value().share();
    status = handle.status();
    if (handle.ok()) {
      session.device = std::move(memory).value();
      session.offered = {device_->uuid(), reinterpret_cast<std::uintptr_t>(session.device.data()),
                         handle.value()};
      session.on_device = true;
      return;
    }
  }
  log(LogLevel::kWarning,
      "session " + to_string(session.id) + ": the landing is in pinned host memory: " + status.message());
}

/// P: whether to try what D offers. It is opened only when D has connected: before, D may withdraw the offer
/// and free its memory without a word.
bool ShmTransport::may_take_device(shm::Session& session, const shm::Description& offer) const {
  if (!offer.on_device || !device_) return false;
  session.offered = offer.device;
  // CUDA refuses a handle of this process itself, whose pointers are good here as they are.
  session.same_process = offer.process == shm::process_identity() && offer.pid == ::getpid();
  if (session.same_process) return offer.device.gpu == device_->uuid();
  if (can_judge(offer.life, process_)) return true;
  log(LogLevel::kWarning, "session " + to_string(session.id) +
                              ": slots are in pinned host memory: D could not prove this process's end, for "
                              "which both need one pid namespace, one time namespace and /proc");
  return false;
}

/// D: the slots are in the segment, where they are allocated. May be repeated.
Status ShmTransport::use_segment(shm::Session& session) const {
  session.is_settled = true;
  session.on_device = false;
  session.slots = session.mapping.slots();
  session.device.reset();
  return pin_segment(session);
}

/// D: before P's first record, by when P has decided. What P writes there later changes nothing.
Status ShmTransport::settle_landing(shm::Session& session) {
  const std::uint32_t source_slots = session.mapping.header().source_slots.load();
  if (session.on_device && source_slots == shm::kSlotsInSegment) return use_segment(session);
  session.is_settled = true;
  if (session.on_device) ++counters_.device_sessions;
  return {};
}

/// P: once the segment is mapped.
Status ShmTransport::settle_source(shm::Session& session, const shm::Fd& memfd) {
  if (session.on_device) {
    std::atomic<std::uint32_t>& source_slots = session.mapping.header().source_slots;
    source_slots.store(shm::kSlotsOnDevice);
    const Status opened = open_device(session);
    if (opened.ok()) {
      ++counters_.device_sessions;
      return {};
    }
    log(LogLevel::kWarning, "session " + to_string(session.id) +
                                ": slots are in pinned host memory, not on D's GPU " + session.offered.gpu +
                                ": " + opened.message());
    session.on_device = false;
    source_slots.store(shm::kSlotsInSegment);
    KVPUSH_TRY(shm::allocate_slots(memfd, session.layout, call_budget_us_));
  }
  KVPUSH_TRY(pin_segment(session));
  session.slots = session.mapping.slots();
  return {};
}

Status ShmTransport::open_device(shm::Session& session) const {
  if (session.same_process) {
    session.slots = std::bit_cast<std::byte*>(session.offered.address);
    return {};
  }
  const std::size_t size_bytes = session.layout.slot_bytes * session.layout.num_slots;
  Result<DeviceMemory> opened = DeviceMemory::import(device_, session.offered.handle, size_bytes);
  if (!opened.ok()) return opened.status();
  session.device = std::move(opened).value();
  session.slots = session.device.data();
  return {};
}

/// D: whether the peer has nothing of the session open any more. The end of its socket tells that of the
/// mapping. It does not of device memory: a process that dies closes its files in any order.
bool ShmTransport::is_quiet(shm::Session& session) const {
  if (session.is_quiet || !session.socket.ok() || !shm::is_hung_up(session.socket)) return session.is_quiet;
  session.hung_up = true;
  const bool is_open_at_peer =
      session.device.ok() && session.mapping.header().source_slots.load() == shm::kSlotsOnDevice;
  session.is_quiet = !is_open_at_peer || proven_dead(session.peer, process_);
  return session.is_quiet;
}

Status ShmTransport::pin_segment(shm::Session& session) const {
  if (!device_ || session.pinned.ok()) return {};
  const std::size_t size_bytes = session.layout.total_bytes - shm::kSlotsOffset;
  Result<DeviceMemory> pinned =
      DeviceMemory::pin(device_, session.mapping.slots(), size_bytes, call_budget_us_);
  if (!pinned.ok()) return pinned.status();
  session.pinned = std::move(pinned).value();
  return {};
}

/// Before the socket goes: its end tells the peer that nothing of this is left.
void ShmTransport::free_memory(shm::Session& session) {
  session.slots = nullptr;
  const bool is_landing = session.role == Role::kLanding;
  if (is_landing && session.device.ok() && session.is_exposed && !is_quiet(session)) session.device.leak();
  session.device.reset();
  if (!is_landing && session.on_device && session.mapping.ok()) {
    session.mapping.header().source_slots.store(shm::kSlotsClosed);
  }
  session.pinned.reset();
  session.mapping.reset();
}

}  // namespace kvpush
