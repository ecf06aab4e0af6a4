// Where the slots of a session are: in the segment, or in device memory.
#include <unistd.h>

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

/// P: whether this engine's kernels can write to what D offers.
bool ShmTransport::take_device(shm::Session& session, const shm::Description& offer) const {
  if (!offer.on_device || !device_) return false;
  session.offered = offer.device;
  // CUDA refuses a handle of this process itself, whose pointers are good here as they are.
  session.same_process = offer.process == shm::process_identity() && offer.pid == ::getpid();
  if (session.same_process) return offer.device.gpu == device_->uuid();
  // Only tried: D may never come, and must not free what is open here.
  const Result<DeviceMemory> opened = DeviceMemory::import(device_, offer.device.handle);
  if (!opened.ok()) {
    log(LogLevel::kWarning, "session " + to_string(session.id) +
                                ": slots are in pinned host memory, not on D's GPU " + offer.device.gpu +
                                ": " + opened.status().message());
  }
  return opened.ok();
}

/// D: carries out what P has chosen. May be repeated.
Status ShmTransport::settle_landing(shm::Session& session, bool on_device) {
  if (on_device) {
    if (session.on_device) return {};
    return {Code::kHandshake, "shared memory: the answer takes device memory that was not offered"};
  }
  if (session.on_device) {
    KVPUSH_TRY(shm::allocate_slots(session.memfd, session.layout, call_budget_us_));
    session.on_device = false;
    session.slots = session.mapping.slots();
    session.device.reset();
  }
  return pin_segment(session);
}

/// P: once the segment is mapped.
Status ShmTransport::settle_source(shm::Session& session) {
  if (!session.on_device) {
    KVPUSH_TRY(pin_segment(session));
    session.slots = session.mapping.slots();
    return {};
  }
  ++counters_.device_sessions;
  if (session.same_process) {
    session.slots = std::bit_cast<std::byte*>(session.offered.address);
    return {};
  }
  Result<DeviceMemory> opened = DeviceMemory::import(device_, session.offered.handle);
  if (!opened.ok()) return opened.status();
  session.device = std::move(opened).value();
  session.slots = session.device.data();
  return {};
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
  const bool is_open_at_peer = session.role == Role::kLanding && session.on_device && session.is_exposed &&
                               !session.is_quiet && !(session.socket.ok() && shm::is_hung_up(session.socket));
  if (is_open_at_peer) session.device.leak();
  session.device.reset();
  session.pinned.reset();
  session.mapping.reset();
}

}  // namespace kvpush
