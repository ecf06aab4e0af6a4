// What one slot carries: a rectangle of planes x heads x positions of one transfer, packed densely.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/cache.hpp"

namespace kvpush {

/// Planes [plane_begin, plane_end) x all heads x positions [pos_begin, pos_end) of one group.
/// Packed form: [plane][position][H][N][C], dense. Its parts (one plane, one position) are units.
struct Box {
  std::uint32_t group = 0;
  std::uint32_t plane_begin = 0;
  std::uint32_t plane_end = 0;
  std::uint32_t head_begin = 0;
  std::uint32_t head_end = 0;
  std::uint32_t pos_begin = 0;
  std::uint32_t pos_end = 0;

  [[nodiscard]] std::uint32_t num_planes() const { return plane_end - plane_begin; }
  [[nodiscard]] std::uint32_t num_positions() const { return pos_end - pos_begin; }
  [[nodiscard]] std::uint64_t num_units() const { return std::uint64_t{num_planes()} * num_positions(); }
  auto operator<=>(const Box&) const = default;
};

/// Packed size of `box`. The box must lie within the cache (see box_fits).
[[nodiscard]] std::size_t packed_bytes(const Cache& cache, const Box& box);

/// Whether group, planes and heads exist in the cache, all heads are covered, and nothing is empty.
[[nodiscard]] bool box_fits(const Cache& cache, const Box& box);

/// A half-open range of positions of one group.
struct PositionRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  auto operator<=>(const PositionRange&) const = default;
};

}  // namespace kvpush
