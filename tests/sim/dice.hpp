// All luck of a simulation: one seed, the same numbers on every machine.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/ids.hpp"

namespace kvpush::sim {

/// SplitMix64. The standard library's distributions differ from one implementation to the next.
class Dice {
 public:
  explicit Dice(std::uint64_t seed = 0) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t x = (state_ += 0x9e3779b97f4a7c15U);
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31U);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  bool chance(double rate) { return rate > 0 && static_cast<double>(next() >> 11U) * 0x1p-53 < rate; }
  Uuid uuid() {
    Uuid id;
    for (std::uint8_t& byte : id.bytes) byte = static_cast<std::uint8_t>(next() >> 32U);
    return id;
  }

 private:
  std::uint64_t state_;
};

/// A promise that did not hold.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw Violation(otherwise);
}
inline void require(bool holds, const char* otherwise) {
  if (!holds) throw Violation(otherwise);
}

}  // namespace kvpush::sim
