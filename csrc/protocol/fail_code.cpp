#include "protocol/fail_code.hpp"

namespace kvpush {

std::string_view to_string(FailCode code) noexcept {
  switch (code) {
    case FailCode::kNone: return "ok";
    case FailCode::kCancelled: return "cancelled";
    case FailCode::kAborted: return "aborted";
    case FailCode::kEvicted: return "evicted";
    case FailCode::kEngineClosed: return "engine_closed";
    case FailCode::kDigestMismatch: return "digest_mismatch";
    case FailCode::kMissing: return "missing";
    case FailCode::kTaken: return "taken";
    case FailCode::kPairingTimeout: return "pairing_timeout";
    case FailCode::kProgressTimeout: return "progress_timeout";
    case FailCode::kUnclaimed: return "unclaimed";
    case FailCode::kClaimExpired: return "claim_expired";
    case FailCode::kChecksum: return "checksum";
    case FailCode::kBreach: return "breach";
    case FailCode::kPack: return "pack";
    case FailCode::kPeerClosed: return "peer_closed";
    case FailCode::kPeerLost: return "peer_lost";
    case FailCode::kTransport: return "transport";
  }
  return "unknown";
}

}  // namespace kvpush
