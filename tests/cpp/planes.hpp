// Planes of every nesting of their axes.
#pragma once

#include <array>
#include <cstdint>

#include "cache/cache.hpp"

namespace kvpush {

struct Shape {
  std::int64_t b, h, n, c;
};

/// How a plane's axes are nested (outermost first, of "bhn") and how many bytes of gap follow each of them.
struct Nesting {
  const char* order;
  std::int64_t gap_b, gap_h, gap_n;
};

inline std::int64_t extent_bytes(const Plane& p) {
  return (p.num_blocks - 1) * p.block_stride_bytes + (p.num_heads - 1) * p.head_stride_bytes +
         (p.num_tokens - 1) * p.token_stride_bytes + p.content_bytes;
}

inline Plane make_plane(const Shape& s, const Nesting& nesting) {
  Plane plane{nullptr, s.b, s.h, s.n, s.c, 0, 0, 0, "plane", 0};
  std::int64_t inner = s.c;
  for (int i = 2; i >= 0; --i) {
    switch (nesting.order[i]) {
      case 'b':
        plane.block_stride_bytes = inner + nesting.gap_b;
        inner = s.b * plane.block_stride_bytes;
        break;
      case 'h':
        plane.head_stride_bytes = inner + nesting.gap_h;
        inner = s.h * plane.head_stride_bytes;
        break;
      default:
        plane.token_stride_bytes = inner + nesting.gap_n;
        inner = s.n * plane.token_stride_bytes;
        break;
    }
  }
  return plane;
}

inline constexpr std::array<Nesting, 9> kNestings{{{"bhn", 0, 0, 0},
                                                   {"bhn", 5, 0, 0},
                                                   {"bhn", 0, 3, 0},
                                                   {"bhn", 0, 0, 1},
                                                   {"bnh", 0, 0, 0},
                                                   {"bnh", 7, 1, 2},
                                                   {"hbn", 0, 0, 0},
                                                   {"nhb", 0, 0, 0},
                                                   {"nbh", 1, 2, 3}}};

}  // namespace kvpush
