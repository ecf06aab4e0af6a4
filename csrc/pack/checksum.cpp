#include "pack/checksum.hpp"

namespace kvpush {
namespace {

struct LaneWeights {
  std::array<std::uint64_t, kChecksumLanes> word;
  std::array<std::uint64_t, kChecksumLanes> line;
};

constexpr LaneWeights kWeights = [] {
  LaneWeights weights{};
  for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) {
    weights.word[lane] = checksum_word_weight(lane);
    weights.line[lane] = checksum_line_weight(lane);
  }
  return weights;
}();

}  // namespace

void ChecksumRun::add_in_word(std::uint64_t value, std::size_t num_bytes) noexcept {
  // Parts of one word do not overlap, so they may be added one by one.
  lanes_.words[offset_ / 8 % kChecksumLanes] += value << (8 * (offset_ % 8));
  offset_ += num_bytes;
  if (offset_ % kChecksumLineBytes != 0) return;
  for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) lanes_.lines[lane] += lanes_.words[lane];
  if (offset_ % kChecksumSegmentBytes == 0) fold(offset_ - 1);
}

std::uint64_t ChecksumRun::finish() noexcept {
  // As if zeros followed to the end of the segment; at its start there is nothing left to add.
  const std::uint64_t lines = lines_left();
  for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) lanes_.lines[lane] += lines * lanes_.words[lane];
  fold(offset_);
  return sum_;
}

void ChecksumRun::fold(std::uint64_t dense_offset) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) {
    sum += kWeights.word[lane] * lanes_.words[lane] + kWeights.line[lane] * lanes_.lines[lane];
  }
  sum_ += checksum_segment_weight(dense_offset / kChecksumSegmentBytes) * sum;
  lanes_ = {};
}

}  // namespace kvpush
