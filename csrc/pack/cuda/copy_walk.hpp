// Which thread moves which bytes of a box, and what they add to its checksum. Shared by host and device: the
// kernels read their built-ins and call copy_share(); the tests call it for every thread in turn.
//
// The dense form, all planes of the box, is cut into batches, and each warp of each block gets the same
// number of neighbouring ones: its share. Within a share it is a plane after another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack/checksum_weight.hpp"
#include "pack/cuda/copy_args.hpp"
#include "pack/pack_unit.hpp"

namespace kvpush {

inline constexpr unsigned kWarpThreads = 32;
/// Chunks of one thread that are loaded before the first is stored.
inline constexpr unsigned kChunksInFlight = 8;
/// A batch is what a warp moves at once. Shares are whole ones: 4 KiB, for chunks of 16 bytes, are enough to
/// have all loads of a thread under way, and less would read the block ids, over PCIe, once more each.
inline constexpr unsigned kBatchChunks = kWarpThreads * kChunksInFlight;

/// How a box is shared out.
struct LaunchShape {
  unsigned num_blocks = 0;
  unsigned num_threads = 0;  ///< of a block
  std::uint32_t batches_per_warp = 0;

  bool operator==(const LaunchShape&) const = default;
};

/// For `num_chunks` (more than 0): every block before a second warp in one, every warp before a second batch
/// for one.
constexpr LaunchShape launch_shape(std::uint64_t num_chunks, unsigned max_blocks, unsigned max_threads) {
  const auto parts = [](std::uint64_t whole, std::uint64_t part) { return (whole + part - 1) / part; };
  const std::uint64_t num_batches = parts(num_chunks, kBatchChunks);
  const std::uint64_t num_blocks = num_batches < max_blocks ? num_batches : max_blocks;
  const std::uint64_t per_warp = parts(num_batches, num_blocks * (max_threads / kWarpThreads));
  const std::uint64_t num_warps = parts(num_batches, num_blocks * per_warp);
  return {static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_warps) * kWarpThreads,
          static_cast<std::uint32_t>(per_warp)};
}

// On 132 SMs: 1 MiB are 2 warps of each but the last few; 64 MiB are all warps; 4 KiB one.
static_assert(launch_shape(65536, 132, 512) == LaunchShape{132, 64, 1});
static_assert(launch_shape(64 * 65536, 132, 512) == LaunchShape{132, 512, 8});
static_assert(launch_shape(256, 132, 512) == LaunchShape{1, 32, 1});
static_assert(launch_shape(65536, 2, 512) == LaunchShape{2, 512, 8});

/// One thread of a launch. Warps are counted across the blocks first: what is left over burdens no block
/// twice.
struct Worker {
  std::uint64_t warp = 0;
  unsigned lane = 0;
};

KVPUSH_HD constexpr Worker worker_of(unsigned block, unsigned num_blocks, unsigned thread) {
  return {std::uint64_t{thread / kWarpThreads} * num_blocks + block, thread % kWarpThreads};
}

/// The share of one warp, in stretches that each lie within a plane. Counts chunks.
template <unsigned kChunkBytes>
class ShareWalk {
 public:
  KVPUSH_HD ShareWalk(const CopyArgs& args, std::uint64_t warp) : args_(args) {
    const std::uint64_t share = std::uint64_t{args.batches_per_warp} * kBatchChunks;
    const std::uint64_t total = plane_end(args.num_planes - 1);
    at_ = warp * share;
    end_ = at_ + share < total ? at_ + share : total;
    if (!valid()) return;
    // Planes of a group are mostly of one size, so the guess is mostly right.
    plane_ = static_cast<std::uint32_t>(at_ * args.num_planes / total);
    while (at_ < plane_begin(plane_)) --plane_;
    while (at_ >= plane_end(plane_)) ++plane_;
  }

  KVPUSH_HD bool valid() const { return at_ < end_; }
  KVPUSH_HD void next() {
    at_ = stop();
    ++plane_;
  }

  KVPUSH_HD const PlaneEntry& plane() const { return entry(plane_); }
  /// The stretch in the box's dense form, and where it begins in the plane's.
  KVPUSH_HD std::uint64_t begin() const { return at_; }
  KVPUSH_HD std::uint64_t stop() const { return end_ < plane_end(plane_) ? end_ : plane_end(plane_); }
  KVPUSH_HD std::uint64_t in_plane() const { return at_ - plane_begin(plane_); }

 private:
  KVPUSH_HD const PlaneEntry& entry(std::uint32_t plane) const {
    return args_.planes[args_.plane_begin + plane];
  }
  KVPUSH_HD std::uint64_t plane_begin(std::uint32_t plane) const {
    return chunks(entry(plane).unit_bytes_before);
  }
  KVPUSH_HD std::uint64_t plane_end(std::uint32_t plane) const {
    return chunks(entry(plane).unit_bytes_before + entry(plane).layout.unit_bytes());
  }
  KVPUSH_HD std::uint64_t chunks(std::int64_t unit_bytes_before) const {
    return static_cast<std::uint64_t>(unit_bytes_before - entry(0).unit_bytes_before) / kChunkBytes *
           args_.num_positions;
  }

  const CopyArgs& args_;
  std::uint64_t at_ = 0;
  std::uint64_t end_ = 0;
  std::uint32_t plane_ = 0;
};

/// Neighbouring words of the dense form, in one line; or one, of which a part is moved: that part, low.
template <unsigned kNum>
struct Words {
  std::uint64_t values[kNum];
};

/// What one thread's chunks add to the checksum. A thread stays in one lane for long, and in one segment: it
/// asks for their weights when they change, and multiplies by the lane's when it leaves it.
template <unsigned kWords>
class ShareSum {
 public:
  /// What is added from now on lies in its line as byte `dense_offset` does.
  KVPUSH_HD void enter_lane(std::uint64_t dense_offset) {
    shift_ = static_cast<std::uint32_t>(8 * (dense_offset % 8));
    const auto lane = static_cast<std::uint32_t>(dense_offset / 8 % kChecksumLanes);
    if (lane == lane_) return;
    fold();
    lane_ = lane;
  }
  KVPUSH_HD void add(std::uint64_t line, const Words<kWords>& words) {
    const auto segment = static_cast<std::uint32_t>(line / kChecksumSegmentLines);
    if (segment != segment_) {
      segment_ = segment;
      segment_weight_ = checksum_segment_weight(segment);
    }
    const auto lines = static_cast<std::uint32_t>(kChecksumSegmentLines - line % kChecksumSegmentLines);
    KVPUSH_UNROLL
    for (unsigned i = 0; i < kWords; ++i) {
      const std::uint64_t value = (words.values[i] << shift_) * segment_weight_;
      words_[i] += value;
      lines_[i] += lines * value;
    }
  }
  /// Of all that was added.
  KVPUSH_HD std::uint64_t sum() {
    fold();
    return sum_;
  }

 private:
  KVPUSH_HD void fold() {
    KVPUSH_UNROLL
    for (unsigned i = 0; i < kWords; ++i) {
      sum_ += checksum_word_weight(lane_ + i) * words_[i] + checksum_line_weight(lane_ + i) * lines_[i];
      words_[i] = 0;
      lines_[i] = 0;
    }
  }

  std::uint32_t lane_ = 0;
  std::uint32_t shift_ = 0;
  std::uint32_t segment_ = 0;  ///< 2^32 of them are 64 TiB
  std::uint64_t segment_weight_ = checksum_segment_weight(0);
  std::uint64_t words_[kWords] = {};
  std::uint64_t lines_[kWords] = {};
  std::uint64_t sum_ = 0;
};

/// Moves one thread's share of a box and returns what it adds to the checksum. `Chunk` is kBytes wide: it
/// loads and stores one, and words() are the kWords that it has.
template <typename Chunk, bool kPacking>
KVPUSH_HD std::uint64_t copy_share(const CopyArgs& args, const Worker& worker) {
  constexpr std::uint64_t kStepBytes = std::uint64_t{kWarpThreads} * Chunk::kBytes;
  ShareSum<Chunk::kWords> sum;
  for (ShareWalk<Chunk::kBytes> share(args, worker.warp); share.valid(); share.next()) {
    std::byte* const plane = share.plane().base;
    UnitCursor cursor(share.plane().layout, Chunk::kBytes, share.in_plane() + worker.lane, kWarpThreads);
    const std::uint64_t stop = share.stop();
    std::uint64_t at = share.begin() + worker.lane;
    sum.enter_lane(at * Chunk::kBytes);
    for (; at < stop; at += kBatchChunks) {
      // No branch lies between loads, so all are under way at once: first the ids', then the chunks'. Behind
      // the last chunk it is the first again, which goes nowhere.
      const std::uint64_t left = (stop - at + kWarpThreads - 1) / kWarpThreads;
      const unsigned count = left < kChunksInFlight ? static_cast<unsigned>(left) : kChunksInFlight;
      std::byte* const dense = args.dense + at * Chunk::kBytes;
      Chunk chunks[kChunksInFlight];
      std::byte* paged[kChunksInFlight];
      KVPUSH_UNROLL
      for (unsigned i = 0; i < kChunksInFlight; ++i) {
        const std::uint32_t position = cursor.unit() < args.num_positions ? cursor.unit() : 0;
        paged[i] = plane + cursor.paged(args.block_ids[position]);
        cursor.next();
      }
      KVPUSH_UNROLL
      for (unsigned i = 0; i < kChunksInFlight; ++i) {
        const std::byte* const from = kPacking ? paged[i] : dense + i * kStepBytes;
        const std::byte* const first = kPacking ? paged[0] : dense;
        chunks[i].load(i < count ? from : first);
      }
      KVPUSH_UNROLL
      for (unsigned i = 0; i < kChunksInFlight; ++i) {
        if (i >= count) break;
        chunks[i].store(kPacking ? dense + i * kStepBytes : paged[i]);
        const std::uint64_t offset = at * Chunk::kBytes + i * kStepBytes;
        if constexpr (kStepBytes % kChecksumLineBytes != 0) sum.enter_lane(offset);
        sum.add(offset / kChecksumLineBytes, chunks[i].words());
      }
    }
  }
  return sum.sum();
}

/// What a warp moves by one bulk copy: so much of one row at most.
inline constexpr std::uint32_t kPieceBytes = 2048;

/// The pieces of one warp's share.
class PieceWalk {
 public:
  KVPUSH_HD PieceWalk(const CopyArgs& args, std::uint64_t warp)
      : args_(args), share_(args, warp), row_(UnitLayout{1, 1, 1}, 1, 0, 1) {
    if (valid()) enter();
  }

  KVPUSH_HD bool valid() const { return share_.valid(); }
  KVPUSH_HD void next() {
    const std::uint32_t passed = num_bytes();
    dense_ += passed;
    in_row_ += passed;
    if (dense_ == stop_) {
      share_.next();
      if (valid()) enter();
    } else if (in_row_ == row_bytes_) {
      in_row_ = 0;
      row_.next();
    }
  }

  KVPUSH_HD std::byte* paged() const {
    return share_.plane().base + row_.paged(args_.block_ids[row_.unit()]) + in_row_;
  }
  KVPUSH_HD std::uint64_t dense() const { return dense_; }
  KVPUSH_HD std::uint32_t num_bytes() const {
    std::uint64_t most = kPieceBytes;
    if (most > row_bytes_ - in_row_) most = row_bytes_ - in_row_;
    if (most > stop_ - dense_) most = stop_ - dense_;
    return static_cast<std::uint32_t>(most);
  }

 private:
  static constexpr unsigned kChunkBytes = 16;

  KVPUSH_HD void enter() {
    const UnitLayout& layout = share_.plane().layout;
    const std::uint64_t in_plane = share_.in_plane() * kChunkBytes;
    row_bytes_ = static_cast<std::uint64_t>(layout.content_bytes);
    const std::uint64_t row = in_plane / row_bytes_;
    in_row_ = in_plane - row * row_bytes_;
    row_ = UnitCursor(layout, layout.content_bytes, row, 1);
    dense_ = share_.begin() * kChunkBytes;
    stop_ = share_.stop() * kChunkBytes;
  }

  const CopyArgs& args_;
  ShareWalk<kChunkBytes> share_;
  UnitCursor row_;
  std::uint64_t row_bytes_ = 0;
  std::uint64_t in_row_ = 0;  ///< bytes of the row before the piece
  std::uint64_t dense_ = 0;
  std::uint64_t stop_ = 0;
};

/// The same by bulk copies, of rows that are multiples of 16 bytes. `Mover` has two stages of kPieceBytes per
/// warp: load() begins to fill one once its last store has read it, wait() ends that (`parity` is that of how
/// often the stage was filled before), store() begins to empty it, finish() ends all stores. The warp calls
/// them together.
template <bool kPacking, typename Mover>
KVPUSH_HD std::uint64_t copy_pieces(const CopyArgs& args, const Worker& worker, Mover& mover) {
  ShareSum<2> sum;
  PieceWalk loading(args, worker.warp);
  PieceWalk walk(args, worker.warp);
  const auto load_next = [&](unsigned stage) {
    if (!loading.valid()) return;
    mover.load(stage, kPacking ? loading.paged() : args.dense + loading.dense(), loading.num_bytes());
    loading.next();
  };
  load_next(0);
  for (unsigned piece = 0; walk.valid(); ++piece, walk.next()) {
    const unsigned stage = piece % 2;
    load_next(stage ^ 1U);
    mover.wait(stage, piece / 2 % 2);
    sum.enter_lane(walk.dense() + 16 * worker.lane);
    for (std::uint32_t at = 16 * worker.lane; at < walk.num_bytes(); at += 16 * kWarpThreads) {
      sum.add((walk.dense() + at) / kChecksumLineBytes, mover.words(stage, at));
    }
    mover.store(stage, kPacking ? args.dense + walk.dense() : walk.paged(), walk.num_bytes());
  }
  mover.finish();
  return sum.sum();
}

}  // namespace kvpush
