#include "base/status.hpp"

namespace kvpush {

std::string_view to_string(Code code) noexcept {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kDuplicateKey: return "duplicate_key";
    case Code::kQueueFull: return "queue_full";
    case Code::kClosed: return "closed";
    case Code::kHandshake: return "handshake";
    case Code::kPeerLost: return "peer_lost";
    case Code::kExhausted: return "exhausted";
    case Code::kUnsupported: return "unsupported";
    case Code::kTransport: return "transport";
  }
  return "unknown";
}

}  // namespace kvpush
