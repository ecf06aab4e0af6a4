// Why a transfer or a session ended other than well. The names are public: Event.status, docs/errors.md.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvpush {

enum class FailCode : std::uint8_t {
  kNone = 0,
  // Somebody wanted it to end.
  kCancelled,     ///< D cancelled, or needs nothing
  kAborted,       ///< P's caller aborted the push
  kEvicted,       ///< P was short of blocks and nobody had opened the push
  kEngineClosed,  ///< the engine was closed
  // The two sides do not fit.
  kDigestMismatch,  ///< P's prompt is not D's prompt
  kMissing,         ///< P finished without a position that D wanted
  kTaken,           ///< the push already serves another receive
  // Time ran out.
  kPairingTimeout,   ///< no push of this key appeared at P
  kProgressTimeout,  ///< paired, but no box for too long
  kUnclaimed,        ///< no D asked for the finished push
  kClaimExpired,     ///< claimed, but never opened
  // Something broke.
  kChecksum,    ///< a box arrived damaged
  kBreach,      ///< the peer broke the protocol
  kPack,        ///< a local pack or unpack failed
  kPeerClosed,  ///< the peer said BYE
  kPeerLost,    ///< the peer fell silent, died, or lost a message
  kTransport,   ///< a post or send failed
};

inline constexpr std::uint8_t kNumFailCodes = static_cast<std::uint8_t>(FailCode::kTransport) + 1;

[[nodiscard]] std::string_view to_string(FailCode code) noexcept;

}  // namespace kvpush
