// D's half of the protocol: claims, receives, and what is believed of the boxes that arrive.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "cache/cache.hpp"
#include "protocol/actions.hpp"
#include "protocol/timers.hpp"

namespace kvpush::protocol {

/// Where one request's blocks go: blocks[g][i] is the block of position first[g] + i; -1 is not wanted.
struct Destination {
  std::vector<std::vector<std::int32_t>> blocks;
  std::vector<std::uint32_t> first;
};

/// The positions that a destination wants, as OPEN tells them.
[[nodiscard]] Wanted wanted_of(const Destination& destination);

/// Pure: events and time in, actions out. Externally synchronised.
///
/// A transfer id lives from expect() or receive() until its event is out, its claim is cancelled, or its
/// session ends; a late message about it is dropped.
class Receiver {
 public:
  Receiver(const Cache& cache, const Timeouts& timeouts) : cache_(cache), timeouts_(timeouts) {}

  // --- from the engine's caller
  /// INTENT. Ids of one session must come in increasing order.
  void expect(const SessionId& session, TransferId transfer, const std::string& key, TimeUs now,
              Actions& out);
  /// OPEN, with or without an INTENT before.
  void receive(const SessionId& session, TransferId transfer, HandleId handle, const std::string& key,
               Bytes digest, Destination destination, TimeUs now, Actions& out);
  /// Ends a claim or receive. Its event comes at once, or when its running unpacks end.
  void cancel(TransferId transfer, Actions& out);

  // --- from sessions
  void open_session(const SessionId& session, std::size_t slot_bytes, std::uint32_t num_slots);
  void close_session(const SessionId& session, FailCode code, Actions& out);
  /// ACCEPT, END or FAIL.
  void on_message(const SessionId& session, const Body& body, TimeUs now, Actions& out);
  void on_box(const SessionId& session, const BoxNotice& box, TimeUs now, Actions& out);
  /// An Unpack has ended; `checksum` is that of the bytes as they were copied.
  void unpacked(const Unpack& unpack, std::uint64_t checksum, const Status& status, TimeUs now, Actions& out);

  void tick(TimeUs now, Actions& out);
  [[nodiscard]] TimeUs next_deadline() const { return deadlines_.next(); }
  [[nodiscard]] std::size_t num_transfers() const { return transfers_.size(); }
  /// Whether a transfer of this session is open.
  [[nodiscard]] bool busy(const SessionId& session) const;
  /// The largest id that this session has used, 0 at first; nothing when it is not open.
  [[nodiscard]] std::optional<TransferId> last_transfer(const SessionId& session) const;

 private:
  struct Transfer {
    SessionId session;
    std::string key;
    HandleId handle = 0;   ///< 0 while only claimed
    bool claimed = false;  ///< P was told of it, and is owed DONE or CANCEL
    bool accepted = false;
    Destination destination;
    std::vector<bool> arrived;             ///< per wanted unit
    std::vector<std::size_t> group_begin;  ///< first index in `arrived` of each group
    std::uint64_t units_wanted = 0;
    std::uint64_t units_done = 0;
    std::uint64_t num_boxes = 0;
    std::uint64_t num_bytes = 0;
    std::uint32_t unpacking = 0;
    std::optional<End> end;
    FailCode ending = FailCode::kNone;
    std::string detail;
    TimeUs opened_at = 0;
    TimeUs accepted_at = 0;
    TimeUs first_box_at = 0;
  };
  struct Session {
    std::size_t slot_bytes = 0;
    std::vector<bool> with_peer;  ///< per slot: P may fill it
    TransferId last_transfer = 0;
  };

  void fail(TransferId transfer, FailCode code, std::string detail, bool tell, Actions& out);
  void settle(TransferId transfer, TimeUs now, Actions& out);
  void give_back(const SessionId& session, std::uint32_t slot, Actions& out);
  [[nodiscard]] std::string objection(const Transfer& transfer, const Session& session, const Box& box) const;
  [[nodiscard]] std::size_t unit_index(const Transfer& transfer, const Box& box, std::uint32_t plane,
                                       std::uint32_t pos) const;

  const Cache& cache_;
  Timeouts timeouts_;
  std::map<TransferId, Transfer> transfers_;
  std::map<SessionId, Session> sessions_;
  Deadlines<TransferId> deadlines_;
};

}  // namespace kvpush::protocol
