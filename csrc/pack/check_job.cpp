#include "pack/check_job.hpp"

#include <string>

namespace kvpush {

Status check_job(const Cache& cache, const PackJob& job) {
  const Box& box = job.box;
  if (!box_fits(cache, box)) {
    return {Code::kInvalidArgument,
            "box of group " + std::to_string(box.group) + ", planes " + std::to_string(box.plane_begin) +
                " to " + std::to_string(box.plane_end) + ", heads " + std::to_string(box.head_begin) +
                " to " + std::to_string(box.head_end) + ", positions " + std::to_string(box.pos_begin) +
                " to " + std::to_string(box.pos_end) + " does not lie within the cache"};
  }
  if (job.block_ids.size() != box.num_positions()) {
    return {Code::kInvalidArgument, "box has " + std::to_string(box.num_positions()) + " positions, but " +
                                        std::to_string(job.block_ids.size()) + " block ids came with it"};
  }
  const std::int64_t num_blocks = cache.groups[box.group].num_blocks();
  for (const std::int32_t id : job.block_ids) {
    if (id < 0 || id >= num_blocks) {
      return {Code::kInvalidArgument,
              "block id " + std::to_string(id) + " is not within 0 to " + std::to_string(num_blocks - 1)};
    }
  }
  if (job.dense == nullptr) return {Code::kInvalidArgument, "the job's dense memory is a null pointer"};
  return {};
}

}  // namespace kvpush
