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

/// Offset from the unit's start in the dense form of byte 0 of (head, token).
KVPUSH_HD constexpr std::int64_t dense_offset(const UnitLayout& layout, std::int64_t head,
                                              std::int64_t token) {
  return (head * layout.num_tokens + token) * layout.content_bytes;
}

/// Walks the chunks of one unit that fall to worker `first` of `step` workers: chunks first, first + step,
/// and so on, in dense order. A chunk lies within one row, so chunk_bytes must divide content_bytes.
/// Divides only when made; next() adds and carries.
class UnitCursor {
 public:
  KVPUSH_HD constexpr UnitCursor(const UnitLayout& layout, std::int64_t chunk_bytes, std::int64_t first,
                                 std::int64_t step)
      : layout_(layout), chunk_bytes_(chunk_bytes), chunks_per_row_(layout.content_bytes / chunk_bytes) {
    split(first, head_, token_, chunk_);
    split(step, head_step_, token_step_, chunk_step_);
  }

  KVPUSH_HD constexpr bool valid() const { return head_ < layout_.num_heads; }
  KVPUSH_HD constexpr void next() {
    chunk_ += chunk_step_;
    token_ += token_step_;
    head_ += head_step_;
    if (chunk_ >= chunks_per_row_) {
      chunk_ -= chunks_per_row_;
      ++token_;
    }
    if (token_ >= layout_.num_tokens) {
      token_ -= layout_.num_tokens;
      ++head_;
    }
  }

  /// Offset of the chunk from the plane's base, in block `block`.
  KVPUSH_HD constexpr std::int64_t paged(std::int64_t block) const {
    return paged_offset(layout_, block, head_, token_) + chunk_ * chunk_bytes_;
  }
  /// Offset of the chunk from the unit's start in the dense form.
  KVPUSH_HD constexpr std::int64_t dense() const {
    return dense_offset(layout_, head_, token_) + chunk_ * chunk_bytes_;
  }

 private:
  KVPUSH_HD constexpr void split(std::int64_t index, std::int64_t& head, std::int64_t& token,
                                 std::int64_t& chunk) const {
    const std::int64_t row = index / chunks_per_row_;
    chunk = index - row * chunks_per_row_;
    head = row / layout_.num_tokens;
    token = row - head * layout_.num_tokens;
  }

  UnitLayout layout_;
  std::int64_t chunk_bytes_;
  std::int64_t chunks_per_row_;
  std::int64_t head_ = 0;
  std::int64_t token_ = 0;
  std::int64_t chunk_ = 0;
  std::int64_t head_step_ = 0;
  std::int64_t token_step_ = 0;
  std::int64_t chunk_step_ = 0;
};

// vLLM's LBHNC, 8 heads x 32 tokens x 256 bytes: dense, so one run of 64 KiB.
static_assert(collapse({8, 32, 256, 65536, 8192, 256}).content_bytes == 65536);
static_assert(paged_offset({8, 32, 256, 65536, 8192, 256}, 3, 2, 1) == 3 * 65536 + 2 * 8192 + 256);

// Tokens before heads (NHD), 2 heads x 4 tokens x 64 bytes: rows of 64 bytes, 128 apart; dense is by head.
static_assert(!collapse({2, 4, 64, 512, 64, 128}).is_dense());
static_assert(paged_offset({2, 4, 64, 512, 64, 128}, 1, 1, 3) == 512 + 64 + 3 * 128);
static_assert(dense_offset({2, 4, 64, 512, 64, 128}, 1, 3) == 7 * 64);

// The second of three workers over 16-byte chunks: chunk 1, then 4, the first of the next row.
static_assert(UnitCursor({2, 4, 64, 512, 64, 128}, 16, 1, 3).paged(0) == 16);
static_assert([] {
  UnitCursor cursor({2, 4, 64, 512, 64, 128}, 16, 1, 3);
  cursor.next();
  return cursor.paged(0) == 128 && cursor.dense() == 64;
}());

}  // namespace kvpush
