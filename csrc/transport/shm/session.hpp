// One session of the shared-memory transport: its segment, its two ring ends, its socket.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "shim/device_memory.hpp"
#include "transport/shm/description.hpp"
#include "transport/shm/fd.hpp"
#include "transport/shm/ring.hpp"
#include "transport/shm/segment.hpp"

namespace kvpush::shm {

enum class Role : std::uint8_t { kSource, kLanding };

enum class Phase : std::uint8_t {
  kOffered,  ///< D: not connected; P: accepted, D has not come yet
  kOpen,
  kLost,    ///< on_lost is owed or was delivered; the segment stays mapped until close
  kClosed,  ///< D only: waits for release
};

/// Progress thread only.
class Session {
 public:
  Session(const SessionId& id, Role role, const SegmentLayout& layout) : id(id), role(role), layout(layout) {}

  /// Takes the segment and sets up this side's ends of the rings.
  void attach(Mapping segment) {
    mapping = std::move(segment);
    SegmentHeader& header = mapping.header();
    std::byte* const to_source = mapping.base() + kToSourceOffset;
    std::byte* const to_landing = mapping.base() + kToLandingOffset;
    const bool is_source = role == Role::kSource;
    out_ = is_source ? RingProducer(&header.to_landing, to_landing, kRingBytes)
                     : RingProducer(&header.to_source, to_source, kRingBytes);
    in = is_source ? RingConsumer(&header.to_source, to_source, kRingBytes)
                   : RingConsumer(&header.to_landing, to_landing, kRingBytes);
    own_armed_ = is_source ? &header.source_armed : &header.landing_armed;
    peer_armed_ = is_source ? &header.landing_armed : &header.source_armed;
  }

  RingProducer::Push push(RecordKind kind, ByteView payload) {
    const RingProducer::Push pushed = out_.push(kind, payload);
    starved_ = pushed == RingProducer::Push::kFull;
    return pushed;
  }

  /// After a publication: true when the peer waits for it, and must be woken (once).
  [[nodiscard]] bool must_wake(std::uint32_t why) {
    return (peer_armed_->load(std::memory_order_seq_cst) & why) != 0 &&
           peer_armed_->exchange(0, std::memory_order_seq_cst) != 0;
  }

  /// Announces that this side is about to wait.
  void arm() {
    own_armed_->exchange(starved_ ? kWantsData | kWantsSpace : kWantsData, std::memory_order_seq_cst);
  }
  void disarm() { own_armed_->store(0, std::memory_order_relaxed); }
  /// Whether what this side waits for is there. Room is announced once per refusal.
  [[nodiscard]] bool is_ready() {
    if (in.has_data()) return true;
    if (!starved_ || !out_.has_moved()) return false;
    starved_ = false;
    return true;
  }

  const SessionId id;
  const Role role;
  const SegmentLayout layout;
  Phase phase = Phase::kOffered;
  bool hung_up = false;  ///< the socket told that nothing more will be published
  bool loss_reported = false;
  bool is_exposed = false;     ///< D: the memory file has left this process
  bool is_quiet = false;       ///< D: the peer has nothing of this open any more, for certain
  std::string loss;            ///< why, once lost
  std::uint64_t token = 0;     ///< names the socket in epoll events
  Fd memfd;                    ///< D, until connected
  bool on_device = false;      ///< D: offered or taken; P: taken, or to be tried
  bool is_settled = false;     ///< D: it is known where the slots are
  ProcessIdentity peer;        ///< D: P's process
  bool same_process = false;   ///< P: D's pointers are ours
  DeviceSlots offered;         ///< with on_device
  std::byte* slots = nullptr;  ///< slot 0: of the segment or in device memory; null until that is known
  Fd socket;  ///< outlives the memory below: its closing tells the peer that we have given it up
  Mapping mapping;
  DeviceMemory pinned;  ///< the slots in `mapping`, for this side's GPU
  DeviceMemory device;  ///< D: its own; P: D's, opened. While this is open at P, source_slots says so
  RingConsumer in;

 private:
  RingProducer out_;
  bool starved_ = false;  // the last push found the ring full
  std::atomic<std::uint32_t>* own_armed_ = nullptr;
  std::atomic<std::uint32_t>* peer_armed_ = nullptr;
};

}  // namespace kvpush::shm
