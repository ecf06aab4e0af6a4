// What travels between two engines, and its byte form (docs/protocol.md).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "cache/box.hpp"
#include "protocol/fail_code.hpp"

namespace kvpush::protocol {

inline constexpr std::uint8_t kVersion = 1;
inline constexpr std::size_t kMaxKeyBytes = 512;
inline constexpr std::size_t kMaxDigestBytes = 64;
/// No message is longer; every transport carries at least this much.
inline constexpr std::size_t kMaxMessageBytes = 16384;

/// Wanted positions: per group, ascending ranges that do not touch.
using Wanted = std::vector<std::vector<PositionRange>>;

// From D.
struct Intent {
  TransferId transfer = 0;
  std::string key;
};
struct Open {
  TransferId transfer = 0;
  std::string key;
  Bytes digest;
  Wanted wanted;
};
struct Cancel {
  TransferId transfer = 0;
};
struct Done {
  TransferId transfer = 0;
};
struct Credit {
  std::vector<std::uint32_t> slots;
};
// From P.
struct Accept {
  TransferId transfer = 0;
};
/// No transfer: a BOX of zeros by which P measures the link. D returns its credit.
inline constexpr TransferId kProbe = 0;

struct BoxNotice {
  TransferId transfer = 0;
  std::uint32_t slot = 0;
  Box box;
  std::uint64_t checksum = 0;
};
struct End {
  TransferId transfer = 0;
  std::uint64_t num_boxes = 0;
  std::uint64_t num_units = 0;
};
struct Fail {
  TransferId transfer = 0;
  FailCode code = FailCode::kNone;
};
// From both.
struct Ping {
  std::uint64_t messages_sent = 0;
  std::uint64_t boxes_completed = 0;
};
struct Bye {};

using Body = std::variant<Intent, Open, Cancel, Done, Credit, Accept, BoxNotice, End, Fail, Ping, Bye>;

/// A message as it arrives. `seq` counts a session's messages (and, apart, its boxes) from 0; a PING
/// carries its own count, which nobody orders by.
struct Envelope {
  Incarnation sender;
  std::uint64_t seq = 0;
  Body body;
};

/// The byte form: header, body, and a hash of both.
[[nodiscard]] Bytes encode(const Envelope& envelope);
/// InvalidArgument says what is wrong with the bytes; nothing is assumed of them.
[[nodiscard]] Result<Envelope> decode(ByteView bytes);

/// For logs and tests: "OPEN", "BOX", ...
[[nodiscard]] std::string_view name_of(const Body& body) noexcept;

}  // namespace kvpush::protocol
