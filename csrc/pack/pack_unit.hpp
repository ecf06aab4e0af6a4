// Where the bytes of one unit lie, in the paged cache and in the dense form. Shared by host and device: it
// decides every address that a packer touches, and does nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack/host_device.hpp"

namespace kvpush {

/// One unit, shape [H, N, C], of a plane. All in bytes but the two counts; C is contiguous.
struct UnitLayout {
  std::int64_t num_heads = 1;
  std::int64_t num_tokens = 1;
  std::int64_t content_bytes = 0;
  std::int64_t block_stride_bytes = 0;
  std::int64_t head_stride_bytes = 0;
  std::int64_t token_stride_bytes = 0;

  KVPUSH_HD constexpr std::int64_t unit_bytes() const { return num_heads * num_tokens * content_bytes; }
  /// The unit lies in one piece within its block. Of a collapsed layout.
  KVPUSH_HD constexpr bool is_dense() const { return num_heads == 1 && num_tokens == 1; }
};

/// The same bytes in as few rows as possible: tokens that follow each other without a gap become content,
/// then heads that do.
KVPUSH_HD constexpr UnitLayout collapse(UnitLayout layout) {
  if (layout.num_tokens == 1 || layout.token_stride_bytes == layout.content_bytes) {
    layout.content_bytes *= layout.num_tokens;
    layout.num_tokens = 1;
    layout.token_stride_bytes = layout.content_bytes;
    if (layout.num_heads == 1 || layout.head_stride_bytes == layout.content_bytes) {
      layout.content_bytes *= layout.num_heads;
      layout.num_heads = 1;
      layout.head_stride_bytes = layout.content_bytes;
      layout.token_stride_bytes = layout.content_bytes;
    }
  }
  return layout;
}

/// Offset from the plane's base of byte 0 of (block, head, token).
KVPUSH_HD constexpr std::int64_t paged_offset(const UnitLayout& layout, std::int64_t block, std::int64_t head,
                                              std::int64_t token) {
  return block * layout.block_stride_bytes + head * layout.head_stride_bytes +
         token * layout.token_stride_bytes;
}

/// Walks a plane's dense form, unit after unit, in steps: chunks first, first + step, and so on. A chunk lies
/// within one row, so chunk_bytes must divide content_bytes. Divides only when made; next() adds and carries.
/// Counts in 32 bits, which a GPU adds twice as fast; the caller sees to it where the walk ends.
class UnitCursor {
 public:
  KVPUSH_HD constexpr UnitCursor(const UnitLayout& layout, std::int64_t chunk_bytes, std::uint64_t first,
                                 std::uint64_t step)
      : layout_(layout),
        chunk_bytes_(chunk_bytes),
        num_heads_(static_cast<std::uint32_t>(layout.num_heads)),
        num_tokens_(static_cast<std::uint32_t>(layout.num_tokens)),
        chunks_per_row_(static_cast<std::uint32_t>(layout.content_bytes / chunk_bytes)),
        at_(split(first)),
        step_(split(step)) {}

  KVPUSH_HD constexpr void next() {
    at_.chunk += step_.chunk;
    at_.token += step_.token;
    at_.head += step_.head;
    at_.unit += step_.unit;
    if (at_.chunk >= chunks_per_row_) {
      at_.chunk -= chunks_per_row_;
      ++at_.token;
    }
    if (at_.token >= num_tokens_) {
      at_.token -= num_tokens_;
      ++at_.head;
    }
    if (at_.head >= num_heads_) {
      at_.head -= num_heads_;
      ++at_.unit;
    }
  }

  /// Which unit the chunk is in.
  KVPUSH_HD constexpr std::uint32_t unit() const { return at_.unit; }
  /// Offset of the chunk from the plane's base, its unit being in block `block`.
  KVPUSH_HD constexpr std::int64_t paged(std::int64_t block) const {
    return paged_offset(layout_, block, at_.head, at_.token) + at_.chunk * chunk_bytes_;
  }

 private:
  struct Place {
    std::uint32_t unit = 0;
    std::uint32_t head = 0;
    std::uint32_t token = 0;
    std::uint32_t chunk = 0;
  };

  KVPUSH_HD constexpr Place split(std::uint64_t index) const {
    const std::uint64_t row = index / chunks_per_row_;
    const std::uint64_t head = row / num_tokens_;
    const std::uint64_t unit = head / num_heads_;
    return {static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(head - unit * num_heads_),
            static_cast<std::uint32_t>(row - head * num_tokens_),
            static_cast<std::uint32_t>(index - row * chunks_per_row_)};
  }

  UnitLayout layout_;
  std::int64_t chunk_bytes_;
  std::uint32_t num_heads_;
  std::uint32_t num_tokens_;
  std::uint32_t chunks_per_row_;
  Place at_;
  Place step_;
};

// vLLM's LBHNC, 8 heads x 32 tokens x 256 bytes: dense, so one run of 64 KiB.
static_assert(collapse({8, 32, 256, 65536, 8192, 256}).content_bytes == 65536);
static_assert(paged_offset({8, 32, 256, 65536, 8192, 256}, 3, 2, 1) == 3 * 65536 + 2 * 8192 + 256);

// Tokens before heads (NHD), 2 heads x 4 tokens x 64 bytes: rows of 64 bytes, 128 apart.
static_assert(!collapse({2, 4, 64, 512, 64, 128}).is_dense());
static_assert(paged_offset({2, 4, 64, 512, 64, 128}, 1, 1, 3) == 512 + 64 + 3 * 128);

// The second of three workers over 16-byte chunks: chunk 1, then 4, the first of the next row.
static_assert(UnitCursor({2, 4, 64, 512, 64, 128}, 16, 1, 3).paged(0) == 16);
static_assert([] {
  UnitCursor cursor({2, 4, 64, 512, 64, 128}, 16, 1, 3);
  cursor.next();
  return cursor.paged(0) == 128;
}());
// A unit has 32 chunks: chunk 33 is the second of the next.
static_assert(UnitCursor({2, 4, 64, 512, 64, 128}, 16, 33, 1).unit() == 1);
static_assert(UnitCursor({2, 4, 64, 512, 64, 128}, 16, 33, 1).paged(7) == 7 * 512 + 16);

}  // namespace kvpush
