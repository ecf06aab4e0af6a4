// What the two sides of a session tell each other at the handshake, as bytes.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "transport/nixl/agent.hpp"
#include "transport/process_identity.hpp"

namespace kvpush {

/// The landing that D opens for one session.
struct NixlLandingInfo {
  std::uint64_t base_address = 0;
  std::uint64_t slot_bytes = 0;
  std::uint32_t num_slots = 0;
  NixlMemoryPlace place{};
  Bytes access;  ///< NIXL's partial metadata: reaches this landing and nothing else
};

/// One side of a session. D's has a landing, P's has none (its base address is 0).
struct NixlDescription {
  SessionId session;
  Incarnation incarnation;
  std::string backends;  ///< comma-separated, for messages
  ProcessIdentity process;
  Bytes connection;  ///< NIXL's metadata without memory
  NixlLandingInfo landing;
};

/// The name of the agent of one engine's life: "kvpush-" and 32 hex digits.
[[nodiscard]] std::string nixl_agent_name(const Incarnation& incarnation);

/// Version, fields and a checksum: NIXL and UCX must not be handed damaged metadata, which they do not
/// survive in every case.
[[nodiscard]] Bytes encode(const NixlDescription& description);

/// Checks every field by itself. Handshake errors say which one does not fit.
/// Threads: any.
Result<NixlDescription> decode_nixl_description(ByteView bytes);

}  // namespace kvpush
