// What every packer asks of a job before it touches memory.
#pragma once

#include "cache/cache.hpp"
#include "pack/packer.hpp"

namespace kvpush {

/// InvalidArgument, with the values, unless box and block ids lie within the cache and there is memory for
/// the dense form. Thread-safe.
[[nodiscard]] Status check_job(const Cache& cache, const PackJob& job);

}  // namespace kvpush
