// Which boxes of one session have arrived, from immediates and notices in any order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "base/bytes.hpp"

namespace kvpush {

/// P numbers the writes of a session from 0. Each carries the low 16 bits of its number, and each box's
/// notice says which numbers are the box's. A box is complete when its notice and all its writes are here:
/// nothing is assumed about order, and a repeated or late immediate changes nothing.
///
/// Of the numbers that are not yet delivered at most kWindow may be under way, so that 16 bits name one of
/// them. Credits keep P far below that.
class FabricArrivals {
 public:
  static constexpr std::uint64_t kWindow = 1U << 15U;

  /// One write's immediate. False: a repetition, or of a write that cannot be under way.
  bool add_write(std::uint16_t number);
  /// The notice of the writes [first, first + count). False: it is a repetition of one that is waiting or
  /// delivered; or a lie, and then is_broken().
  bool add_notice(std::uint64_t first, std::uint32_t count, ByteView notice);
  /// Takes one complete box's notice out.
  std::optional<Bytes> take();

  /// A notice named writes that no honest peer can have made by now.
  [[nodiscard]] bool is_broken() const noexcept { return broken_; }

 private:
  enum class State : std::uint8_t { kMissing, kArrived, kDelivered };
  struct Waiting {
    std::uint64_t count = 0;
    Bytes notice;
  };

  [[nodiscard]] bool is_complete(std::uint64_t first, std::uint64_t count) const;

  std::uint64_t low_ = 0;  // all writes below are delivered
  std::deque<State> states_;
  std::map<std::uint64_t, Waiting> waiting_;  // by first write
  std::deque<std::uint64_t> complete_;
  bool broken_ = false;
};

}  // namespace kvpush
