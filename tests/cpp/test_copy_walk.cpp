// The copy kernels' arithmetic, played thread by thread, with launches that the packer would never choose:
// every byte once, no other byte, the checksum's definition.
#include <sys/mman.h>

#include <algorithm>
#include <array>
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

/// Block ids that end where a page does; what follows cannot be read.
class GuardedIds {
 public:
  explicit GuardedIds(const std::vector<std::int32_t>& ids)
      : pages_(::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::byte* const end = static_cast<std::byte*>(pages_) + kPage;
    CHECK(::mprotect(end, kPage, PROT_NONE) == 0);
    data_ = std::copy_backward(ids.begin(), ids.end(), reinterpret_cast<std::int32_t*>(end));
  }
  GuardedIds(const GuardedIds&) = delete;
  GuardedIds& operator=(const GuardedIds&) = delete;
  ~GuardedIds() { ::munmap(pages_, 2 * kPage); }

  [[nodiscard]] const std::int32_t* data() const { return data_; }

 private:
  static constexpr std::size_t kPage = 4096;
  void* pages_;
  const std::int32_t* data_ = nullptr;
};

CopyArgs args_for(const Paged& paged, const Box& box, const GuardedIds& ids, std::byte* dense,
                  unsigned chunk_bytes, const Launch& launch, Scratch& scratch) {
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
  args.batches_per_warp =
      launch_shape(packed_bytes(paged.cache, box) / chunk_bytes, launch.num_blocks, launch.threads)
          .batches_per_warp;
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
  [[nodiscard]] Words<kWords> words() const { return {}; }

  std::byte bytes[kSize];
};

template <unsigned kSize>
void count_stores(const CopyArgs& args, const Launch& launch) {
  for (unsigned block = 0; block < launch.num_blocks; ++block) {
    for (unsigned thread = 0; thread < launch.threads; ++thread) {
      copy_share<CountedChunk<kSize>, true>(args, worker_of(block, launch.num_blocks, thread));
    }
  }
}

/// Counts likewise, and minds the order that the hardware needs: a stage is read when it is filled, and
/// filled anew when its store has begun.
struct CountingMover {
  enum class Stage : std::uint8_t { kEmpty, kFilling, kFilled };

  std::array<Stage, 2> stages{};
  std::array<unsigned, 2> fills{};
  bool stored = false;

  ~CountingMover() { CHECK(!stored); }
  void load(unsigned stage, const std::byte*, std::uint32_t) {
    CHECK(stages.at(stage) == Stage::kEmpty);
    stages.at(stage) = Stage::kFilling;
  }
  void wait(unsigned stage, unsigned parity) {
    CHECK(stages.at(stage) == Stage::kFilling);
    CHECK_EQ(parity, fills.at(stage)++ % 2);
    stages.at(stage) = Stage::kFilled;
  }
  [[nodiscard]] Words<2> words(unsigned stage, std::uint32_t) const {
    CHECK(stages.at(stage) == Stage::kFilled);
    return {};
  }
  void store(unsigned stage, std::byte* to, std::uint32_t bytes) {
    CHECK(stages.at(stage) == Stage::kFilled);
    stages.at(stage) = Stage::kEmpty;
    stored = true;
    const auto at = static_cast<std::size_t>(to - stores.begin);
    for (std::size_t i = at; i < at + bytes; ++i) ++stores.counts.at(i);
  }
  void finish() { stored = false; }
};

void count_bulk_stores(const CopyArgs& args, const Launch& launch) {
  for (unsigned block = 0; block < launch.num_blocks; ++block) {
    for (unsigned thread = 0; thread < launch.threads; thread += kWarpThreads) {
      CountingMover mover;
      copy_pieces<true>(args, worker_of(block, launch.num_blocks, thread), mover);
    }
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
  const GuardedIds guarded(ids);
  const CopyArgs packing = args_for(source, box, guarded, dense, chunk_bytes, launch, scratch);
  play_copy(packing, true, bulk, launch.num_blocks, launch.threads);
  CHECK_EQ(scratch.checksum, by_cpu.checksum);
  CHECK_EQ(scratch.partial_sum, 0U);
  CHECK_EQ(scratch.num_arrived, 0U);
  CHECK(std::equal(expected.begin(), expected.end(), dense));
  const auto is_guard = [](std::byte byte) { return byte == kGuard; };
  CHECK(std::all_of(slot.data(), dense, is_guard));
  CHECK(std::all_of(dense + size, slot.data() + slot.size(), is_guard));

  stores = {dense, std::vector<std::uint8_t>(size)};
  if (bulk) count_bulk_stores(packing, launch);
  switch (bulk ? 0 : chunk_bytes) {
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
  play_copy(args_for(target, box, guarded, dense, chunk_bytes, launch, scratch), false, bulk,
            launch.num_blocks, launch.threads);
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

TEST(segments_of_the_checksum_end_anywhere_in_a_batch) {
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

TEST(every_batch_has_a_warp_and_no_block_is_idle) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 20'000; ++round) {
    const std::uint64_t num_chunks = 1 + (random() >> (32 + random() % 32));
    const auto max_blocks = static_cast<unsigned>(1 + random() % 200);
    const auto max_threads = static_cast<unsigned>(kWarpThreads * (1 + random() % 32));
    const LaunchShape shape = launch_shape(num_chunks, max_blocks, max_threads);
    const std::uint64_t num_warps = shape.num_threads / kWarpThreads;
    const std::uint64_t batches = (num_chunks + kBatchChunks - 1) / kBatchChunks;
    CHECK(shape.num_blocks >= 1 && shape.num_blocks <= max_blocks);
    CHECK(num_warps >= 1 && shape.num_threads <= max_threads && shape.num_threads % kWarpThreads == 0);
    CHECK(shape.num_blocks * num_warps * shape.batches_per_warp >= batches);
    // One warp, or one batch, less of each would not do.
    CHECK(shape.num_blocks * (num_warps - 1) * shape.batches_per_warp < batches);
    CHECK(shape.num_blocks == std::min<std::uint64_t>(max_blocks, batches));
  }
}

namespace {

/// Where a thread stores, and chunks of ones: no memory is touched.
struct AddressChunk {
  static constexpr unsigned kBytes = 16;
  static constexpr unsigned kWords = 2;
  static inline std::vector<std::array<const std::byte*, 2>> moves;

  void load(const std::byte* address) { from = address; }
  void store(const std::byte* to) const { moves.push_back({from, to}); }
  [[nodiscard]] Words<2> words() const { return {{1, 1}}; }

  const std::byte* from;
};

}  // namespace

TEST(boxes_and_caches_beyond_four_gigabytes) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30U;
  constexpr std::uint32_t kNumPositions = 3 << 20U;
  constexpr std::int64_t kRow = 2048;
  void* const reserved =
      ::mmap(nullptr, 24 * kGiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw check::Skipped{"24 GiB of address space cannot be reserved"};
  auto* const base = static_cast<std::byte*>(reserved);
  std::byte* const dense = base + 16 * kGiB;
  const PlaneEntry plane{base, collapse({1, 1, kRow, 2 * kRow, kRow, kRow}), 0};
  std::vector<std::int32_t> ids(kNumPositions);
  std::iota(ids.rbegin(), ids.rend(), 0);
  const LaunchShape shape = launch_shape(kNumPositions * (kRow / 16), 132, 512);
  CopyArgs args;
  args.planes = &plane;
  args.block_ids = ids.data();
  args.dense = dense;
  args.num_planes = 1;
  args.num_positions = kNumPositions;
  args.chunk_bytes = 16;
  args.batches_per_warp = shape.batches_per_warp;
  const std::uint64_t share = std::uint64_t{shape.batches_per_warp} * kBatchChunks;
  for (const std::uint64_t warp :
       {std::uint64_t{0}, 5 * kGiB / 16 / share, kNumPositions * (kRow / 16) / share - 1}) {
    AddressChunk::moves.clear();
    const std::uint64_t sum = copy_share<AddressChunk, true>(args, {warp, 7});
    CHECK_EQ(AddressChunk::moves.size(), share / kWarpThreads);
    std::uint64_t expected = 0;
    std::uint64_t chunk = warp * share + 7;
    for (const auto& [from, to] : AddressChunk::moves) {
      const std::uint64_t position = chunk * 16 / kRow;
      CHECK(to == dense + chunk * 16);
      CHECK(from == base + (kNumPositions - 1 - position) * 2 * kRow + chunk * 16 % kRow);
      expected += checksum_weight(2 * chunk) + checksum_weight(2 * chunk + 1);
      chunk += kWarpThreads;
    }
    CHECK_EQ(sum, expected);
  }
  ::munmap(reserved, 24 * kGiB);
}
