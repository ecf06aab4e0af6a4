// What is handed to libfabric: operations with their contexts, message buffers, and how messages look.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "base/ids.hpp"

namespace kvpush {

struct FabricPeer;

/// The byte behind the session's id at the front of every message.
enum class FabricKind : std::uint8_t {
  kMessage = 1,
  kNotice = 2,
  kClosed = 3,  ///< the sender has closed the session
  kQuiet = 4,   ///< the same, and it writes no more: its writes have arrived
  kTrial = 5,   ///< of no session: shows the sender that a lane works
};

/// One message, taken apart.
struct FabricFrame {
  SessionId session;
  FabricKind kind = FabricKind::kMessage;
  std::uint32_t num_writes = 0;   ///< of a notice's box
  std::uint64_t first_write = 0;  ///< the same
  ByteView payload;
};

inline constexpr std::size_t kFabricFrameBytes = sizeof(Uuid::bytes) + 1 + 4 + 8;
inline constexpr std::size_t kFabricMaxMessageBytes = std::size_t{16} << 10U;
inline constexpr std::size_t kFabricBufferBytes = kFabricMaxMessageBytes + 64;
static_assert(kFabricFrameBytes <= 64);

/// Nothing for what is too short or of no known kind.
[[nodiscard]] std::optional<FabricFrame> decode_fabric_frame(ByteView bytes);

enum class FabricOperationKind : std::uint8_t { kReceive, kSend, kWrite };

/// One operation that libfabric may have under way. Its address is the operation's context.
struct FabricOperation {
  std::array<void*, 8> internal{};  ///< libfabric's (FI_CONTEXT2)
  FabricOperationKind kind{};
  SessionId session;
  FabricPeer* peer = nullptr;
  std::uint32_t lane = 0;       ///< of the peer's; of a write or message
  std::uint32_t rail = 0;       ///< that it is under way over
  bool under_way = false;       ///< libfabric has it; of a write or message
  std::uint64_t post = 0;       ///< of a write or a notice
  std::span<std::byte> buffer;  ///< of a message
  std::size_t size_bytes = 0;   ///< of the message in it, or of the write
  FabricKind frame = FabricKind::kMessage;
  std::uint32_t num_tries = 0;  ///< of a message: lanes that it has failed on
};
using FabricMessage = FabricOperation;

/// All operations of one transport, over whichever rail. Addresses are stable. Progress thread only.
class FabricOperations {
 public:
  static constexpr std::size_t kNumSends = 256;
  static constexpr std::size_t kNumReceives = 256;  ///< of each rail
  [[nodiscard]] static constexpr std::size_t buffer_bytes(std::size_t num_rails) {
    return (kNumSends + num_rails * kNumReceives) * kFabricBufferBytes;
  }

  /// Cuts buffer_bytes() at `memory` into buffers: first for all messages that leave, then for each rail's
  /// receives.
  void use(std::byte* memory);
  /// Receives of the next rail, at most kNumReceives.
  std::vector<FabricOperation*> add_receives(std::uint32_t rail, std::size_t count);

  /// A message with its frame written; null when all are under way.
  FabricMessage* take_message(const SessionId& session, FabricKind kind, std::uint32_t num_writes,
                              std::uint64_t first_write, ByteView payload);
  FabricOperation& take_write();
  /// Takes back a message or write that has ended or was not started.
  void give_back(FabricOperation& operation);

  /// Messages that are taken.
  [[nodiscard]] std::size_t num_messages() const noexcept { return kNumSends - idle_messages_.size(); }
  /// Whether libfabric handed back one of ours: not all its errors belong to an operation.
  [[nodiscard]] bool owns(const void* context) const;
  /// Messages and writes that libfabric has on this rail.
  [[nodiscard]] std::vector<FabricOperation*> under_way(std::uint32_t rail);

 private:
  FabricOperation& add(FabricOperationKind kind);

  std::deque<FabricOperation> all_;
  std::byte* next_buffer_ = nullptr;
  std::vector<FabricOperation*> idle_messages_;
  std::vector<FabricOperation*> idle_writes_;
};

}  // namespace kvpush
