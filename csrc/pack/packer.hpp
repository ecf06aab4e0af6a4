// The seam to whatever moves bytes between paged KV and a dense slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "cache/box.hpp"

namespace kvpush {

/// One pack (cache to slot) or unpack (slot to cache). What it points to lives until the job is done.
struct PackJob {
  enum class Kind : std::uint8_t { kPack, kUnpack };

  TicketId ticket = 0;
  Kind kind = Kind::kPack;
  Box box;
  std::span<const std::int32_t> block_ids;  ///< one per position of the box; all valid, no holes
  std::byte* dense = nullptr;               ///< packed_bytes(cache, box) bytes
};

/// The end of one job. `checksum` is that of the dense form as it was moved (pack/checksum.hpp).
struct PackDone {
  TicketId ticket = 0;
  std::uint64_t checksum = 0;
  TimeUs copy_us = 0;  ///< what the copy took, waiting apart
  Status status;
};

/// Something that must have happened before blocks are touched; 0 is nothing.
using FenceId = std::uint64_t;

/// Moves boxes. The cache it works on is given at construction and outlives it.
/// Progress thread only, unless an implementation says otherwise.
class Packer {
 public:
  virtual ~Packer() = default;

  /// Starts `job`. Never blocks for longer than a short copy takes; its PackDone comes from a later poll(),
  /// exactly once. A job may be done when this returns: poll() before waiting.
  virtual void start(PackJob job) = 0;
  /// Appends what has ended since the last call.
  virtual void poll(std::vector<PackDone>& done) = 0;
  /// A descriptor that becomes readable when a job ends after start() returned, or -1 where poll() must be
  /// called for that.
  [[nodiscard]] virtual int wait_fd() const { return -1; }

  /// Takes down what `event` (a CUDA event of the caller's; 0 for none) stands for now: it may be recorded
  /// anew or destroyed when this returns. Unsupported where memory knows no events. Any thread.
  virtual Result<FenceId> capture(std::uint64_t event) {
    if (event == 0) return FenceId{0};
    return Status(Code::kUnsupported, "after=" + std::to_string(event) +
                                          ": this engine's cache is in host memory, which has no events; "
                                          "pass None");
  }
  /// Whether it has happened; then the fence is gone and must not be asked for again. A fence of a device
  /// that has failed passes: the copies behind it will fail.
  virtual bool passed(FenceId /*fence*/) { return true; }
  /// Forgets a fence that nobody waits for any more.
  virtual void drop(FenceId /*fence*/) {}
};

}  // namespace kvpush
