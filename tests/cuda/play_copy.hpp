// The copy kernels, played on the CPU thread by thread: the same walk, the same adding up.
#pragma once

#include "pack/cuda/copy_args.hpp"

namespace kvpush {

/// What one launch of `num_blocks` blocks of `threads_per_block` (a multiple of 32) would do with memory;
/// `bulk`: the kernels of long rows.
void play_copy(const CopyArgs& args, bool packing, bool bulk, unsigned num_blocks,
               unsigned threads_per_block);

}  // namespace kvpush
