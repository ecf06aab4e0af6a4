// The copy kernels' arithmetic, played thread by thread, with launches that the packer would never choose:
// every byte once, no other byte, the checksum's definition.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "cuda/play_copy.hpp"
#include "pack/checksum.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "pack/cpu/row_walk.hpp"
#include "pack/cuda/copy_walk.hpp"
#include "planes.hpp"

using namespace kvpush;

namespace {

constexpr std::byte kGuard{0xA5};
constexpr std::size_t kGuardBytes = 64;

struct Launch {
  unsigned num_blocks, threads;
};
constexpr Launch kLaunches[] = {{1, 32}, {1, 256}, {2, 64}, {3, 96}, {7, 256}, {64, 32}, {64, 1024}};

/// A cache of one group in guarded memory, and the table that a launch is given.
struct Paged {
  Cache cache;
  std::vector<std::vector<std::byte>> storage;
  std::vector<PlaneEntry> table;
  std::uint64_t alignment_bits = 16;

  Paged(const std::vector<Plane>& planes, std::size_t shift, std::mt19937_64& random) {
    cache.groups = {{16, planes}};
    std::int64_t before = 0;
    for (Plane& plane : cache.groups[0].planes) {
      const auto size = static_cast<std::size_t>(extent_bytes(plane));
      std::vector<std::byte>& bytes = storage.emplace_back(size + 3 * kGuardBytes, kGuard);
      const std::size_t to_line =
          kGuardBytes - reinterpret_cast<std::uintptr_t>(bytes.data()) % kGuardBytes + kGuardBytes;
      plane.base = bytes.data() + to_line + shift;
      for (std::size_t i = 0; i < size; ++i) plane.base[i] = static_cast<std::byte>(random());
      const UnitLayout layout = layout_of(plane);
      table.push_back({plane.base, layout, before});
      before += layout.unit_bytes();
      alignment_bits |=
          shift | static_cast<std::uint64_t>(layout.content_bytes | layout.block_stride_bytes |
                                             layout.head_stride_bytes | layout.token_stride_bytes);
    }
  }
  [[nodiscard]] Box box(std::uint32_t plane_begin, std::uint32_t plane_end, std::size_t num_ids) const {
    const auto heads = static_cast<std::uint32_t>(cache.groups[0].planes[0].num_heads);
    return {0, plane_begin, plane_end, 0, heads, 5, 5 + static_cast<std::uint32_t>(num_ids)};
  }
};

/// Device scratch of a launch, which must be clear again after each.
struct Scratch {
  std::uint64_t partial_sum = 0;
  std::uint32_t num_arrived = 0;
  std::uint64_t checksum = 0;
};

CopyArgs args_for(const Paged& paged, const Box& box, const std::vector<std::int32_t>& ids, std::byte* dense,
                  unsigned chunk_bytes, Scratch& scratch) {
  CopyArgs args;
  args.planes = paged.table.data();
  args.block_ids = ids.data();
  args.dense = dense;
  args.partial_sum = &scratch.partial_sum;
  args.num_arrived = &scratch.num_arrived;
  args.checksum = &scratch.checksum;
  args.plane_begin = box.plane_begin;
  args.num_planes = box.num_planes();
  args.num_positions = box.num_positions();
  args.chunk_bytes = chunk_bytes;
  return args;
}

/// Where copy_share() stores, counted byte by byte. One test at a time.
struct Stores {
  std::byte* begin = nullptr;
  std::vector<std::uint8_t> counts;
};
Stores stores;

template <unsigned kSize>
struct CountedChunk {
  static constexpr unsigned kBytes = kSize;
  static constexpr unsigned kWords = kSize == 16 ? 2 : 1;

  void load(const std::byte* from) { std::memcpy(bytes, from, kSize); }
  void store(std::byte* to) const {
    const auto at = static_cast<std::size_t>(to - stores.begin);
    for (std::size_t i = at; i < at + kSize; ++i) ++stores.counts.at(i);
  }
  [[nodiscard]] std::uint64_t word(unsigned) const { return 0; }

  std::byte bytes[kSize];
};

template <unsigned kSize>
void count_stores(const CopyArgs& args, const Launch& launch) {
  const std::uint64_t num_warps = std::uint64_t{launch.num_blocks} * launch.threads / kWarpThreads;
  for (std::uint64_t warp = 0; warp < num_warps; ++warp) {
    for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
      copy_share<CountedChunk<kSize>, true>(args, {warp, num_warps, lane});
    }
  }
}

struct CountingMover {
  unsigned lane;

  void load(unsigned, const std::byte*, std::uint32_t) {}
  void wait(unsigned) {}
  [[nodiscard]] std::uint64_t word(unsigned, std::uint32_t) const { return 0; }
  void store(unsigned, std::byte* to, std::uint32_t num_bytes) const {
    const auto at = static_cast<std::size_t>(to - stores.begin);
    for (std::size_t i = at; lane == 0 && i < at + num_bytes; ++i) ++stores.counts.at(i);
  }
  void finish() {}
};

void count_bulk_stores(const CopyArgs& args, const Launch& launch) {
  const std::uint64_t num_warps = std::uint64_t{launch.num_blocks} * launch.threads / kWarpThreads;
  for (std::uint64_t warp = 0; warp < num_warps; ++warp) {
    CountingMover mover{0};
    copy_pieces<true>(args, {warp, num_warps, 0}, mover);
  }
}

void check_launch(const Paged& source, const Paged& target, const Box& box,
                  const std::vector<std::int32_t>& ids, const Launch& launch, unsigned chunk_bytes,
                  std::size_t dense_shift, bool bulk = false) {
  const std::size_t size = packed_bytes(source.cache, box);
  std::vector<std::byte> expected(size);
  const PackDone by_cpu = run_pack_job(source.cache, {1, PackJob::Kind::kPack, box, ids, expected.data()});
  if (!CHECK_EQ(by_cpu.status.message(), "")) return;
  CHECK_EQ(by_cpu.checksum, checksum_by_definition(expected));

  std::vector<std::byte> slot(size + 2 * kGuardBytes + dense_shift, kGuard);
  std::byte* const dense = slot.data() + kGuardBytes + dense_shift;
  Scratch scratch;
  const CopyArgs packing = args_for(source, box, ids, dense, chunk_bytes, scratch);
  play_copy(packing, true, bulk, launch.num_blocks, launch.threads);
  CHECK_EQ(scratch.checksum, by_cpu.checksum);
  CHECK_EQ(scratch.partial_sum, 0U);
  CHECK_EQ(scratch.num_arrived, 0U);
  CHECK(std::equal(expected.begin(), expected.end(), dense));
  const auto is_guard = [](std::byte byte) { return byte == kGuard; };
  CHECK(std::all_of(slot.data(), dense, is_guard));
  CHECK(std::all_of(dense + size, slot.data() + slot.size(), is_guard));

  stores = {dense, std::vector<std::uint8_t>(size)};
  if (bulk) {
    count_bulk_stores(packing, launch);
    chunk_bytes = 0;
  }
  switch (chunk_bytes) {
    case 0: break;
    case 16: count_stores<16>(packing, launch); break;
    case 8: count_stores<8>(packing, launch); break;
    case 4: count_stores<4>(packing, launch); break;
    case 2: count_stores<2>(packing, launch); break;
    default: count_stores<1>(packing, launch); break;
  }
  CHECK(
      std::all_of(stores.counts.begin(), stores.counts.end(), [](std::uint8_t count) { return count == 1; }));

  // What the target must hold, by the CPU, guards and all; then the same bytes by the played kernel.
  std::vector<std::vector<std::byte>> after;
  const std::vector<std::vector<std::byte>> before = target.storage;
  CHECK_EQ(
      run_pack_job(target.cache, {2, PackJob::Kind::kUnpack, box, ids, expected.data()}).status.message(),
      "");
  for (const auto& bytes : target.storage) after.push_back(bytes);
  auto& storage = const_cast<std::vector<std::vector<std::byte>>&>(target.storage);
  for (std::size_t i = 0; i < storage.size(); ++i)
    std::copy(before[i].begin(), before[i].end(), storage[i].begin());
  play_copy(args_for(target, box, ids, dense, chunk_bytes, scratch), false, bulk, launch.num_blocks,
            launch.threads);
  CHECK_EQ(scratch.checksum, by_cpu.checksum);
  CHECK_EQ(scratch.num_arrived, 0U);
  CHECK(target.storage == after);
}

std::vector<std::int32_t> some_ids(std::int64_t num_blocks, std::size_t count, std::mt19937_64& random) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(std::min(count, ids.size()));
  return ids;
}

}  // namespace

TEST(every_nesting_and_chunk_size_with_every_launch) {
  std::mt19937_64 random(1);
  for (const std::int64_t unit : {1, 2, 4, 8, 16}) {
    for (Nesting nesting : kNestings) {
      nesting = {nesting.order, unit * nesting.gap_b, unit * nesting.gap_h, unit * nesting.gap_n};
      const std::vector<Plane> planes{make_plane({9, 2, 3, unit * 5}, nesting),
                                      make_plane({9, 2, 3, unit * 3}, nesting)};
      const auto shift = static_cast<std::size_t>(unit % 16);
      const Paged source(planes, shift, random);
      const Paged target(planes, shift, random);
      const auto ids = some_ids(9, 1 + random() % 9, random);
      const auto chunk = static_cast<unsigned>(source.alignment_bits & (~source.alignment_bits + 1));
      for (const Launch& launch : kLaunches) {
        check_launch(source, target, source.box(0, 2, ids.size()), ids, launch, chunk, shift);
      }
      // Smaller chunks than could be are right too.
      check_launch(source, target, source.box(0, 2, ids.size()), ids, {2, 64}, 1, 0);
    }
  }
}

TEST(parts_of_a_group_whose_planes_differ) {
  std::mt19937_64 random(2);
  const std::vector<Plane> planes{
      make_plane({6, 2, 4, 48}, kNestings[4]), make_plane({6, 2, 1, 4096}, kNestings[0]),
      make_plane({6, 2, 4, 16}, kNestings[0]), make_plane({6, 2, 16, 576}, kNestings[6])};
  const Paged source(planes, 0, random);
  const Paged target(planes, 0, random);
  for (std::uint32_t begin = 0; begin < 4; ++begin) {
    for (std::uint32_t end = begin + 1; end <= 4; ++end) {
      const auto ids = some_ids(6, 1 + random() % 6, random);
      for (const Launch& launch : kLaunches) {
        check_launch(source, target, source.box(begin, end, ids.size()), ids, launch, 16, 0);
      }
    }
  }
}

TEST(segments_of_the_checksum_end_anywhere_in_a_tile) {
  std::mt19937_64 random(3);
  for (const std::int64_t content : {272, 4112, 16384, 20496}) {
    const std::vector<Plane> planes{make_plane({5, 1, 1, content}, kNestings[0]),
                                    make_plane({5, 1, 2, content}, kNestings[0])};
    const Paged source(planes, 0, random);
    const Paged target(planes, 0, random);
    for (std::size_t count = 1; count <= 5; ++count) {
      const auto ids = some_ids(5, count, random);
      check_launch(source, target, source.box(0, 2, count), ids, {3, 64}, 16, 0);
      check_launch(source, target, source.box(1, 2, count), ids, {1, 32}, 8, 8);
    }
  }
}

TEST(bulk_copies_of_long_rows) {
  std::mt19937_64 random(4);
  const std::vector<Plane> planes{make_plane({6, 2, 3, 2048}, kNestings[4]),
                                  make_plane({6, 2, 1, 6160}, kNestings[0]),
                                  make_plane({6, 2, 4, 2064}, {"bnh", 0, 16, 32})};
  const Paged source(planes, 0, random);
  const Paged target(planes, 0, random);
  for (std::uint32_t begin = 0; begin < 3; ++begin) {
    for (std::uint32_t end = begin + 1; end <= 3; ++end) {
      const auto ids = some_ids(6, 1 + random() % 6, random);
      for (const Launch& launch : kLaunches) {
        check_launch(source, target, source.box(begin, end, ids.size()), ids, launch, 16, 0, true);
      }
    }
  }
}
