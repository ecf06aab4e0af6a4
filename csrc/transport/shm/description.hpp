// What the two sides of a shared-memory session tell each other inside offer and answer.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "shim/cuda_driver.hpp"
#include "transport/process_identity.hpp"

namespace kvpush::shm {

/// The place within which an abstract socket name and a memory file mean the same to two processes: the
/// kernel's boot id and the network namespace. Errors: Transport (no /proc).
/// Source: unix(7), abstract names belong to the network namespace; random(4), boot_id.
Result<std::string> host_identity();

/// One life of this process: unlike a pid, the same in no other process of any pid namespace.
const Uuid& process_identity();

enum class DescriptionKind : std::uint8_t { kOffer = 1, kAnswer = 2 };

/// D's slots in device memory, all of them in one piece.
struct DeviceSlots {
  std::string gpu;            ///< its uuid, 32 hex digits
  std::uint64_t address = 0;  ///< in D's process
  CudaIpcHandle handle{};     ///< for any other process
};

struct Description {
  DescriptionKind kind = DescriptionKind::kOffer;
  std::string host;
  Incarnation engine;  ///< also names its socket
  SessionId session;
  std::int32_t pid = 0;  ///< for people; in the peer's own pid namespace
  std::uint64_t slot_bytes = 0;
  std::uint32_t num_slots = 0;
  Uuid process{};          ///< process_identity()
  ProcessIdentity life{};  ///< this_process(), so that the peer can prove its end
  bool on_device = false;  ///< offer: `device` may be used as slots; answer: P will try to
  DeviceSlots device{};    ///< of an offer with on_device
};

[[nodiscard]] Bytes encode(const Description& description);

/// Decodes and checks against what this side knows: `expected` holds our host, the session and its slots;
/// its engine and pid are ignored.
/// Errors: Handshake, naming both values of what differs.
Result<Description> decode_matching(ByteView bytes, const Description& expected);

}  // namespace kvpush::shm
