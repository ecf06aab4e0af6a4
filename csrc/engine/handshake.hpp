// Hello, offer and answer: what two workers tell each other before anything else, and their byte form.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "engine/choice.hpp"

namespace kvpush {

/// P: "this is how I am reached". D may choose by it, and need not have it.
struct Hello {
  Incarnation engine;
  bool measures = false;    ///< sessions over paths that can be measured are, and D is told
  std::vector<Path> paths;  ///< at most kMaxPaths, each name once
};

/// D: "here is a landing that only you may write, and this is what my cache looks like".
struct Offer {
  Incarnation engine;
  SessionId session;
  std::string transport;
  std::uint64_t slot_bytes = 0;
  std::uint32_t num_slots = 0;
  std::map<std::string, std::string> identity;  ///< Cache::identity()
  Bytes description;                            ///< Transport::open_landing()
};

/// P: "I will push into it".
struct Answer {
  Incarnation engine;
  SessionId session;
  std::uint64_t box_bytes = 0;            ///< no box will be larger
  std::vector<SessionId> quiet_sessions;  ///< closed sessions of this pair into which P writes no more
  Bytes description;                      ///< Transport::accept()
};

inline constexpr std::size_t kMaxHandshakeBytes = 4U << 20U;
inline constexpr std::size_t kMaxQuietSessions = 64;
inline constexpr std::size_t kMaxPaths = 16;
/// Of one landing. P keeps a list of them.
inline constexpr std::uint32_t kMaxSlots = 4096;
/// Open landings of one D at one P. It uses one; others are of lost answers, or of ends not yet noticed.
inline constexpr std::size_t kMaxLandingsPerPeer = 8;

[[nodiscard]] Bytes encode(const Hello& hello);
[[nodiscard]] Bytes encode(const Offer& offer);
[[nodiscard]] Bytes encode(const Answer& answer);
/// Handshake errors name what is wrong, and both versions when they differ.
[[nodiscard]] Result<Hello> decode_hello(ByteView bytes);
[[nodiscard]] Result<Offer> decode_offer(ByteView bytes);
[[nodiscard]] Result<Answer> decode_answer(ByteView bytes);

}  // namespace kvpush
