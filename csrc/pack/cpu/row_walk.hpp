// The rows of a box in the order of the dense form.
#pragma once

#include <algorithm>
#include <optional>
#include <span>

#include "cache/box.hpp"
#include "pack/pack_unit.hpp"

namespace kvpush {

[[nodiscard]] inline UnitLayout layout_of(const Plane& plane) {
  return collapse({plane.num_heads, plane.num_tokens, plane.content_bytes, plane.block_stride_bytes,
                   plane.head_stride_bytes, plane.token_stride_bytes});
}

/// Walks the rows of `box`: planes, then positions, then heads and tokens. A row is as long as the layout
/// lets it be; blocks that follow each other in the table and touch in memory are one. Ids must lie within
/// the group.
class RowWalk {
 public:
  RowWalk(const Group& group, const Box& box, std::span<const std::int32_t> block_ids)
      : planes_(std::span(group.planes).subspan(box.plane_begin, box.num_planes())), ids_(block_ids) {
    if (valid()) enter_plane();
  }

  [[nodiscard]] bool valid() const { return !planes_.empty(); }
  /// The next byte, and how many of its row are left: at least one. Of a valid walk.
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t left() const { return left_; }

  /// Passes over `num_bytes`, or to the end.
  void skip(std::size_t num_bytes) {
    while (valid() && num_bytes >= left_) {
      num_bytes -= left_;
      next_row();
    }
    if (!valid()) return;
    data_ += num_bytes;
    left_ -= num_bytes;
  }

 private:
  void next_row() {
    if (row_) {
      row_->next();
      if (row_->unit() == 0) return enter_row();
    }
    if (next_id_ < ids_.size()) return enter_block();
    planes_ = planes_.subspan(1);
    if (valid()) enter_plane();
  }
  void enter_plane() {
    layout_ = layout_of(planes_.front());
    next_id_ = 0;
    enter_block();
  }
  void enter_block() {
    block_ = ids_[next_id_++];
    if (!layout_.is_dense()) {
      row_.emplace(layout_, layout_.content_bytes, 0, 1);
      return enter_row();
    }
    row_.reset();
    const std::size_t first = next_id_ - 1;
    if (layout_.block_stride_bytes == layout_.content_bytes) {
      while (next_id_ < ids_.size() && ids_[next_id_] == ids_[next_id_ - 1] + 1) ++next_id_;
    }
    data_ = planes_.front().base + paged_offset(layout_, block_, 0, 0);
    left_ = (next_id_ - first) * static_cast<std::size_t>(layout_.content_bytes);
  }
  void enter_row() {
    data_ = planes_.front().base + row_->paged(block_);
    left_ = static_cast<std::size_t>(layout_.content_bytes);
  }

  std::span<const Plane> planes_;  ///< this one, and those to come
  std::span<const std::int32_t> ids_;
  UnitLayout layout_;
  std::optional<UnitCursor> row_;  ///< of a unit that is not in one piece
  std::int64_t block_ = 0;
  std::size_t next_id_ = 0;
  std::byte* data_ = nullptr;
  std::size_t left_ = 0;
};

}  // namespace kvpush
