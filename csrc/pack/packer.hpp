// The seam to whatever moves bytes between paged KV and a dense slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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
};

}  // namespace kvpush
