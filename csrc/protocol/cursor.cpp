#include "protocol/cursor.hpp"

#include <algorithm>
#include <utility>

namespace kvpush::protocol {
namespace {

constexpr std::uint32_t kMaxSplitStripe = 64;

}  // namespace

Cursor::Cursor(const Group& group, std::uint32_t group_index, std::vector<PositionRange> wanted,
               std::size_t box_bytes)
    : wanted_(std::move(wanted)),
      box_bytes_(box_bytes),
      num_planes_(static_cast<std::uint32_t>(group.planes.size())),
      num_heads_(static_cast<std::uint32_t>(group.planes.front().num_heads)),
      group_index_(group_index) {
  for (const Plane& plane : group.planes) max_unit_bytes_ = std::max(max_unit_bytes_, plane.unit_bytes());
  if (!wanted_.empty()) pos_ = stripe_end_ = wanted_.front().begin;
}

bool Cursor::ready(std::uint32_t num_ready) const {
  if (exhausted()) return false;
  return stripe_end_ > pos_ ? num_ready >= stripe_end_ : num_ready > pos_;
}

Box Cursor::next(std::uint32_t num_ready) {
  if (stripe_end_ == pos_) {
    stripe_end_ = pos_ + stripe_length(std::min(num_ready, wanted_[range_].end) - pos_);
  }
  const std::uint32_t length = stripe_end_ - pos_;
  const auto fit = static_cast<std::uint32_t>(
      std::clamp<std::size_t>(box_bytes_ / (length * max_unit_bytes_), 1, num_planes_ - plane_));
  const Box box{group_index_, plane_, plane_ + fit, 0, num_heads_, pos_, stripe_end_};
  plane_ += fit;
  if (plane_ == num_planes_) {
    plane_ = 0;
    pos_ = stripe_end_;
    if (pos_ == wanted_[range_].end) ++range_;
    if (!exhausted()) pos_ = stripe_end_ = std::max(pos_, wanted_[range_].begin);
  }
  return box;
}

std::uint32_t Cursor::position() const {
  if (!exhausted()) return pos_;
  return wanted_.empty() ? 0 : wanted_.back().end;
}

std::optional<std::uint32_t> Cursor::needs() const {
  if (exhausted()) return std::nullopt;
  return stripe_end_ > pos_ ? stripe_end_ - 1 : pos_;
}

std::uint32_t Cursor::stripe_length(std::uint32_t available) const {
  const std::size_t units_per_box = std::max<std::size_t>(box_bytes_ / max_unit_bytes_, 1);
  if (units_per_box >= num_planes_) {
    return static_cast<std::uint32_t>(std::min<std::size_t>(available, units_per_box / num_planes_));
  }
  // One position needs several boxes: the length that wastes the least room, shortest on a tie.
  const auto longest =
      static_cast<std::uint32_t>(std::min<std::size_t>({available, units_per_box, kMaxSplitStripe}));
  std::uint32_t best = 1;
  std::size_t best_boxes = 0;
  for (std::uint32_t length = 1; length <= longest; ++length) {
    const std::size_t planes_per_box = units_per_box / length;
    const std::size_t boxes = (num_planes_ + planes_per_box - 1) / planes_per_box;
    if (length == 1 || boxes * best < best_boxes * length) {
      best = length;
      best_boxes = boxes;
    }
  }
  return best;
}

}  // namespace kvpush::protocol
