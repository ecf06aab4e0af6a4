// A peer that says what is not so: a message of one end, rewritten on its way, with a hash that fits.
#pragma once

#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "base/bytes.hpp"
#include "dice.hpp"
#include "protocol/messages.hpp"

namespace kvpush::sim {

struct Lie {
  std::string_view name;
  Bytes bytes;
  bool fatal = false;  ///< docs/protocol.md says that a session ends by it
};

/// What a session's ends have said, and how to say something else. No lie is a forgery: none moves a box to
/// where D still waits for another one, with a checksum that fits.
class Liar {
 public:
  /// Of every message and notice, so that old ones can be told again.
  void listen(ByteView bytes, bool to_d);
  /// To be said instead of `bytes`; nothing if these give no occasion. At `rate`, but some lies oblige.
  [[nodiscard]] std::optional<Lie> lie(ByteView bytes, bool to_d, double rate, Dice& dice);

 private:
  std::vector<protocol::BoxNotice> boxes_;
  std::vector<protocol::Open> opens_;
  std::set<TransferId> claimed_;  ///< by INTENT
  bool takes_only_ = false;       ///< D gives nothing back any more, no slot and no claim, but lives
};

}  // namespace kvpush::sim
