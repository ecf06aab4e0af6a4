// The packer for caches in host memory: copies the longest runs that the layout has.
#pragma once

#include <memory>

#include "cache/cache.hpp"
#include "pack/cpu/copy_lines.hpp"
#include "pack/packer.hpp"

namespace kvpush {

/// Jobs up to this size are done inside start(): to hand one over takes longer than to copy it.
inline constexpr std::size_t kInlinePackBytes = 64 * 1024;

/// A packer that copies on `num_threads` threads of its own, one job per thread at a time, and signals the
/// end of a job through wait_fd(). Jobs of together at most kInlinePackBytes between two polls are done
/// inside start(); the next poll() has their ends. With 0 threads each poll() does one job, and there is no
/// wait_fd(): poll until all have ended.
/// Errors: a job that does not lie within the cache, or without memory, ends with InvalidArgument.
/// Threads: start() and poll() by one thread. The destructor waits for running jobs and drops waiting ones.
[[nodiscard]] std::unique_ptr<Packer> make_cpu_packer(const Cache& cache, unsigned num_threads);

/// Does one job on the calling thread, with the fastest of this CPU's loops unless told otherwise.
/// Thread-safe as long as jobs touch different memory.
[[nodiscard]] PackDone run_pack_job(const Cache& cache, const PackJob& job,
                                    const LineCopier& copier = line_copiers().back());

}  // namespace kvpush
