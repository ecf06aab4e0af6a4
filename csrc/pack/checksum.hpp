// The checksum of a box: catches bytes that are wrong, missing or in the wrong place. Not a signature.
//
// Over the dense form as little-endian 32-bit words w_i, the last padded with zeros:
//     sum over i of  w_i * m_i  mod 2^64,   m_i = (uint32((i + 1) * 0x9E3779B1) | 1)
// It is a sum, so the order of work does not matter and parts add up; each position has its own weight, so a
// swap shows. Source: multiply-add hashing with odd weights; the constant is 2^32 over the golden ratio, as
// in Knuth, TAOCP 3, 6.4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"

namespace kvpush {

inline constexpr std::uint32_t kChecksumWeight = 0x9E3779B1U;

/// The weight of word `index`. Repeats after 2^32 words (16 GiB).
[[nodiscard]] constexpr std::uint32_t checksum_weight(std::uint64_t index) noexcept {
  return (static_cast<std::uint32_t>(index + 1) * kChecksumWeight) | 1U;
}

/// What `bytes`, lying at byte `dense_offset` of the dense form, add to its checksum. Any alignment of
/// either: the checksum of the whole is the sum of its parts mod 2^64.
/// Threads: any. Cost: about 0.03 ns per byte with AVX2, 0.05 without, of data in cache.
[[nodiscard]] std::uint64_t checksum_part(ByteView bytes, std::uint64_t dense_offset) noexcept;

/// Checksum of a whole dense form.
[[nodiscard]] inline std::uint64_t checksum(ByteView dense) noexcept {
  return checksum_part(dense, 0);
}

/// The definition, byte by byte: what checksum() must equal.
[[nodiscard]] constexpr std::uint64_t checksum_by_definition(ByteView dense) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < dense.size(); i += 4) {
    std::uint32_t word = 0;
    for (std::size_t b = 0; b < 4 && i + b < dense.size(); ++b) {
      word |= static_cast<std::uint32_t>(dense[i + b]) << (8 * b);
    }
    sum += std::uint64_t{word} * checksum_weight(i / 4);
  }
  return sum;
}

}  // namespace kvpush
