#include "cache/box.hpp"

namespace kvpush {

std::size_t packed_bytes(const Cache& cache, const Box& box) {
  const Group& group = cache.groups[box.group];
  std::size_t per_position = 0;
  for (std::uint32_t p = box.plane_begin; p < box.plane_end; ++p)
    per_position += group.planes[p].unit_bytes();
  return per_position * box.num_positions();
}

bool box_fits(const Cache& cache, const Box& box) {
  if (box.group >= cache.groups.size()) return false;
  const Group& group = cache.groups[box.group];
  if (box.plane_begin >= box.plane_end || box.plane_end > group.planes.size()) return false;
  if (box.pos_begin >= box.pos_end || box.head_begin != 0) return false;
  for (std::uint32_t p = box.plane_begin; p < box.plane_end; ++p) {
    if (group.planes[p].num_heads != std::int64_t{box.head_end}) return false;
  }
  return true;
}

}  // namespace kvpush
