// What one launch of the copy kernels is given. Shared by host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack/pack_unit.hpp"

namespace kvpush {

/// One plane of a group, in the table that lies in device memory from the packer's start to its end.
struct PlaneEntry {
  std::byte* base = nullptr;
  UnitLayout layout;                   ///< collapsed
  std::int64_t unit_bytes_before = 0;  ///< sum of the unit bytes of the group's planes before this one
};

/// One box, one direction. By value in the kernel's parameters.
struct CopyArgs {
  const PlaneEntry* planes = nullptr;       ///< the group's table, device memory
  const std::int32_t* block_ids = nullptr;  ///< num_positions of them, in pinned host memory
  std::byte* dense = nullptr;               ///< the box's packed form: device or pinned host memory
  std::uint64_t* partial_sum = nullptr;     ///< device memory; 0 before and after the launch
  std::uint32_t* num_arrived = nullptr;     ///< device memory; blocks that have added their part; likewise 0
  std::uint64_t* checksum = nullptr;        ///< pinned host memory: the last block writes the box's checksum
  std::uint32_t plane_begin = 0;
  std::uint32_t num_planes = 0;
  std::uint32_t num_positions = 0;
  std::uint32_t chunk_bytes = 0;       ///< 16, 8, 4, 2 or 1: divides every address, stride and row of the box
  std::uint32_t batches_per_warp = 0;  ///< as launch_shape() has it (pack/cuda/copy_walk.hpp)
};

/// Names of the kernels in the module: one launch packs or unpacks one box. The number of blocks bounds the
/// SMs that it takes; each has so many threads at most.
inline constexpr unsigned kCopyThreadsPerBlock = 512;
inline constexpr const char* kPackKernel = "kvpush_pack";
inline constexpr const char* kUnpackKernel = "kvpush_unpack";
/// The same for rows of kMinBulkRowBytes and more with chunk_bytes 16, on compute capability 9.0 and newer.
inline constexpr unsigned kBulkThreadsPerBlock = 256;
inline constexpr const char* kPackBulkKernel = "kvpush_pack_bulk";
inline constexpr const char* kUnpackBulkKernel = "kvpush_unpack_bulk";
inline constexpr std::int64_t kMinBulkRowBytes = 2048;

}  // namespace kvpush
