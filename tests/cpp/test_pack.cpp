// Packing against a nested-loop oracle, and the address arithmetic played with every number of workers.
#include <poll.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "check.hpp"
#include "pack/checksum.hpp"
#include "pack/cpu/copy_lines.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "pack/cpu/row_walk.hpp"
#include "pack/pack_unit.hpp"
#include "planes.hpp"

using namespace kvpush;

namespace {

constexpr std::size_t kGuardBytes = 32;
constexpr std::byte kGuard{0xA5};

void fill_random(std::vector<std::byte>& bytes, std::mt19937_64& random) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

std::size_t address_of(const std::byte* byte) {
  return reinterpret_cast<std::uintptr_t>(byte);
}

/// A cache of one group, guard bytes around each plane. Each lies `shift` bytes behind the start of a line of
/// memory, or at any address.
struct World {
  Cache cache;
  std::vector<std::vector<std::byte>> storage;

  World(const std::vector<Plane>& planes, std::mt19937_64& random, std::optional<std::size_t> at = {}) {
    cache.groups = {{16, planes}};
    for (Plane& plane : cache.groups[0].planes) {
      const std::size_t most = kGuardBytes + 2 * kChecksumLineBytes;
      std::vector<std::byte>& bytes =
          storage.emplace_back(static_cast<std::size_t>(extent_bytes(plane)) + most + kGuardBytes);
      const std::size_t to_line =
          kChecksumLineBytes - address_of(bytes.data() + kGuardBytes) % kChecksumLineBytes;
      const std::size_t shift =
          kGuardBytes + (at ? to_line + *at % kChecksumLineBytes : random() % kChecksumLineBytes);
      fill_random(bytes, random);
      plane.base = bytes.data() + shift;
    }
  }
};

/// The definition: every byte of the box by its own five-fold index.
template <typename Visit>
void for_each_byte(const Cache& cache, const Box& box, const std::vector<std::int32_t>& ids, Visit visit) {
  std::size_t dense = 0;
  for (std::uint32_t p = box.plane_begin; p < box.plane_end; ++p) {
    const Plane& plane = cache.groups[box.group].planes[p];
    for (const std::int32_t id : ids) {
      for (std::int64_t h = 0; h < plane.num_heads; ++h) {
        for (std::int64_t n = 0; n < plane.num_tokens; ++n) {
          for (std::int64_t c = 0; c < plane.content_bytes; ++c) {
            visit(plane.base + id * plane.block_stride_bytes + h * plane.head_stride_bytes +
                      n * plane.token_stride_bytes + c,
                  dense++);
          }
        }
      }
    }
  }
}

PackJob job_of(PackJob::Kind kind, const Box& box, const std::vector<std::int32_t>& ids, std::byte* dense) {
  return {7, kind, box, ids, dense};
}

/// Where memory begins, in bytes behind the start of a line; none: anywhere.
struct Shifts {
  std::optional<std::size_t> source;
  std::size_t dense = 0;
  std::optional<std::size_t> target;
};

/// Packs, compares with the oracle, unpacks into a second cache, compares that with the oracle too.
void check_round_trip(const std::vector<Plane>& planes, const std::vector<std::int32_t>& ids,
                      std::uint64_t seed, const LineCopier& copier, Shifts shifts = {}) {
  std::mt19937_64 random(seed);
  const World source(planes, random, shifts.source);
  World target(planes, random, shifts.target);
  const Box box{0,
                0,
                static_cast<std::uint32_t>(planes.size()),
                0,
                static_cast<std::uint32_t>(planes[0].num_heads),
                3,
                3 + static_cast<std::uint32_t>(ids.size())};
  if (!CHECK_EQ(source.cache.validate().message(), "")) return;
  const std::size_t size = packed_bytes(source.cache, box);

  std::vector<std::byte> slot(size + 2 * kGuardBytes + 2 * kChecksumLineBytes, kGuard);
  const std::size_t to_line = kChecksumLineBytes - address_of(slot.data()) % kChecksumLineBytes;
  const std::size_t before = kGuardBytes + to_line + shifts.dense % kChecksumLineBytes;
  std::byte* dense = slot.data() + before;
  const auto source_before = source.storage;
  const PackDone packed = run_pack_job(source.cache, job_of(PackJob::Kind::kPack, box, ids, dense), copier);
  CHECK(packed.status.ok());
  CHECK_EQ(packed.ticket, 7);
  std::vector<std::byte> expected(slot.size(), kGuard);
  for_each_byte(source.cache, box, ids,
                [&](const std::byte* paged, std::size_t at) { expected[before + at] = *paged; });
  CHECK(slot == expected);
  CHECK(source.storage == source_before);
  CHECK_EQ(packed.checksum, checksum_by_definition({dense, size}));

  const auto target_before = target.storage;
  const PackDone unpacked =
      run_pack_job(target.cache, job_of(PackJob::Kind::kUnpack, box, ids, dense), copier);
  CHECK(unpacked.status.ok());
  CHECK_EQ(unpacked.checksum, packed.checksum);
  CHECK(slot == expected);
  // Undone by the oracle, nothing but the box may differ from before.
  auto target_after = target.storage;
  bool bytes_are_equal = true;
  for_each_byte(target.cache, box, ids, [&](const std::byte* paged, std::size_t at) {
    bytes_are_equal = bytes_are_equal && *paged == dense[at];
  });
  CHECK(bytes_are_equal);
  std::swap(target.storage, target_after);
  for (std::size_t p = 0; p < target.storage.size(); ++p) {
    const auto shift = target.cache.groups[0].planes[p].base - target_after[p].data();
    const std::byte* const start = target_after[p].data() + shift;
    std::vector<std::byte> restored = target_after[p];
    Box one = box;
    one.plane_begin = static_cast<std::uint32_t>(p);
    one.plane_end = one.plane_begin + 1;
    for_each_byte(target.cache, one, ids, [&](const std::byte* paged, std::size_t) {
      const auto at = static_cast<std::size_t>(shift + (paged - start));
      restored[at] = target_before[p][at];
    });
    CHECK(restored == target_before[p]);
  }
}

}  // namespace

TEST(every_small_shape_and_nesting) {
  for (const LineCopier& copier : line_copiers()) {
    std::uint64_t seed = 0;
    for (const Nesting& nesting : kNestings) {
      for (std::int64_t h = 1; h <= 3; ++h) {
        for (std::int64_t n = 1; n <= 3; ++n) {
          for (std::int64_t c = 1; c <= 5; ++c) {
            const Plane plane = make_plane({5, h, n, c}, nesting);
            for (const std::vector<std::int32_t>& ids :
                 {std::vector<std::int32_t>{2}, {0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {0, 1, 3, 4}, {3, 4, 0}}) {
              check_round_trip({plane}, ids, ++seed, copier);
            }
          }
        }
      }
    }
  }
}

TEST(random_planes_and_block_tables) {
  for (const LineCopier& copier : line_copiers()) {
    std::mt19937_64 random(99);
    const auto below = [&random](std::int64_t limit) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    for (std::uint64_t round = 0; round < 300; ++round) {
      const std::int64_t num_blocks = 1 + below(40);
      const std::int64_t num_heads = 1 + below(4);
      std::vector<Plane> planes;
      const std::int64_t num_planes = 1 + below(4);
      for (std::int64_t p = 0; p < num_planes; ++p) {
        Nesting nesting = kNestings[random() % kNestings.size()];
        if (below(2) == 0) nesting = {nesting.order, below(9), below(9), below(9)};
        const std::int64_t content = below(2) == 0 ? 1 + below(90) : 16 * (1 + below(20));
        planes.push_back(make_plane({num_blocks, num_heads, 1 + below(9), content}, nesting));
      }
      std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
      std::iota(ids.begin(), ids.end(), 0);
      if (below(3) > 0) std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(static_cast<std::size_t>(1 + below(num_blocks)));
      check_round_trip(planes, ids, round, copier);
    }
  }
}

TEST(every_alignment_of_blocks_and_slot) {
  const Plane rows = make_plane({4, 1, 1, 3 * 64}, {"bhn", 64, 0, 0});
  const Plane odd = make_plane({4, 1, 2, 2 * 64 + 16}, {"bhn", 0, 0, 16});
  for (const LineCopier& copier : line_copiers()) {
    for (std::size_t a = 0; a < kChecksumLineBytes; ++a) {
      for (std::size_t b = 0; b < kChecksumLineBytes; b += a % 8 == 0 ? 1 : 8) {
        check_round_trip({rows, odd}, {2, 0, 3}, a, copier, {a, b, a});
        check_round_trip({rows, odd}, {1, 2, 3}, a, copier, {b, a, a});
      }
    }
  }
}

TEST(runs_longer_than_a_segment_of_the_checksum) {
  constexpr auto kSegment = static_cast<std::int64_t>(kChecksumSegmentBytes);
  for (const LineCopier& copier : line_copiers()) {
    check_round_trip({make_plane({9, 2, 16, 257}, {"bhn", 0, 0, 0})}, {1, 2, 3, 4, 5, 6, 8}, 1, copier);
    check_round_trip({make_plane({3, 1, 1, 50'001}, {"bhn", 3, 0, 0})}, {2, 0}, 2, copier);
    check_round_trip({make_plane({3, 2, 3, 20'003}, {"bnh", 0, 0, 1})}, {2, 0}, 3, copier);
    check_round_trip({make_plane({5, 1, 1, 4096}, {"bhn", 64, 0, 0})}, {2, 0, 4, 1, 3}, 4, copier, {0, 0, 0});
    for (const std::int64_t extra : {-1, 0, 1, 64}) {
      check_round_trip({make_plane({3, 1, 1, kSegment + extra}, {"bhn", 3, 0, 0})}, {2, 0}, 5, copier);
    }
  }
}

TEST(rows_of_a_box_that_starts_behind_the_first_plane) {
  std::mt19937_64 random(5);
  World world({make_plane({4, 1, 1, 100}, kNestings[0]), make_plane({4, 1, 3, 30}, kNestings[3]),
               make_plane({4, 1, 1, 70}, kNestings[1])},
              random);
  const Box box{0, 1, 3, 0, 1, 5, 8};
  const std::vector<std::int32_t> ids{3, 0, 1};
  std::vector<const std::byte*> expected;
  for_each_byte(world.cache, box, ids,
                [&](const std::byte* paged, std::size_t) { expected.push_back(paged); });
  for (std::size_t start = 0; start <= expected.size(); ++start) {
    for (const std::size_t step : {1U, 7U, 30U, 1000U}) {
      RowWalk row(world.cache.groups[0], box, ids);
      row.skip(start);
      for (std::size_t at = start; at < expected.size(); at += step) {
        if (!CHECK(row.valid() && row.left() > 0)) return;
        CHECK(row.data() == expected[at]);
        CHECK(row.data() + row.left() - 1 == expected[at + row.left() - 1]);
        row.skip(step);
      }
      CHECK(!row.valid());
    }
  }
}

TEST(collapse_keeps_every_address) {
  for (const Nesting& nesting : kNestings) {
    const Plane p = make_plane({2, 3, 4, 6}, nesting);
    const UnitLayout plain{3, 4, 6, p.block_stride_bytes, p.head_stride_bytes, p.token_stride_bytes};
    const UnitLayout rows = collapse(plain);
    CHECK_EQ(rows.unit_bytes(), plain.unit_bytes());
    std::vector<std::int64_t> a;
    std::vector<std::int64_t> b;
    for (UnitCursor c(plain, 1, 0, 1); c.unit() == 0; c.next()) a.push_back(c.paged(1));
    for (UnitCursor c(rows, 1, 0, 1); c.unit() == 0; c.next()) b.push_back(c.paged(1));
    CHECK(a == b);
  }
  CHECK(collapse({3, 4, 6, 72, 24, 6}).is_dense());
  CHECK(!collapse({3, 4, 6, 72, 25, 6}).is_dense());
  CHECK(!collapse({3, 4, 6, 96, 6, 18}).is_dense());
}

// Any number of workers must together visit each chunk of some units once, at the address that the oracle
// names.
TEST(cursor_with_any_number_of_workers) {
  for (const Nesting& nesting : kNestings) {
    for (std::int64_t h = 1; h <= 4; ++h) {
      for (std::int64_t n = 1; n <= 4; ++n) {
        for (const std::int64_t chunk_bytes : {1, 2, 6, 12}) {
          const Plane p = make_plane({3, h, n, 12}, nesting);
          const UnitLayout layout{h, n, 12, p.block_stride_bytes, p.head_stride_bytes, p.token_stride_bytes};
          const auto unit_chunks = static_cast<std::uint64_t>(layout.unit_bytes() / chunk_bytes);
          const std::uint64_t num_chunks = 3 * unit_chunks;
          for (std::uint64_t workers = 1; workers <= unit_chunks + 3; ++workers) {
            std::vector<int> visits(num_chunks, 0);
            for (std::uint64_t first = 0; first < workers; ++first) {
              std::uint64_t index = first;
              for (UnitCursor c(layout, chunk_bytes, first, workers); c.unit() < 3;
                   c.next(), index += workers) {
                if (!CHECK(index < num_chunks)) return;
                const std::int64_t byte = static_cast<std::int64_t>(index) * chunk_bytes;
                const std::int64_t row = byte / 12;
                CHECK_EQ(c.unit(), static_cast<std::uint32_t>(row / (h * n)));
                CHECK_EQ(c.paged(2), 2 * p.block_stride_bytes + row / n % h * p.head_stride_bytes +
                                         row % n * p.token_stride_bytes + byte % 12);
                ++visits[index];
              }
            }
            CHECK(std::all_of(visits.begin(), visits.end(), [](int v) { return v == 1; }));
          }
        }
      }
    }
  }
}

TEST(offsets_beyond_four_gigabytes) {
  const UnitLayout layout{2, 2, 64, std::int64_t{1} << 21U, 1 << 20, 1 << 10};
  CHECK_EQ(paged_offset(layout, 100'000, 1, 1), (std::int64_t{100'000} << 21U) + (1 << 20) + (1 << 10));
  // Of 16 chunks a unit: chunks of the dense form beyond 2^32, too.
  UnitCursor cursor(layout, 16, (std::uint64_t{1} << 34U) + 5, std::uint64_t{1} << 33U);
  CHECK_EQ(cursor.unit(), 1U << 30U);
  CHECK_EQ(cursor.paged(100'000), (std::int64_t{100'000} << 21U) + (1 << 10) + 16);
  cursor.next();
  CHECK_EQ(cursor.unit(), (1U << 30U) + (1U << 29U));
}

TEST(jobs_outside_the_cache_end_with_an_error) {
  std::mt19937_64 random(1);
  World world({make_plane({4, 2, 2, 8}, kNestings[0])}, random);
  const auto before = world.storage;
  std::vector<std::byte> dense(4096, kGuard);
  const auto guard = dense;
  const Box box{0, 0, 1, 0, 2, 0, 2};
  const auto refused = [&](const Box& b, const std::vector<std::int32_t>& ids, std::byte* to) {
    for (const auto kind : {PackJob::Kind::kPack, PackJob::Kind::kUnpack}) {
      const PackDone done = run_pack_job(world.cache, job_of(kind, b, ids, to));
      CHECK_EQ(done.status.code(), Code::kInvalidArgument);
      CHECK_EQ(done.ticket, 7);
    }
  };
  refused(box, {0, 4}, dense.data());
  refused(box, {-1, 0}, dense.data());
  refused(box, {0}, dense.data());
  refused(box, {0, 1, 2}, dense.data());
  refused(box, {0, 1}, nullptr);
  refused({0, 0, 2, 0, 2, 0, 2}, {0, 1}, dense.data());
  refused({1, 0, 1, 0, 2, 0, 2}, {0, 1}, dense.data());
  refused({0, 0, 1, 0, 1, 0, 2}, {0, 1}, dense.data());
  CHECK(dense == guard);
  CHECK(world.storage == before);
}

TEST(inline_packer_does_one_job_per_poll) {
  std::mt19937_64 random(2);
  const World world({make_plane({4, 2, 2, 8}, kNestings[0])}, random);
  const std::unique_ptr<Packer> packer = make_cpu_packer(world.cache, 0);
  CHECK_EQ(packer->wait_fd(), -1);
  std::vector<std::byte> dense(64);
  std::vector<PackDone> done;
  packer->poll(done);
  CHECK(done.empty());
  const std::vector<std::int32_t> ids{3, 1};
  for (int i = 0; i < 2; ++i) {
    packer->start(job_of(PackJob::Kind::kPack, {0, 0, 1, 0, 2, 0, 2}, ids, dense.data()));
  }
  for (const std::size_t num_done : {1U, 2U, 2U}) {
    packer->poll(done);
    CHECK_EQ(done.size(), num_done);
  }
}

// Plane of which a box of four positions is too large to be done inside start().
Plane large_plane() {
  return make_plane({16, 2, 16, 1024}, kNestings[4]);
}

TEST(pool_ends_each_job_once_and_wakes_the_poller) {
  std::mt19937_64 random(3);
  const World world({large_plane()}, random);
  const Box box{0, 0, 1, 0, 2, 0, 4};
  const std::size_t size = packed_bytes(world.cache, box);
  CHECK(size > kInlinePackBytes);
  for (const unsigned num_threads : {1U, 3U}) {
    constexpr std::size_t kJobs = 200;
    std::vector<std::vector<std::byte>> slots(kJobs, std::vector<std::byte>(size));
    std::vector<std::array<std::int32_t, 4>> ids(kJobs);
    const std::unique_ptr<Packer> packer = make_cpu_packer(world.cache, num_threads);
    for (std::size_t i = 0; i < kJobs; ++i) {
      ids[i] = {1, 2, 9, static_cast<std::int32_t>(i % 17)};
      packer->start({i, PackJob::Kind::kPack, box, ids[i], slots[i].data()});
    }
    std::vector<PackDone> done;
    while (done.size() < kJobs) {
      pollfd waiter{packer->wait_fd(), POLLIN, 0};
      if (!CHECK_EQ(::poll(&waiter, 1, 10'000), 1)) return;
      const std::size_t before = done.size();
      packer->poll(done);
      CHECK(done.size() > before);
    }
    pollfd waiter{packer->wait_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&waiter, 1, 0), 0);
    std::sort(done.begin(), done.end(),
              [](const PackDone& a, const PackDone& b) { return a.ticket < b.ticket; });
    for (std::size_t i = 0; i < kJobs; ++i) {
      CHECK_EQ(done[i].ticket, i);
      CHECK_EQ(done[i].status.ok(), i % 17 != 16);
      if (done[i].status.ok() && i < 20) CHECK_EQ(done[i].checksum, checksum_by_definition(slots[i]));
    }
  }
}

// Small jobs do not pay for a hand-over, but many of them do not hold the caller up either.
TEST(pool_does_small_jobs_inside_start_up_to_a_limit_per_poll) {
  std::mt19937_64 random(6);
  const World world({large_plane()}, random);
  const Box box{0, 0, 1, 0, 2, 0, 1};
  const std::size_t size = packed_bytes(world.cache, box);
  const std::size_t num_inline = kInlinePackBytes / size;
  CHECK_EQ(num_inline, 2);
  const std::unique_ptr<Packer> packer = make_cpu_packer(world.cache, 1);
  const std::vector<std::int32_t> ids{7};
  std::vector<std::vector<std::byte>> slots(num_inline + 1, std::vector<std::byte>(size));
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      packer->start({i, PackJob::Kind::kPack, box, ids, slots[i].data()});
    }
    // The last went to a thread, and that one wakes the poller.
    pollfd waiter{packer->wait_fd(), POLLIN, 0};
    if (!CHECK_EQ(::poll(&waiter, 1, 10'000), 1)) return;
    std::vector<PackDone> done;
    packer->poll(done);
    if (!CHECK_EQ(done.size(), slots.size())) return;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      CHECK_EQ(done[i].ticket, i);
      CHECK_EQ(done[i].checksum, checksum_by_definition(slots[i]));
    }
    // Alone it is done at once, and nobody is woken.
    packer->start({9, PackJob::Kind::kPack, box, ids, slots[0].data()});
    CHECK_EQ(::poll(&waiter, 1, 0), 0);
    done.clear();
    packer->poll(done);
    CHECK_EQ(done.size(), 1);
  }
}

TEST(pool_can_be_destroyed_with_jobs_waiting) {
  std::mt19937_64 random(4);
  const World world({large_plane()}, random);
  std::vector<std::byte> dense(packed_bytes(world.cache, {0, 0, 1, 0, 2, 0, 16}));
  std::vector<std::int32_t> ids(16);
  std::iota(ids.begin(), ids.end(), 0);
  for (int round = 0; round < 50; ++round) {
    const std::unique_ptr<Packer> packer = make_cpu_packer(world.cache, 1);
    for (int i = 0; i < 20; ++i) {
      packer->start(job_of(PackJob::Kind::kPack, {0, 0, 1, 0, 2, 0, 16}, ids, dense.data()));
    }
  }
}
