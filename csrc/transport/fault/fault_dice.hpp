// Seeded chance. The n-th roll of a stream depends on the seed, the stream and n alone, so that one sort of
// event never shifts the luck of another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpush::fault {

enum class Stream : std::uint8_t { kMessage, kNotice, kSendAgain, kPostAgain, kNumStreams };

class Dice {
 public:
  /// The numbers of one event, in order.
  class Roll {
   public:
    explicit Roll(std::uint64_t state) : state_(state) {}
    /// True at the given rate; 0 is never, 1 is always.
    bool hits(double rate) { return static_cast<double>(next() >> 11U) * 0x1p-53 < rate; }
    /// Uniform in [0, bound), for a positive bound; the bias of the remainder does not matter here.
    std::uint64_t below(std::uint64_t bound) { return next() % bound; }

   private:
    /// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (SplitMix64).
    std::uint64_t next() {
      std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
      z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
      z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
      return z ^ (z >> 31U);
    }
    std::uint64_t state_;
  };

  explicit Dice(std::uint64_t seed) : seed_(seed) {}

  Roll roll(Stream stream) {
    const auto index = static_cast<std::size_t>(stream);
    const std::uint64_t count = counts_[index]++;
    // Mixed once more, so that neighbouring events share no numbers.
    Roll mixer(seed_ ^ (index << 56U) ^ count * 0xd1342543de82ef95U);
    return Roll(mixer.below(UINT64_MAX));
  }

 private:
  const std::uint64_t seed_;
  std::array<std::uint64_t, static_cast<std::size_t>(Stream::kNumStreams)> counts_{};
};

}  // namespace kvpush::fault
