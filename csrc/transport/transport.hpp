// The seam to whatever carries bytes between two engines. Everything above it is tested without hardware.
//
// What is assumed of a transport, and nothing more: a notice is delivered after the data of its post is
// readable by whatever unpacks it. Messages and notices may be reordered, duplicated or, when something
// breaks, lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.hpp"
#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"

namespace kvpush {

/// What is known about a post that has ended.
enum class Fate : std::uint8_t {
  kCompleted,  ///< the source may be reused; the data is or will be at the peer
  kFailed,     ///< nothing was or will be written
  kUnknown,    ///< it may still be read or written: source and landing are quarantined
};

/// The answer of send() and post().
enum class Sent : std::uint8_t {
  kYes,
  kAgain,  ///< no room now: keep it, offer it again after the next poll
  kLost,   ///< the session is unusable; on_lost follows or has come
};

/// Receives what poll() finds. Called only from within poll(); spans are valid during the call.
class TransportSink {
 public:
  virtual ~TransportSink() = default;
  virtual void on_message(const SessionId& session, ByteView message) = 0;
  virtual void on_notice(const SessionId& session, ByteView notice) = 0;
  virtual void on_completed(TicketId ticket, Fate fate) = 0;
  virtual void on_lost(const SessionId& session, const std::string& reason) = 0;
  /// A post that completed as kUnknown is over after all, or its peer is dead: its source may be reused.
  virtual void on_settled(TicketId ticket) = 0;
};

struct Capabilities {
  bool mapped_slots = false;  ///< slot_memory() gives P a direct view of D's slots
  bool can_wait = false;      ///< wait_fd() becomes readable on arrival
  std::size_t max_message_bytes = 0;
};

/// Registered memory. Owned by the transport, valid until released. Of a transport that was made for a GPU it
/// is memory that the GPU's kernels reach, and possibly only they: whoever is not a packer leaves it alone.
struct Region {
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
};

/// One engine's end of a transport. All calls on the progress thread. No call blocks for longer than a
/// tenth of `peer_timeout`; with a GPU those that set up or end a session, or get or give back staging, may
/// wait for what the GPU runs at that moment too, because the driver does so to allocate, pin and free.
///
/// Set-up of a session, D being the side that opens the landing:
///   D: open_landing -> description for the offer
///   P: accept(description) -> description for the answer
///   D: connect(description)
/// P may send and post once D's first message has arrived.
class Transport {
 public:
  virtual ~Transport() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;

  /// D: registers num_slots * slot_bytes of fresh memory that only this session's peer may write.
  virtual Result<Bytes> open_landing(const SessionId& session, std::size_t slot_bytes,
                                     std::uint32_t num_slots) = 0;
  /// D: the landing's memory, num_slots * slot_bytes.
  [[nodiscard]] virtual Region landing(const SessionId& session) = 0;
  /// P: takes D's description. Handshake errors say what does not fit, with both values.
  virtual Result<Bytes> accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                               std::uint32_t num_slots) = 0;
  /// D: takes P's description.
  virtual Status connect(const SessionId& session, ByteView description) = 0;

  /// P, with mapped slots: where `slot` of D's landing lies in this process; empty while not yet connected.
  [[nodiscard]] virtual Region slot_memory(const SessionId& session, std::uint32_t slot) = 0;
  /// P, without mapped slots: registered staging memory for leases. Exhausted when there is none.
  virtual Result<Region> allocate_staging(std::size_t size_bytes) = 0;
  virtual void release_staging(Region region) = 0;
  /// P: zeroes staging memory, or the front of it. Errors: Transport.
  virtual Status clear_staging(Region region) {
    std::memset(region.data, 0, region.size_bytes);
    return {};
  }

  /// P: writes `source` to the start of `slot`, then delivers `notice`. kYes means that exactly one
  /// on_completed(ticket) will come. With mapped slots `source` is empty: the data is there already.
  virtual Sent post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
                    ByteView notice) = 0;
  /// Both: delivers a message of at most max_message_bytes.
  virtual Sent send(const SessionId& session, ByteView message) = 0;

  virtual void poll(TransportSink& sink) = 0;
  /// Readable when poll() has something to do; -1 without can_wait.
  [[nodiscard]] virtual int wait_fd() const = 0;
  /// Called right before waiting on wait_fd(): true when something arrived meanwhile, or a refused send or
  /// post has room again, so that nothing between poll() and the wait is slept over.
  [[nodiscard]] virtual bool arm_wait() = 0;

  /// Ends a session on this side, also after on_lost. With mapped slots P may call it only once no pack into
  /// them runs or can start: they stay valid until then. Every outstanding post completes in a later poll()
  /// (kUnknown if it must). The landing's memory stays mapped until release_landing().
  virtual void close_session(const SessionId& session) = 0;
  /// D, after close_session(): whether the peer is proven unable to write any more.
  [[nodiscard]] virtual bool landing_quiet(const SessionId& session) = 0;
  /// D: deregisters and frees the landing of a closed session. False: not yet, because the peer may still
  /// reach it and this memory cannot be freed under it; it stays until landing_quiet().
  virtual bool release_landing(const SessionId& session) = 0;
};

}  // namespace kvpush
