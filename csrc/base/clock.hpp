// Monotonic time in microseconds. The protocol never reads a clock: it is told the time.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvpush {

/// Microseconds; a point on the monotonic clock, or a duration.
using TimeUs = std::int64_t;

inline constexpr TimeUs kNever = INT64_MAX;

/// Time of CLOCK_MONOTONIC. Thread-safe.
[[nodiscard]] inline TimeUs monotonic_us() noexcept {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace kvpush
