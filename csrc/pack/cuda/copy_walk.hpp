// Which thread moves which bytes of a box, and what they add to its checksum. Shared by host and device: the
// kernels read their built-ins and call copy_share(); the tests call it for every thread in turn.
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
/// A tile is what a warp moves at once: so many neighbouring chunks of one plane's dense form.
inline constexpr unsigned kTileChunks = kWarpThreads * kChunksInFlight;

/// One thread of a launch.
struct Worker {
  std::uint64_t warp = 0;
  std::uint64_t num_warps = 1;
  unsigned lane = 0;
};

/// The tiles of a box that fall to one warp: warp, warp + num_warps, and so on, plane after plane.
template <unsigned kChunkBytes>
class TileWalk {
 public:
  KVPUSH_HD TileWalk(const CopyArgs& args, std::uint64_t warp, std::uint64_t num_warps)
      : args_(args), step_(num_warps), tile_(warp) {
    find_plane();
  }

  KVPUSH_HD bool valid() const { return plane_ < args_.num_planes; }
  KVPUSH_HD void next() {
    tile_ += step_;
    find_plane();
  }

  KVPUSH_HD const PlaneEntry& plane() const { return args_.planes[args_.plane_begin + plane_]; }
  /// Chunks of the plane's dense form, and the first of the tile.
  KVPUSH_HD std::uint64_t num_chunks() const {
    return static_cast<std::uint64_t>(plane().layout.unit_bytes()) / kChunkBytes * args_.num_positions;
  }
  KVPUSH_HD std::uint64_t first_chunk() const { return tile_ * kTileChunks; }
  /// Where the plane begins in the box's dense form.
  KVPUSH_HD std::int64_t dense_begin() const {
    return (plane().unit_bytes_before - args_.planes[args_.plane_begin].unit_bytes_before) *
           args_.num_positions;
  }

 private:
  KVPUSH_HD void find_plane() {
    while (valid()) {
      const std::uint64_t num_tiles = (num_chunks() + kTileChunks - 1) / kTileChunks;
      if (tile_ < num_tiles) return;
      tile_ -= num_tiles;
      ++plane_;
    }
  }

  const CopyArgs& args_;
  std::uint64_t step_;
  std::uint64_t tile_;
  std::uint32_t plane_ = 0;
};

/// One thread's chunks of a tile: chunk `lane`, lane + 32, and so on. Divides only when made.
template <unsigned kChunkBytes>
class ChunkWalk {
 public:
  KVPUSH_HD ChunkWalk(const CopyArgs& args, const TileWalk<kChunkBytes>& tile, unsigned lane)
      : args_(args),
        layout_(tile.plane().layout),
        base_(tile.plane().base),
        dense_(tile.dense_begin()),
        chunk_(tile.first_chunk() + lane),
        num_chunks_(tile.num_chunks()),
        num_tokens_(static_cast<std::uint32_t>(layout_.num_tokens)),
        num_heads_(static_cast<std::uint32_t>(layout_.num_heads)),
        chunks_per_row_(static_cast<std::uint32_t>(layout_.content_bytes) / kChunkBytes),
        rows_per_step_(kWarpThreads / chunks_per_row_) {
    const std::uint64_t row = chunk_ / chunks_per_row_;
    in_row_ = static_cast<std::uint32_t>(chunk_ - row * chunks_per_row_);
    const std::uint64_t head = row / num_tokens_;
    token_ = static_cast<std::uint32_t>(row - head * num_tokens_);
    position_ = static_cast<std::uint32_t>(head / num_heads_);
    head_ = static_cast<std::uint32_t>(head - std::uint64_t{position_} * num_heads_);
  }

  KVPUSH_HD bool valid() const { return chunk_ < num_chunks_; }
  KVPUSH_HD void next() {
    chunk_ += kWarpThreads;
    in_row_ += kWarpThreads - rows_per_step_ * chunks_per_row_;
    token_ += rows_per_step_;
    if (in_row_ >= chunks_per_row_) {
      in_row_ -= chunks_per_row_;
      ++token_;
    }
    // At most as often as a warp has rows: once, for rows of 512 bytes and more.
    while (token_ >= num_tokens_) {
      token_ -= num_tokens_;
      ++head_;
    }
    while (head_ >= num_heads_) {
      head_ -= num_heads_;
      ++position_;
    }
  }

  /// The chunk in the paged cache.
  KVPUSH_HD std::byte* paged() const {
    return base_ + paged_offset(layout_, args_.block_ids[position_], head_, token_) +
           std::int64_t{in_row_} * kChunkBytes;
  }
  /// Its byte in the box's dense form.
  KVPUSH_HD std::int64_t dense() const { return dense_ + static_cast<std::int64_t>(chunk_) * kChunkBytes; }

 private:
  const CopyArgs& args_;
  UnitLayout layout_;
  std::byte* base_;
  std::int64_t dense_;
  std::uint64_t chunk_;
  std::uint64_t num_chunks_;
  std::uint32_t num_tokens_;
  std::uint32_t num_heads_;
  std::uint32_t chunks_per_row_;
  std::uint32_t rows_per_step_;
  std::uint32_t in_row_ = 0;
  std::uint32_t token_ = 0;
  std::uint32_t head_ = 0;
  std::uint32_t position_ = 0;
};

/// What a warp moves by one bulk copy: so much of one row at most.
inline constexpr std::uint32_t kPieceBytes = 2048;

/// The pieces of a box that fall to one warp: warp, warp + num_warps, and so on, plane after plane.
class PieceWalk {
 public:
  KVPUSH_HD PieceWalk(const CopyArgs& args, std::uint64_t warp, std::uint64_t num_warps)
      : args_(args), step_(num_warps), piece_(warp) {
    find_plane();
  }

  KVPUSH_HD bool valid() const { return plane_ < args_.num_planes; }
  KVPUSH_HD void next() {
    piece_ += step_;
    find_plane();
  }

  KVPUSH_HD std::byte* paged() const { return paged_; }
  KVPUSH_HD std::int64_t dense() const { return dense_; }
  KVPUSH_HD std::uint32_t num_bytes() const { return num_bytes_; }

 private:
  KVPUSH_HD void find_plane() {
    for (; valid(); ++plane_) {
      const UnitLayout& layout = entry().layout;
      const std::uint64_t pieces_per_row =
          (static_cast<std::uint64_t>(layout.content_bytes) + kPieceBytes - 1) / kPieceBytes;
      const std::uint64_t num_pieces = pieces_per_row *
                                       static_cast<std::uint64_t>(layout.num_heads * layout.num_tokens) *
                                       args_.num_positions;
      if (piece_ < num_pieces) return enter(pieces_per_row);
      piece_ -= num_pieces;
    }
  }
  KVPUSH_HD void enter(std::uint64_t pieces_per_row) {
    const UnitLayout& layout = entry().layout;
    const auto row = static_cast<std::int64_t>(piece_ / pieces_per_row);
    const std::int64_t begin =
        static_cast<std::int64_t>(piece_ - static_cast<std::uint64_t>(row) * pieces_per_row) * kPieceBytes;
    const std::int64_t token = row % layout.num_tokens;
    const std::int64_t head = row / layout.num_tokens % layout.num_heads;
    const std::int64_t position = row / layout.num_tokens / layout.num_heads;
    const std::int64_t left = layout.content_bytes - begin;
    paged_ = entry().base + paged_offset(layout, args_.block_ids[position], head, token) + begin;
    dense_ = (entry().unit_bytes_before - args_.planes[args_.plane_begin].unit_bytes_before) *
                 args_.num_positions +
             row * layout.content_bytes + begin;
    num_bytes_ = left < kPieceBytes ? static_cast<std::uint32_t>(left) : kPieceBytes;
  }
  KVPUSH_HD const PlaneEntry& entry() const { return args_.planes[args_.plane_begin + plane_]; }

  const CopyArgs& args_;
  std::uint64_t step_;
  std::uint64_t piece_;
  std::uint32_t plane_ = 0;
  std::byte* paged_ = nullptr;
  std::int64_t dense_ = 0;
  std::uint32_t num_bytes_ = 0;
};

/// What one thread's chunks add to the checksum.
class ShareSum {
 public:
  /// The word of `num_bytes` (8 or less, within one word) at byte `dense_offset`; 0 above them.
  KVPUSH_HD void add(std::int64_t dense_offset, std::uint64_t value) {
    const auto offset = static_cast<std::uint64_t>(dense_offset);
    sum_ += (value << (8 * (offset % 8))) * checksum_weight(offset / 8);
  }
  KVPUSH_HD std::uint64_t sum() const { return sum_; }

 private:
  std::uint64_t sum_ = 0;
};

/// Moves one thread's share of a box and returns what it adds to the checksum. `Chunk` is kBytes wide: it
/// loads and stores one, and gives the 64-bit words that lie in it, or its only part of one.
template <typename Chunk, bool kPacking>
KVPUSH_HD std::uint64_t copy_share(const CopyArgs& args, const Worker& worker) {
  ShareSum sum;
  for (TileWalk<Chunk::kBytes> tile(args, worker.warp, worker.num_warps); tile.valid(); tile.next()) {
    Chunk chunks[kChunksInFlight];
    std::byte* targets[kChunksInFlight];
    ChunkWalk<Chunk::kBytes> walk(args, tile, worker.lane);
    const std::int64_t first = walk.dense();
    unsigned count = 0;
    KVPUSH_UNROLL
    for (unsigned i = 0; i < kChunksInFlight; ++i) {
      if (walk.valid()) {
        std::byte* const paged = walk.paged();
        std::byte* const dense = args.dense + walk.dense();
        chunks[i].load(kPacking ? paged : dense);
        targets[i] = kPacking ? dense : paged;
        ++count;
        walk.next();
      }
    }
    KVPUSH_UNROLL
    for (unsigned i = 0; i < kChunksInFlight; ++i) {
      if (i < count) {
        chunks[i].store(targets[i]);
        const std::int64_t offset = first + std::int64_t{i} * kWarpThreads * Chunk::kBytes;
        KVPUSH_UNROLL
        for (unsigned word = 0; word < Chunk::kWords; ++word) {
          sum.add(offset + std::int64_t{8} * word, chunks[i].word(word));
        }
      }
    }
  }
  return sum.sum();
}

/// The same by bulk copies, of rows that are multiples of 16 bytes. `Mover` has two stages of kPieceBytes per
/// warp: load() begins to fill one once its last store has read it, wait() ends that, store() begins to empty
/// it, finish() ends all stores. The warp calls them together.
template <bool kPacking, typename Mover>
KVPUSH_HD std::uint64_t copy_pieces(const CopyArgs& args, const Worker& worker, Mover& mover) {
  ShareSum sum;
  PieceWalk loading(args, worker.warp, worker.num_warps);
  PieceWalk walk(args, worker.warp, worker.num_warps);
  const auto load_next = [&](unsigned stage) {
    if (!loading.valid()) return;
    mover.load(stage, kPacking ? loading.paged() : args.dense + loading.dense(), loading.num_bytes());
    loading.next();
  };
  load_next(0);
  for (unsigned stage = 0; walk.valid(); stage ^= 1U, walk.next()) {
    load_next(stage ^ 1U);
    mover.wait(stage);
    for (std::uint32_t at = 16 * worker.lane; at < walk.num_bytes(); at += 16 * kWarpThreads) {
      sum.add(walk.dense() + at, mover.word(stage, at));
      sum.add(walk.dense() + at + 8, mover.word(stage, at + 8));
    }
    mover.store(stage, kPacking ? args.dense + walk.dense() : walk.paged(), walk.num_bytes());
  }
  mover.finish();
  return sum.sum();
}

}  // namespace kvpush
