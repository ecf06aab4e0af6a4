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

#include <cstddef>
#include <cstdint>

#include "pack/host_device.hpp"

namespace kvpush {

inline constexpr std::size_t kChecksumLanes = 8;
inline constexpr std::size_t kChecksumLineBytes = 8 * kChecksumLanes;
inline constexpr std::size_t kChecksumSegmentLines = 256;
inline constexpr std::size_t kChecksumSegmentBytes = kChecksumSegmentLines * kChecksumLineBytes;

/// An even spread of `x`: splitmix64 (Steele, Lea, Flood, 2014).
[[nodiscard]] KVPUSH_HD constexpr std::uint64_t checksum_mix(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

/// Odd, as m(i) must be: then no change of one word keeps the sum.
[[nodiscard]] KVPUSH_HD constexpr std::uint64_t checksum_word_weight(std::size_t lane) noexcept {
  return checksum_mix(2 * lane) | 1U;
}
/// Twice an odd number, so that the weights of neighbouring lines differ by no higher power of two.
[[nodiscard]] KVPUSH_HD constexpr std::uint64_t checksum_line_weight(std::size_t lane) noexcept {
  return 2 * (checksum_mix(2 * lane + 1) | 1U);
}
/// Odd.
[[nodiscard]] KVPUSH_HD constexpr std::uint64_t checksum_segment_weight(std::uint64_t segment) noexcept {
  return checksum_mix(2 * kChecksumLanes + segment) | 1U;
}

/// m(i) of word `index`.
[[nodiscard]] KVPUSH_HD constexpr std::uint64_t checksum_weight(std::uint64_t index) noexcept {
  const std::uint64_t lane = index % kChecksumLanes;
  const std::uint64_t line = index / kChecksumLanes;
  const std::uint64_t lines = kChecksumSegmentLines - line % kChecksumSegmentLines;
  return checksum_segment_weight(line / kChecksumSegmentLines) *
         (checksum_word_weight(lane) + lines * checksum_line_weight(lane));
}

}  // namespace kvpush
