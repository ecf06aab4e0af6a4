#include "pack/checksum.hpp"

#include <cstring>

namespace kvpush {
namespace {

// One loop, compiled for more than one instruction set: g++ -O3 makes vector multiplies of it.
[[gnu::always_inline]] inline std::uint64_t sum_words(const std::byte* data, std::size_t num_words,
                                                      std::uint64_t first_word) noexcept {
  std::uint64_t sum = 0;
  std::uint32_t weight = static_cast<std::uint32_t>(first_word + 1) * kChecksumWeight;
  for (std::size_t i = 0; i < num_words; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, data + 4 * i, sizeof(word));
    sum += std::uint64_t{word} * (weight | 1U);
    weight += kChecksumWeight;
  }
  return sum;
}

using SumWords = std::uint64_t (*)(const std::byte*, std::size_t, std::uint64_t) noexcept;

std::uint64_t sum_words_any(const std::byte* data, std::size_t num_words, std::uint64_t first_word) noexcept {
  return sum_words(data, num_words, first_word);
}

#if defined(__x86_64__)
// 1.6 times the baseline's rate; AVX-512 gains nothing over it. Not target_clones: its resolver runs before
// a sanitizer is ready.
[[gnu::target("avx2")]] std::uint64_t sum_words_avx2(const std::byte* data, std::size_t num_words,
                                                     std::uint64_t first_word) noexcept {
  return sum_words(data, num_words, first_word);
}

SumWords choose() noexcept {
  return __builtin_cpu_supports("avx2") ? sum_words_avx2 : sum_words_any;
}
#else
SumWords choose() noexcept {
  return sum_words_any;
}
#endif

std::uint64_t sum_bytes(ByteView bytes, std::uint64_t dense_offset) noexcept {
  std::uint64_t sum = 0;
  for (const std::byte byte : bytes) {
    sum += (std::uint64_t{static_cast<std::uint8_t>(byte)} << (8 * (dense_offset % 4))) *
           checksum_weight(dense_offset / 4);
    ++dense_offset;
  }
  return sum;
}

}  // namespace

std::uint64_t checksum_part(ByteView bytes, std::uint64_t dense_offset) noexcept {
  static const SumWords sum_whole_words = choose();
  const std::size_t to_word = (4 - dense_offset % 4) % 4;
  if (bytes.size() <= to_word) return sum_bytes(bytes, dense_offset);
  const ByteView head = bytes.first(to_word);
  const std::size_t num_words = (bytes.size() - to_word) / 4;
  const ByteView tail = bytes.subspan(to_word + 4 * num_words);
  return sum_bytes(head, dense_offset) +
         sum_whole_words(bytes.data() + to_word, num_words, (dense_offset + to_word) / 4) +
         sum_bytes(tail, dense_offset + to_word + 4 * num_words);
}

}  // namespace kvpush
