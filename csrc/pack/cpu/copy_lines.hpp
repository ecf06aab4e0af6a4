// The inner loops of the CPU packer: copy whole lines and add them to a checksum in one pass.
#pragma once

#include <cstddef>
#include <span>

#include "pack/checksum.hpp"

namespace kvpush {

/// Copies `num_lines` lines of kChecksumLineBytes and adds them to `lanes`. Each byte is read once, so what
/// is summed is what was stored. `ahead` is where to prefetch that much; it need not be readable.
using CopyLines = void (*)(std::byte* to, const std::byte* from, const std::byte* ahead,
                           std::size_t num_lines, ChecksumLanes& lanes) noexcept;

/// The loops for one instruction set.
struct LineCopier {
  const char* name;
  /// For bytes that are read again soon. Any alignment. Prefetches.
  CopyLines cached;
  /// Past the caches: spares reading the lines that are overwritten. `to` must be aligned to
  /// `streaming_alignment`. Does not prefetch. Weakly ordered: see streaming_fence().
  CopyLines streaming;
  std::size_t streaming_alignment;
};

/// Those that this CPU can run, the fastest last.
[[nodiscard]] std::span<const LineCopier> line_copiers() noexcept;

/// Orders `streaming` stores of this thread before all its later ones. Without it another thread, or the
/// peer, could see that a copy is done and not yet its bytes: a lock or an atomic does not order such stores.
void streaming_fence() noexcept;

}  // namespace kvpush
