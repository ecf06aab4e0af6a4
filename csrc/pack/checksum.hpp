// The checksum of a box: catches bytes that are wrong, missing or in the wrong place. Not a signature.
//
// Over the dense form as little-endian 64-bit words w(i), the last padded with zeros:
//     sum over i of  w(i) * m(i)  mod 2^64
// Words come in lines of 8, lines in segments of 256. With lane = i % 8 and `lines` the number of lines from
// the word's own to the end of its segment:
//     m(i) = segment_weight * (word_weight[lane] + lines * line_weight[lane])
// It is a sum, so the order of work does not matter and parts add up. Within a segment it takes two additions
// per word: one to a running sum, and once per line that sum to a second one (Fletcher, 1982). docs/adr/0015.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"

namespace kvpush {

inline constexpr std::size_t kChecksumLanes = 8;
inline constexpr std::size_t kChecksumLineBytes = 8 * kChecksumLanes;
inline constexpr std::size_t kChecksumSegmentLines = 256;
inline constexpr std::size_t kChecksumSegmentBytes = kChecksumSegmentLines * kChecksumLineBytes;

/// An even spread of `x`: splitmix64 (Steele, Lea, Flood, 2014).
[[nodiscard]] constexpr std::uint64_t checksum_mix(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

/// Odd, as m(i) must be: then no change of one word keeps the sum.
[[nodiscard]] constexpr std::uint64_t checksum_word_weight(std::size_t lane) noexcept {
  return checksum_mix(2 * lane) | 1U;
}
/// Twice an odd number, so that the weights of neighbouring lines differ by no higher power of two.
[[nodiscard]] constexpr std::uint64_t checksum_line_weight(std::size_t lane) noexcept {
  return 2 * (checksum_mix(2 * lane + 1) | 1U);
}
/// Odd.
[[nodiscard]] constexpr std::uint64_t checksum_segment_weight(std::uint64_t segment) noexcept {
  return checksum_mix(2 * kChecksumLanes + segment) | 1U;
}

/// m(i) of word `index`.
[[nodiscard]] constexpr std::uint64_t checksum_weight(std::uint64_t index) noexcept {
  const std::uint64_t lane = index % kChecksumLanes;
  const std::uint64_t line = index / kChecksumLanes;
  const std::uint64_t lines = kChecksumSegmentLines - line % kChecksumSegmentLines;
  return checksum_segment_weight(line / kChecksumSegmentLines) *
         (checksum_word_weight(lane) + lines * checksum_line_weight(lane));
}

/// What `bytes`, lying at byte `dense_offset` of the dense form, add to its checksum, byte by byte: the
/// definition, and what everything else must equal.
[[nodiscard]] constexpr std::uint64_t checksum_by_definition(ByteView bytes,
                                                             std::uint64_t dense_offset = 0) noexcept {
  std::uint64_t sum = 0;
  for (const std::byte byte : bytes) {
    sum += (static_cast<std::uint64_t>(byte) << (8 * (dense_offset % 8))) * checksum_weight(dense_offset / 8);
    ++dense_offset;
  }
  return sum;
}

/// The running sums of a segment: of the words of each lane, and of those sums at the end of each line.
struct ChecksumLanes {
  alignas(kChecksumLineBytes) std::array<std::uint64_t, kChecksumLanes> words{};
  alignas(kChecksumLineBytes) std::array<std::uint64_t, kChecksumLanes> lines{};
};

/// The checksum of a part of a dense form that is visited front to back.
/// Externally synchronised.
class ChecksumRun {
 public:
  /// From byte `dense_offset` on.
  explicit ChecksumRun(std::uint64_t dense_offset = 0) noexcept : offset_(dense_offset) {}

  [[nodiscard]] std::uint64_t dense_offset() const noexcept { return offset_; }
  /// Whole lines that may be added to lanes() by the caller; 0 in the middle of a line.
  [[nodiscard]] std::size_t whole_lines() const noexcept {
    return offset_ % kChecksumLineBytes == 0 ? lines_left() : 0;
  }
  [[nodiscard]] ChecksumLanes& lanes() noexcept { return lanes_; }
  /// The caller added the next `num_lines` lines, at most whole_lines().
  void added_lines(std::size_t num_lines) noexcept {
    offset_ += num_lines * kChecksumLineBytes;
    if (offset_ % kChecksumSegmentBytes == 0) fold(offset_ - 1);
  }
  /// Adds the next `num_bytes`, all of one word: the low ones of `value`, which is 0 above them.
  void add_in_word(std::uint64_t value, std::size_t num_bytes) noexcept;
  /// The checksum of all that was added. Ends the run.
  [[nodiscard]] std::uint64_t finish() noexcept;

 private:
  [[nodiscard]] std::size_t lines_left() const noexcept {
    return kChecksumSegmentLines -
           static_cast<std::size_t>(offset_ / kChecksumLineBytes) % kChecksumSegmentLines;
  }
  /// Moves the lanes, of the segment that byte `dense_offset` is in, to the sum.
  void fold(std::uint64_t dense_offset) noexcept;

  ChecksumLanes lanes_;
  std::uint64_t offset_;
  std::uint64_t sum_ = 0;
};

}  // namespace kvpush
