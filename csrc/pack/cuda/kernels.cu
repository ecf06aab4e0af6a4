// The copy kernels: every address and every weight is decided in copy_walk.hpp; here are loads, stores, and
// the adding up of what threads return. Compiled to a fatbin that the driver loads (docs/adr/0018).
#include <cstdint>

#include "pack/cuda/copy_walk.hpp"

namespace kvpush {
namespace {

/// One access of `T`: loaded once and not kept, stored past the caches' first level.
template <typename T>
struct DeviceChunk {
  static constexpr unsigned kBytes = sizeof(T);
  static constexpr unsigned kWords = sizeof(T) == 16 ? 2 : 1;

  KVPUSH_HD void load(const std::byte* from) {
#ifdef __CUDA_ARCH__
    value = __ldcs(reinterpret_cast<const T*>(from));
#endif
  }
  KVPUSH_HD void store(std::byte* to) const {
#ifdef __CUDA_ARCH__
    __stcs(reinterpret_cast<T*>(to), value);
#endif
  }
  KVPUSH_HD std::uint64_t word(unsigned index) const {
    if constexpr (sizeof(T) == 16)
      return index == 0 ? value.x : value.y;
    else
      return value;
  }

  T value;
};

__device__ std::uint64_t sum_of_warp(std::uint64_t value) {
  KVPUSH_UNROLL
  for (unsigned distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xFFFFFFFFU, value, distance);
  }
  return value;
}

/// Adds the block's part. The last block to arrive gives the checksum to the host, and clears the scratch for
/// the next launch.
__device__ void add_up(const CopyArgs& args, std::uint64_t share) {
  __shared__ std::uint64_t of_warps[kCopyThreadsPerBlock / kWarpThreads];
  const unsigned warp = threadIdx.x / kWarpThreads;
  const unsigned lane = threadIdx.x % kWarpThreads;
  share = sum_of_warp(share);
  if (lane == 0) of_warps[warp] = share;
  __syncthreads();
  if (warp != 0) return;
  share = sum_of_warp(lane < blockDim.x / kWarpThreads ? of_warps[lane] : 0);
  if (lane != 0) return;
  auto* const sum = reinterpret_cast<unsigned long long*>(args.partial_sum);
  atomicAdd(sum, static_cast<unsigned long long>(share));
  __threadfence();
  if (atomicAdd(args.num_arrived, 1U) != gridDim.x - 1) return;
  __threadfence();
  *args.checksum = atomicExch(sum, 0ULL);
  *args.num_arrived = 0;
  __threadfence_system();
}

template <typename T, bool kPacking>
__device__ std::uint64_t share_of_thread(const CopyArgs& args) {
  const Worker worker{
      (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpThreads,
      std::uint64_t{gridDim.x} * blockDim.x / kWarpThreads,
      threadIdx.x % kWarpThreads,
  };
  return copy_share<DeviceChunk<T>, kPacking>(args, worker);
}

template <bool kPacking>
__device__ void copy(const CopyArgs& args) {
  std::uint64_t share = 0;
  switch (args.chunk_bytes) {
    case 16: share = share_of_thread<ulonglong2, kPacking>(args); break;
    case 8: share = share_of_thread<unsigned long long, kPacking>(args); break;
    case 4: share = share_of_thread<unsigned, kPacking>(args); break;
    case 2: share = share_of_thread<unsigned short, kPacking>(args); break;
    default: share = share_of_thread<unsigned char, kPacking>(args); break;
  }
  add_up(args, share);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kCopyThreadsPerBlock)
    kvpush_pack(const __grid_constant__ CopyArgs args) {
  copy<true>(args);
}

extern "C" __global__ void __launch_bounds__(kCopyThreadsPerBlock)
    kvpush_unpack(const __grid_constant__ CopyArgs args) {
  copy<false>(args);
}

}  // namespace kvpush
