#include "play_copy.hpp"

#include <cstring>

#include "pack/cuda/copy_walk.hpp"

namespace kvpush {
namespace {

template <unsigned kSize>
struct PlayedChunk {
  static constexpr unsigned kBytes = kSize;
  static constexpr unsigned kWords = kBytes == 16 ? 2 : 1;

  void load(const std::byte* from) { std::memcpy(bytes, from, kBytes); }
  void store(std::byte* to) const { std::memcpy(to, bytes, kBytes); }
  [[nodiscard]] Words<kWords> words() const {
    Words<kWords> words{};
    std::memcpy(words.values, bytes, kBytes);
    return words;
  }

  std::byte bytes[kBytes];
};

/// The stages of a warp as one of its lanes sees them. Lane 0 stores.
struct PlayedMover {
  unsigned lane = 0;
  std::byte stages[2][kPieceBytes] = {};

  void load(unsigned stage, const std::byte* from, std::uint32_t num_bytes) {
    std::memcpy(stages[stage], from, num_bytes);
  }
  void wait(unsigned, unsigned) {}
  [[nodiscard]] Words<2> words(unsigned stage, std::uint32_t at) const {
    Words<2> words{};
    std::memcpy(words.values, stages[stage] + at, sizeof(words));
    return words;
  }
  void store(unsigned stage, std::byte* to, std::uint32_t num_bytes) const {
    if (lane == 0) std::memcpy(to, stages[stage], num_bytes);
  }
  void finish() {}
};

template <bool kPacking>
std::uint64_t share(const CopyArgs& args, bool bulk, const Worker& worker) {
  if (bulk) {
    PlayedMover mover{worker.lane};
    return copy_pieces<kPacking>(args, worker, mover);
  }
  switch (args.chunk_bytes) {
    case 16: return copy_share<PlayedChunk<16>, kPacking>(args, worker);
    case 8: return copy_share<PlayedChunk<8>, kPacking>(args, worker);
    case 4: return copy_share<PlayedChunk<4>, kPacking>(args, worker);
    case 2: return copy_share<PlayedChunk<2>, kPacking>(args, worker);
    default: return copy_share<PlayedChunk<1>, kPacking>(args, worker);
  }
}

}  // namespace

void play_copy(const CopyArgs& args, bool packing, bool bulk, unsigned num_blocks,
               unsigned threads_per_block) {
  for (unsigned block = 0; block < num_blocks; ++block) {
    std::uint64_t of_block = 0;
    for (unsigned thread = 0; thread < threads_per_block; ++thread) {
      const Worker worker = worker_of(block, num_blocks, thread);
      of_block += packing ? share<true>(args, bulk, worker) : share<false>(args, bulk, worker);
    }
    *args.partial_sum += of_block;
    if ((*args.num_arrived)++ != num_blocks - 1) continue;
    *args.checksum = *args.partial_sum;
    *args.partial_sum = 0;
    *args.num_arrived = 0;
  }
}

}  // namespace kvpush
