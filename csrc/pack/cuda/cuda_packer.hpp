// The packer for caches in the memory of one GPU: one launch per box.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "cache/cache.hpp"
#include "pack/packer.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush {

struct CudaPackerOptions {
  unsigned num_sms = 0;  ///< that boxes fill, each and all together; 0: an eighth of the GPU's, at least 2
  bool bulk = false;  ///< rows of kMinBulkRowBytes and more by bulk copies, compute capability 9.0 and newer
};

/// A packer whose cache and dense forms are memory that `device` reaches: its own, another's that was opened
/// here, or pinned host memory. `kernels` is the fatbin of the copy kernels; it is not kept. Boxes
/// take turns on a few streams of high priority: some run at a time, and they end in any order. What runs
/// keeps to num_sms, but that one which starts while others fill them takes its stream's part all the same.
/// There is no wait_fd(). Nothing is allocated and nobody waits for the device once as many jobs have been in
/// flight as ever will be. Errors: Unsupported (no kernel for this GPU), Exhausted, Transport. A job that
/// fails ends with one of these or InvalidArgument; after a code that ends_context(), every job does. The
/// destructor waits for no job: what a running one may use is kept for the life of the process. Threads:
/// start(), poll(), passed() and drop() by one thread; capture() by any.
Result<std::unique_ptr<Packer>> make_cuda_packer(const Cache& cache, std::shared_ptr<const CudaDevice> device,
                                                 std::span<const std::byte> kernels,
                                                 const CudaPackerOptions& options);

}  // namespace kvpush
