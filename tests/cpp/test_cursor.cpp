// The cursor against an oracle: every wanted unit exactly once, whatever the shape and the readiness.
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "protocol/cursor.hpp"

using namespace kvpush;
using namespace kvpush::protocol;

namespace {

Group make_group(const std::vector<std::int64_t>& content_bytes, std::int64_t num_heads = 2) {
  Group group;
  group.block_size = 16;
  for (const std::int64_t bytes : content_bytes) {
    group.planes.push_back({nullptr, 100, num_heads, 1, bytes, 0, 0, 0, "p", 0});
  }
  return group;
}

/// Draws boxes until all is out; `ready_step` positions more are ready whenever nothing can be drawn.
struct Walk {
  std::vector<Box> boxes;
  std::set<std::pair<std::uint32_t, std::uint32_t>> units;  ///< plane, position
  bool exact = true;
};

Walk walk(const Group& group, const std::vector<PositionRange>& wanted, std::size_t box_bytes,
          std::mt19937_64& random, std::uint32_t ready_step) {
  Cache cache;
  cache.groups = {group};
  Cursor cursor(cache.groups[0], 0, wanted, box_bytes);
  Walk result;
  std::uint32_t num_ready = 0;
  while (!cursor.exhausted()) {
    const std::uint32_t before = cursor.position();
    const auto needs = cursor.needs();
    result.exact &= needs.has_value() && *needs >= before;
    if (!cursor.ready(num_ready)) {
      result.exact &= num_ready <= *needs;
      num_ready += 1 + static_cast<std::uint32_t>(random() % ready_step);
      continue;
    }
    const Box box = cursor.next(num_ready);
    result.exact &= box_fits(cache, box) && packed_bytes(cache, box) <= box_bytes;
    result.exact &= box.pos_begin == before && box.pos_end <= num_ready;
    for (std::uint32_t plane = box.plane_begin; plane < box.plane_end; ++plane) {
      for (std::uint32_t pos = box.pos_begin; pos < box.pos_end; ++pos) {
        result.exact &= result.units.emplace(plane, pos).second;
      }
    }
    result.boxes.push_back(box);
  }
  result.exact &= !cursor.needs() && !cursor.ready(UINT32_MAX);
  result.exact &= cursor.position() == (wanted.empty() ? 0 : wanted.back().end);
  return result;
}

std::vector<PositionRange> random_ranges(std::mt19937_64& random) {
  std::vector<PositionRange> ranges;
  std::uint32_t at = 0;
  for (auto n = random() % 4; n > 0; --n) {
    const auto begin = at + static_cast<std::uint32_t>(random() % 5) + (ranges.empty() ? 0 : 1);
    const auto end = begin + 1 + static_cast<std::uint32_t>(random() % 40);
    ranges.push_back({begin, end});
    at = end;
  }
  return ranges;
}

}  // namespace

TEST(every_wanted_unit_exactly_once) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int64_t> planes(1 + random() % 9);
    std::size_t largest = 0;
    for (auto& bytes : planes) {
      bytes = 1 + static_cast<std::int64_t>(random() % 50);
      largest = std::max(largest, static_cast<std::size_t>(2 * bytes));
    }
    const std::size_t box_bytes = largest + random() % (largest * planes.size() * 12);
    const auto wanted = random_ranges(random);
    const Walk result =
        walk(make_group(planes), wanted, box_bytes, random, 1 + static_cast<std::uint32_t>(seed % 30));
    std::size_t num_wanted = 0;
    bool inside = true;
    for (const auto& range : wanted) {
      for (std::uint32_t pos = range.begin; pos < range.end; ++pos) {
        for (std::uint32_t p = 0; p < planes.size(); ++p, ++num_wanted)
          inside &= result.units.contains({p, pos});
      }
    }
    if (!CHECK(result.exact && inside) || !CHECK_EQ(result.units.size(), num_wanted)) {
      check::fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
}

TEST(boxes_are_well_filled) {
  // With all positions ready, no more boxes than twice what the bytes ask for, one stripe apart.
  std::mt19937_64 random(1);
  for (const std::size_t num_planes : {1U, 2U, 5U, 28U, 61U, 80U}) {
    for (const std::size_t units_per_box : {1U, 2U, 3U, 7U, 8U, 16U, 50U, 100U, 1000U}) {
      const std::vector<std::int64_t> planes(num_planes, 64);
      const std::uint32_t num_positions = 500;
      const Walk result = walk(make_group(planes, 1), {{0, num_positions}}, units_per_box * 64, random, 1000);
      const std::size_t units = num_planes * num_positions;
      const std::size_t ideal = (units + units_per_box - 1) / units_per_box;
      CHECK(result.boxes.size() <= 2 * ideal + num_planes);
    }
  }
}

TEST(more_ready_positions_never_split_a_stripe) {
  // A stripe keeps the length it began with, while more becomes ready.
  const Group group = make_group({64, 64, 64, 64}, 1);
  Cursor cursor(group, 3, {{2, 10}}, 2 * 64);
  CHECK(!cursor.ready(2));
  CHECK_EQ(*cursor.needs(), 2U);
  CHECK(cursor.ready(3));
  CHECK(cursor.next(3) == (Box{3, 0, 2, 0, 1, 2, 3}));
  CHECK_EQ(cursor.position(), 2U);
  CHECK(cursor.next(10) == (Box{3, 2, 4, 0, 1, 2, 3}));
  CHECK_EQ(cursor.position(), 3U);
}

TEST(nothing_wanted_is_exhausted) {
  const Group group = make_group({8});
  const Cursor cursor(group, 0, {}, 16);
  CHECK(cursor.exhausted());
  CHECK(!cursor.ready(100));
  CHECK_EQ(cursor.position(), 0U);
}
