// Copies a box between the cache and its dense form, summing as it goes.
#pragma once

#include <cstdint>

#include "cache/cache.hpp"
#include "pack/cpu/copy_lines.hpp"
#include "pack/packer.hpp"

namespace kvpush {

/// Copies the box of `job`, which must lie within the cache, and returns the checksum of what was copied.
/// Thread-safe as long as jobs touch different memory.
[[nodiscard]] std::uint64_t copy_box(const Cache& cache, const PackJob& job, const LineCopier& copier);

}  // namespace kvpush
