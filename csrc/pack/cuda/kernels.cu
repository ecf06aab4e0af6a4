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
  KVPUSH_HD Words<kWords> words() const {
    if constexpr (sizeof(T) == 16)
      return {value.x, value.y};
    else
      return {value};
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

__device__ Worker this_worker() {
  return worker_of(blockIdx.x, gridDim.x, threadIdx.x);
}

template <typename T, bool kPacking>
__device__ std::uint64_t share_of_thread(const CopyArgs& args) {
  return copy_share<DeviceChunk<T>, kPacking>(args, this_worker());
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVPUSH_HAS_BULK 1

/// Bulk copies of a warp, which its first lane issues. Has not run on hardware yet: used on request only.
class BulkMover {
 public:
  __device__ BulkMover(std::byte* stages, std::uint64_t* barriers, unsigned lane)
      : stages_(address(stages)), barriers_(address(barriers)), leads_(lane == 0) {
    if (leads_) {
      for (unsigned stage = 0; stage < 2; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }

  KVPUSH_HD void load(unsigned stage, const std::byte* from, std::uint32_t num_bytes) {
    if (!leads_) return;
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)),
                 "r"(num_bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            data(stage)),
        "l"(__cvta_generic_to_global(from)), "r"(num_bytes), "r"(barrier(stage))
        : "memory");
  }
  KVPUSH_HD void wait(unsigned stage, unsigned parity) {
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(barrier(stage)), "r"(parity)
          : "memory");
    }
  }
  KVPUSH_HD Words<2> words(unsigned stage, std::uint32_t at) const {
    Words<2> words;
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
                 : "=l"(words.values[0]), "=l"(words.values[1])
                 : "r"(data(stage) + at)
                 : "memory");
    return words;
  }
  KVPUSH_HD void store(unsigned stage, std::byte* to, std::uint32_t num_bytes) {
    // All lanes have read the stage: it may be filled again once the store has, too.
    __syncwarp();
    if (!leads_) return;
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
        "r"(data(stage)), "r"(num_bytes)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  KVPUSH_HD void finish() {
    if (leads_) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }

 private:
  __device__ static std::uint32_t address(const void* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  }
  KVPUSH_HD std::uint32_t data(unsigned stage) const { return stages_ + stage * kPieceBytes; }
  KVPUSH_HD std::uint32_t barrier(unsigned stage) const { return barriers_ + stage * 8; }

  std::uint32_t stages_;
  std::uint32_t barriers_;
  bool leads_;
};

#endif

template <bool kPacking>
__device__ void copy_bulk(const CopyArgs& args) {
#ifdef KVPUSH_HAS_BULK
  constexpr unsigned kWarps = kBulkThreadsPerBlock / kWarpThreads;
  __shared__ alignas(128) std::byte stages[kWarps][2 * kPieceBytes];
  __shared__ std::uint64_t barriers[kWarps][2];
  const unsigned warp = threadIdx.x / kWarpThreads;
  const Worker worker = this_worker();
  BulkMover mover(stages[warp], barriers[warp], worker.lane);
  add_up(args, copy_pieces<kPacking>(args, worker, mover));
#else
  __trap();
#endif
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

extern "C" __global__ void __launch_bounds__(kBulkThreadsPerBlock)
    kvpush_pack_bulk(const __grid_constant__ CopyArgs args) {
  copy_bulk<true>(args);
}

extern "C" __global__ void __launch_bounds__(kBulkThreadsPerBlock)
    kvpush_unpack_bulk(const __grid_constant__ CopyArgs args) {
  copy_bulk<false>(args);
}

}  // namespace kvpush
