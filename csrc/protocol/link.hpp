// Order, duplicates, loss and silence of one session's messages, on either side.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "protocol/messages.hpp"
#include "protocol/timers.hpp"

namespace kvpush::protocol {

/// Messages may come reordered, twice or not at all: Link hands them on in order and once, and says
/// when one is lost or the peer is silent. Nothing is ever sent again. Externally synchronised.
class Link {
 public:
  Link(const Incarnation& self, const Incarnation& peer, TimeUs peer_timeout_us, TimeUs now);

  /// Numbers and encodes an outgoing message. PING stands outside the order, BOX has its own count.
  [[nodiscard]] Bytes seal(Body body);
  /// A post of a box has completed here: PING will tell the peer.
  void box_completed() { ++boxes_completed_; }

  /// Takes one arrived message. Appends to `in_order` what can be handed on now. An error is a breach.
  [[nodiscard]] Status take_message(ByteView bytes, TimeUs now, std::vector<Body>& in_order);
  /// Takes one arrived notice: its box, or nothing when it was seen before or is another incarnation's.
  [[nodiscard]] Result<std::optional<BoxNotice>> take_notice(ByteView bytes, TimeUs now);

  /// Whether a PING should go out now; if so, the next one is a tenth of the peer timeout away.
  [[nodiscard]] bool ping_due(TimeUs now);
  /// The transport had no room for it: it is due again soon, so that a few refusals are no silence.
  void ping_refused(TimeUs now);
  /// Says why the session is lost (silence, or a gap that stays open), or nothing.
  [[nodiscard]] std::optional<std::string> check(TimeUs now) const;
  /// It was us who slept: all silence counts from now.
  void restart_clocks(TimeUs now);
  /// When ping_due() or check() next has something to say.
  [[nodiscard]] TimeUs next_deadline() const;

 private:
  [[nodiscard]] std::uint64_t boxes_seen() const { return boxes_in_order_ + boxes_ahead_.size(); }
  void note_gap(TimeUs now);

  Incarnation self_;
  Incarnation peer_;
  TimeUs peer_timeout_us_;

  std::uint64_t messages_sent_ = 0;
  std::uint64_t boxes_sent_ = 0;
  std::uint64_t boxes_completed_ = 0;
  std::uint64_t pings_sent_ = 0;
  TimeUs next_ping_;

  std::uint64_t messages_in_order_ = 0;
  std::map<std::uint64_t, Body> messages_ahead_;
  std::uint64_t boxes_in_order_ = 0;
  std::set<std::uint64_t> boxes_ahead_;
  TimeUs last_heard_;

  // What the latest PING promised, and since when the first unmet promise is open.
  std::uint64_t promised_messages_ = 0;
  std::uint64_t promised_boxes_ = 0;
  std::uint64_t gap_messages_ = 0;
  std::uint64_t gap_boxes_ = 0;
  TimeUs gap_since_ = kNever;
};

}  // namespace kvpush::protocol
