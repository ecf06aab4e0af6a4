// The KV cache of one worker as strided memory: planes in groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/status.hpp"

namespace kvpush {

/// One strided array of KV, shape [B, H, N, C]: B blocks, H KV heads, N tokens per block, C content
/// bytes per head and token (contiguous). Strides in bytes, of the axis they name; may be negative-free
/// only. Source: vLLM RFC #42082 axis names.
struct Plane {
  std::byte* base = nullptr;
  std::int64_t num_blocks = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_tokens = 0;
  std::int64_t content_bytes = 0;
  std::int64_t block_stride_bytes = 0;
  std::int64_t head_stride_bytes = 0;
  std::int64_t token_stride_bytes = 0;
  std::string name;             ///< global layer name; part of what two engines compare
  std::int64_t head_begin = 0;  ///< global index of its first KV head

  /// Bytes of this plane at one position: H * N * C.
  [[nodiscard]] std::size_t unit_bytes() const {
    return static_cast<std::size_t>(num_heads * num_tokens * content_bytes);
  }
};

/// Planes that share one block table. `block_size` in tokens.
struct Group {
  std::int64_t block_size = 0;
  std::vector<Plane> planes;

  [[nodiscard]] std::int64_t num_blocks() const { return planes.empty() ? 0 : planes.front().num_blocks; }
};

/// All groups of one worker, and what names the model they belong to.
struct Cache {
  std::vector<Group> groups;
  std::map<std::string, std::string> fingerprint;
  int device = -1;  ///< that all planes are on: a CUDA index; -1: host memory

  /// The largest unit: no slot can be smaller.
  [[nodiscard]] std::size_t max_unit_bytes() const;
  /// Checks shapes, strides, and that group members agree. InvalidArgument names the plane and the values.
  [[nodiscard]] Status validate() const;
  /// What a peer must equal: the fingerprint, then every group's and plane's shape, name and heads.
  [[nodiscard]] std::map<std::string, std::string> identity() const;
};

/// Limits of one cache, so that a peer's description can be checked before it is believed.
inline constexpr std::size_t kMaxGroups = 64;
inline constexpr std::size_t kMaxPlanes = 4096;

/// The first field in which two identities differ, as "field: theirs X, ours Y"; empty when equal.
[[nodiscard]] std::string first_difference(const std::map<std::string, std::string>& theirs,
                                           const std::map<std::string, std::string>& ours);

}  // namespace kvpush
