// Shapes and bounds: what validate() refuses, what two engines compare, what a box may be.
#include <cstdint>
#include <functional>
#include <string>

#include "cache/box.hpp"
#include "cache/cache.hpp"
#include "check.hpp"

using namespace kvpush;

namespace {

std::byte memory[1];

/// Dense [B, H, N, C] at an address that nothing reads.
Plane dense_plane(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
  return {memory, b, h, n, c, h * n * c, n * c, c, "layer", 0};
}

Cache good_cache() {
  Cache cache;
  cache.groups = {{16, {dense_plane(4, 2, 16, 64), dense_plane(4, 2, 16, 32)}},
                  {32, {dense_plane(9, 1, 1, 8)}}};
  cache.fingerprint = {{"model", "m"}, {"dtype", "float32"}};
  return cache;
}

void expect_refused(const std::function<void(Cache&)>& damage, const std::string& part) {
  Cache cache = good_cache();
  damage(cache);
  const Status status = cache.validate();
  CHECK_EQ(status.code(), Code::kInvalidArgument);
  if (!CHECK(status.message().find(part) != std::string::npos)) CHECK_EQ(status.message(), part);
}

}  // namespace

TEST(good_cache_is_valid) {
  const Cache cache = good_cache();
  CHECK_EQ(cache.validate().message(), "");
  CHECK_EQ(cache.max_unit_bytes(), 2 * 16 * 64);
  CHECK_EQ(cache.groups[1].num_blocks(), 9);
}

TEST(counts_are_checked) {
  expect_refused([](Cache& c) { c.groups.clear(); }, "1 to 64 groups, not 0");
  expect_refused([](Cache& c) { c.groups.assign(kMaxGroups + 1, c.groups[0]); }, "not 65");
  expect_refused([](Cache& c) { c.groups[1].planes.clear(); }, "group 1: it has no planes");
  expect_refused([](Cache& c) { c.groups[0].planes.assign(kMaxPlanes, c.groups[0].planes[0]); },
                 "at most 4096 planes");
  expect_refused([](Cache& c) { c.groups[0].block_size = 0; }, "group 0: block_size is 0");
  expect_refused([](Cache& c) { c.groups[0].planes[1].num_blocks = 5; },
                 "num_blocks is 5, plane 0 of its group has 4");
}

TEST(plane_fields_are_checked) {
  expect_refused([](Cache& c) { c.groups[0].planes[1].num_heads = 1; },
                 "num_heads is 1, plane 0 of its group has 2");
  expect_refused([](Cache& c) { c.groups[0].planes[1].num_heads = 0; },
                 "group 0, plane 1 (layer): num_heads is 0");
  expect_refused([](Cache& c) { c.groups[0].planes[0].num_tokens = -1; }, "num_tokens is -1");
  expect_refused([](Cache& c) { c.groups[0].planes[0].content_bytes = 0; }, "content_bytes is 0");
  expect_refused([](Cache& c) { c.groups[0].planes[0].base = nullptr; }, "null");
  expect_refused([](Cache& c) { c.groups[0].planes[0].head_begin = -3; }, "head_begin is -3");
  expect_refused([](Cache& c) { c.groups[1].planes[0].num_blocks = std::int64_t{1} << 31; }, "32-bit");
}

TEST(overlapping_strides_are_refused) {
  expect_refused([](Cache& c) { c.groups[0].planes[0].token_stride_bytes = 63; }, "token_stride_bytes is 63");
  expect_refused([](Cache& c) { c.groups[0].planes[0].head_stride_bytes = 0; }, "head_stride_bytes is 0");
  expect_refused([](Cache& c) { c.groups[0].planes[0].block_stride_bytes = 2047; },
                 "block_stride_bytes is 2047");
  expect_refused([](Cache& c) { c.groups[0].planes[0].block_stride_bytes = -2048; },
                 "block_stride_bytes is -2048");
}

TEST(huge_strides_do_not_wrap) {
  expect_refused([](Cache& c) { c.groups[0].planes[0].block_stride_bytes = INT64_MAX / 2; }, "exceed 2^63");
  expect_refused([](Cache& c) { c.groups[0].planes[0].content_bytes = INT64_MAX; }, "elements overlap");
}

TEST(any_axis_order_is_valid) {
  Cache cache = good_cache();
  Plane& plane = cache.groups[1].planes[0];
  plane = {memory, 9, 2, 4, 8, 64, 9 * 64, 8, "heads outermost", 0};
  plane.num_tokens = 4;
  CHECK_EQ(cache.validate().message(), "");
  plane = {memory, 9, 2, 4, 8, 16, 8, 9 * 16, "tokens outermost", 0};
  CHECK_EQ(cache.validate().message(), "");
}

TEST(stride_of_an_axis_of_one_does_not_matter) {
  Cache cache = good_cache();
  Plane& plane = cache.groups[1].planes[0];
  plane.head_stride_bytes = 0;
  plane.token_stride_bytes = -1;
  CHECK_EQ(cache.validate().message(), "");
}

TEST(identity_ignores_where_blocks_lie) {
  const Cache ours = good_cache();
  Cache theirs = good_cache();
  for (Group& group : theirs.groups) {
    for (Plane& plane : group.planes) {
      plane.num_blocks *= 3;
      plane.block_stride_bytes *= 2;
      plane.base = nullptr;
    }
  }
  CHECK_EQ(first_difference(theirs.identity(), ours.identity()), "");
}

TEST(every_field_of_the_identity_counts) {
  const auto differs = [](const std::function<void(Cache&)>& change) {
    Cache theirs = good_cache();
    change(theirs);
    return first_difference(theirs.identity(), good_cache().identity());
  };
  CHECK_EQ(differs([](Cache& c) { c.fingerprint["dtype"] = "bfloat16"; }),
           "fingerprint.dtype: theirs bfloat16, ours float32");
  CHECK_EQ(differs([](Cache& c) { c.fingerprint.erase("model"); }),
           "fingerprint.model: theirs (absent), ours m");
  CHECK_EQ(differs([](Cache& c) { c.fingerprint["zone"] = "z"; }),
           "fingerprint.zone: theirs z, ours (absent)");
  CHECK_EQ(differs([](Cache& c) { c.groups.pop_back(); }), "group.count: theirs 1, ours 2");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes.pop_back(); }), "group[0].num_planes: theirs 1, ours 2");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].block_size = 8; }), "group[0].block_size: theirs 8, ours 16");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes[1].name = "x"; }),
           "group[0].plane[1].name: theirs x, ours layer");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes[1].head_begin = 2; }),
           "group[0].plane[1].heads: theirs 2 to 4, ours 0 to 2");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes[1].num_heads = 1; }),
           "group[0].plane[1].heads: theirs 0 to 1, ours 0 to 2");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes[1].num_tokens = 4; }),
           "group[0].plane[1].num_tokens: theirs 4, ours 16");
  CHECK_EQ(differs([](Cache& c) { c.groups[0].planes[1].content_bytes = 4; }),
           "group[0].plane[1].content_bytes: theirs 4, ours 32");
}

TEST(a_difference_is_one_short_printable_line) {
  const std::string text = first_difference({{"a\nb", std::string(5000, '\x1b')}}, {});
  CHECK(text.size() < 300);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(text.find('\x1b') == std::string::npos);
}

TEST(box_sizes_and_bounds) {
  const Cache cache = good_cache();
  const Box all{0, 0, 2, 0, 2, 5, 8};
  CHECK(box_fits(cache, all));
  CHECK_EQ(all.num_units(), 6);
  CHECK_EQ(packed_bytes(cache, all), 3 * (2 * 16 * 64 + 2 * 16 * 32));
  CHECK_EQ(packed_bytes(cache, Box{0, 1, 2, 0, 2, 0, 1}), 2 * 16 * 32);
  CHECK(!box_fits(cache, Box{2, 0, 1, 0, 1, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 0, 3, 0, 2, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 1, 1, 0, 2, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 2, 1, 0, 2, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 0, 2, 0, 1, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 0, 2, 1, 2, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 0, 2, 0, 3, 0, 1}));
  CHECK(!box_fits(cache, Box{0, 0, 2, 0, 2, 4, 4}));
  CHECK(!box_fits(cache, Box{0, 0, 2, 0, 2, 5, 4}));
}
