// Computes the checksum that checksum_weight.hpp defines.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "pack/checksum_weight.hpp"

namespace kvpush {

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
