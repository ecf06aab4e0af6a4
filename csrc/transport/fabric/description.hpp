// What the two sides of a session tell each other at the handshake, as bytes.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "transport/process_identity.hpp"

namespace kvpush {

/// The landing that D opens for one session.
struct FabricLandingInfo {
  std::uint64_t base = 0;  ///< remote address of its first byte; 0 where addresses are offsets
  std::uint64_t key = 0;
  std::uint64_t slot_bytes = 0;
  std::uint32_t num_slots = 0;  ///< 0: P's side, which has none
  std::uint16_t index = 0;      ///< upper half of the immediates of this session's writes
};

/// One side of a session.
struct FabricDescription {
  SessionId session;
  Incarnation incarnation;
  std::string protocol;  ///< FabricEndpoint::protocol()
  ProcessIdentity process;
  Bytes endpoint;  ///< FabricEndpoint::name()
  FabricLandingInfo landing;
};

/// Version, fields and a checksum: providers must not be handed a damaged address.
[[nodiscard]] Bytes encode(const FabricDescription& description);

/// Checks every field by itself. Handshake errors say which one does not fit.
/// Threads: any.
Result<FabricDescription> decode_fabric_description(ByteView bytes);

}  // namespace kvpush
