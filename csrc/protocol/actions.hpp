// What the state machines ask for. The engine carries it out, in order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "cache/box.hpp"
#include "protocol/fail_code.hpp"
#include "protocol/messages.hpp"

namespace kvpush::protocol {

/// One thing that the caller of the engine is told.
struct Event {
  enum class Kind : std::uint8_t { kSent, kReceived, kFailed, kLost };
  enum class Side : std::uint8_t { kNone, kPush, kReceive };

  Kind kind = Kind::kFailed;
  Side side = Side::kNone;
  HandleId handle = 0;
  std::string key;
  TransferId transfer = 0;
  SessionId session;
  FailCode status = FailCode::kNone;
  std::string detail;
  std::uint64_t bytes = 0;
  std::uint64_t boxes = 0;
  std::map<std::string, TimeUs> timings;  ///< stage name to microseconds
};

/// A box has arrived in a slot and is to be copied into D's blocks.
struct Unpack {
  SessionId session;
  TransferId transfer = 0;
  std::uint32_t slot = 0;
  Box box;
  std::uint64_t checksum = 0;
  std::vector<std::int32_t> block_ids;
};

struct Actions {
  std::vector<std::pair<SessionId, Body>> messages;
  std::vector<std::pair<SessionId, std::uint32_t>> credits;  ///< slots that D gives back
  std::vector<Unpack> unpacks;
  std::vector<Event> events;
  std::vector<std::pair<SessionId, std::string>> breaches;  ///< sessions to close, and why
};

}  // namespace kvpush::protocol
