// Copies the units of one plane between the cache and a dense form, in dense order, summing as it goes.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "cache/cache.hpp"
#include "pack/checksum.hpp"
#include "pack/pack_unit.hpp"
#include "pack/packer.hpp"

namespace kvpush {

/// The dense side of one job, visited front to back. What was copied is summed at its destination, in pieces
/// that are still in the first-level cache.
class DenseWindow {
 public:
  DenseWindow(PackJob::Kind kind, std::byte* dense) : packing_(kind == PackJob::Kind::kPack), dense_(dense) {}

  /// Copies the next `num_bytes` of the dense form from, or to, `paged`.
  void copy(std::byte* paged, std::size_t num_bytes) {
    while (num_bytes > 0) {
      const std::size_t piece = std::min(num_bytes, kPieceBytes);
      if (packing_) {
        std::memcpy(dense_ + offset_, paged, piece);
        offset_ += piece;
        if (offset_ - summed_ >= kPieceBytes) sum_dense();
      } else {
        std::memcpy(paged, dense_ + offset_, piece);
        sum_ += checksum_part({paged, piece}, offset_);
        offset_ += piece;
      }
      paged += piece;
      num_bytes -= piece;
    }
  }

  /// The checksum of everything copied.
  [[nodiscard]] std::uint64_t finish() {
    if (packing_) sum_dense();
    return sum_;
  }

 private:
  static constexpr std::size_t kPieceBytes = 16 * 1024;

  // Small runs are summed together once they fill a piece.
  void sum_dense() {
    sum_ += checksum_part({dense_ + summed_, offset_ - summed_}, summed_);
    summed_ = offset_;
  }

  const bool packing_;
  std::byte* const dense_;
  std::size_t offset_ = 0;
  std::size_t summed_ = 0;
  std::uint64_t sum_ = 0;
};

[[nodiscard]] inline UnitLayout layout_of(const Plane& plane) {
  return collapse({plane.num_heads, plane.num_tokens, plane.content_bytes, plane.block_stride_bytes,
                   plane.head_stride_bytes, plane.token_stride_bytes});
}

/// Copies the blocks of one plane, in the order given. Ids must lie within the plane.
inline void copy_plane(const Plane& plane, std::span<const std::int32_t> block_ids, DenseWindow& window) {
  const UnitLayout layout = layout_of(plane);
  const bool blocks_touch = layout.is_dense() && layout.block_stride_bytes == layout.content_bytes;
  for (std::size_t i = 0; i < block_ids.size();) {
    const std::int64_t block = block_ids[i];
    if (layout.is_dense()) {
      std::size_t end = i + 1;
      while (blocks_touch && end < block_ids.size() && block_ids[end] == block_ids[end - 1] + 1) ++end;
      window.copy(plane.base + paged_offset(layout, block, 0, 0),
                  (end - i) * static_cast<std::size_t>(layout.content_bytes));
      i = end;
    } else {
      for (UnitCursor row(layout, layout.content_bytes, 0, 1); row.valid(); row.next()) {
        window.copy(plane.base + row.paged(block), static_cast<std::size_t>(layout.content_bytes));
      }
      ++i;
    }
  }
}

}  // namespace kvpush
