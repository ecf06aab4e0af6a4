// What the two sides of a session tell each other at the handshake, as bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "transport/process_identity.hpp"

namespace kvpush {

/// The landing that D opens for one session.
struct FabricLandingInfo {
  std::uint64_t slot_bytes = 0;
  std::uint32_t num_slots = 0;   ///< 0: P's side, which has none
  std::uint32_t max_writes = 0;  ///< of one box, so that D's queues hold the entries of all
  std::uint16_t index = 0;       ///< upper half of the immediates of this session's writes
};

/// One rail of an engine, and the landing as writes over it address it.
struct FabricRailInfo {
  Bytes endpoint;          ///< FabricEndpoint::name()
  bool alive = true;       ///< false: it has failed, and keeps its place only
  std::uint64_t base = 0;  ///< remote address of the first byte; 0 where addresses are offsets
  std::uint64_t key = 0;
};

/// One side of a session.
struct FabricDescription {
  SessionId session;
  Incarnation incarnation;
  std::string protocol;  ///< FabricNic::protocol, of all rails
  ProcessIdentity process;
  std::vector<FabricRailInfo> rails;  ///< 1 to kFabricMaxRails, the same in all sessions of an engine
  FabricLandingInfo landing;
};

/// Version, fields and a checksum: providers must not be handed a damaged address.
[[nodiscard]] Bytes encode(const FabricDescription& description);

/// Checks every field by itself. Handshake errors say which one does not fit.
/// Threads: any.
Result<FabricDescription> decode_fabric_description(ByteView bytes);

}  // namespace kvpush
