// The seam to whatever moves bytes between paged KV and a dense slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "cache/box.hpp"

namespace kvpush {

/// One pack (cache to slot) or unpack (slot to cache).
struct PackJob {
  enum class Kind : std::uint8_t { kPack, kUnpack };

  TicketId ticket = 0;
  Kind kind = Kind::kPack;
  Box box;
  std::vector<std::int32_t> block_ids;  ///< one per position of the box; all valid, no holes
  std::byte* dense = nullptr;           ///< packed_bytes(cache, box) bytes, alive until the job is done
};

/// The end of one job. `checksum` is that of the dense form as it was moved (pack/checksum.hpp).
struct PackDone {
  TicketId ticket = 0;
  std::uint64_t checksum = 0;
  Status status;
};

/// Moves boxes. The cache it works on is given at construction and outlives it.
/// Progress thread only, unless an implementation says otherwise.
class Packer {
 public:
  virtual ~Packer() = default;

  /// Starts `job`. Never blocks; its PackDone comes from a later poll(), exactly once.
  virtual void start(PackJob job) = 0;
  /// Appends what has ended since the last call.
  virtual void poll(std::vector<PackDone>& done) = 0;
  /// A descriptor that becomes readable when a job ends, or -1 where poll() must be called for that.
  [[nodiscard]] virtual int wait_fd() const { return -1; }
};

}  // namespace kvpush
