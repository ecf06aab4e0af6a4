// The packer for caches in host memory: memcpy of the longest runs that the layout has.
#pragma once

#include <memory>

#include "cache/cache.hpp"
#include "pack/packer.hpp"

namespace kvpush {

/// A packer that copies on `num_threads` threads of its own, one job per thread at a time, and signals the
/// end of a job through wait_fd(). With 0 threads a job is done inside start(), there is no wait_fd(), and
/// the next poll() has its end.
/// Errors: a job that does not lie within the cache, or without memory, ends with InvalidArgument.
/// Threads: start() and poll() by one thread. The destructor waits for running jobs and drops waiting ones.
[[nodiscard]] std::unique_ptr<Packer> make_cpu_packer(const Cache& cache, unsigned num_threads);

/// Does one job on the calling thread. Thread-safe as long as jobs touch different memory.
[[nodiscard]] PackDone run_pack_job(const Cache& cache, const PackJob& job);

}  // namespace kvpush
