#include "pack/cpu/copy_lines.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpush {
namespace {

/// Into the second-level cache: the first is too small for what lies between prefetch and use.
[[gnu::always_inline]] inline void prefetch(const std::byte* address) noexcept {
  __builtin_prefetch(address, 0, 2);
}

// Two words at a time: SSE2 of every x86-64, NEON of every 64-bit Arm.
void copy_any(std::byte* to, const std::byte* from, const std::byte* ahead, std::size_t num_lines,
              ChecksumLanes& lanes) noexcept {
  using Pair = std::uint64_t __attribute__((vector_size(16)));
  using Line = std::array<Pair, kChecksumLanes / 2>;
  Line words;
  Line lines;
  std::memcpy(&words, &lanes.words, sizeof(words));
  std::memcpy(&lines, &lanes.lines, sizeof(lines));
  for (std::size_t i = 0; i < num_lines * kChecksumLineBytes; i += kChecksumLineBytes) {
    prefetch(ahead + i);
    for (std::size_t p = 0; p < words.size(); ++p) {
      Pair pair;
      std::memcpy(&pair, from + i + p * sizeof(pair), sizeof(pair));
      std::memcpy(to + i + p * sizeof(pair), &pair, sizeof(pair));
      words[p] += pair;
      lines[p] += words[p];
    }
  }
  std::memcpy(&lanes.words, &words, sizeof(words));
  std::memcpy(&lanes.lines, &lines, sizeof(lines));
}

#if defined(__x86_64__)

// Not target_clones: its resolver runs before a sanitizer is ready.
template <bool kStreaming>
[[gnu::target("avx2")]] void copy_avx2(std::byte* to, const std::byte* from, const std::byte* ahead,
                                       std::size_t num_lines, ChecksumLanes& lanes) noexcept {
  auto* const words = reinterpret_cast<__m256i*>(lanes.words.data());
  auto* const lines = reinterpret_cast<__m256i*>(lanes.lines.data());
  __m256i words0 = _mm256_load_si256(words);
  __m256i words1 = _mm256_load_si256(words + 1);
  __m256i lines0 = _mm256_load_si256(lines);
  __m256i lines1 = _mm256_load_si256(lines + 1);
  for (std::size_t i = 0; i < num_lines * kChecksumLineBytes; i += kChecksumLineBytes) {
    const auto* const source = reinterpret_cast<const __m256i*>(from + i);
    auto* const target = reinterpret_cast<__m256i*>(to + i);
    const __m256i half0 = _mm256_loadu_si256(source);
    const __m256i half1 = _mm256_loadu_si256(source + 1);
    if constexpr (kStreaming) {
      _mm256_stream_si256(target, half0);
      _mm256_stream_si256(target + 1, half1);
    } else {
      prefetch(ahead + i);
      _mm256_storeu_si256(target, half0);
      _mm256_storeu_si256(target + 1, half1);
    }
    words0 = _mm256_add_epi64(words0, half0);
    words1 = _mm256_add_epi64(words1, half1);
    lines0 = _mm256_add_epi64(lines0, words0);
    lines1 = _mm256_add_epi64(lines1, words1);
  }
  _mm256_store_si256(words, words0);
  _mm256_store_si256(words + 1, words1);
  _mm256_store_si256(lines, lines0);
  _mm256_store_si256(lines + 1, lines1);
}

template <bool kStreaming>
[[gnu::target("avx512f")]] void copy_avx512(std::byte* to, const std::byte* from, const std::byte* ahead,
                                            std::size_t num_lines, ChecksumLanes& lanes) noexcept {
  __m512i words = _mm512_load_si512(lanes.words.data());
  __m512i lines = _mm512_load_si512(lanes.lines.data());
  for (std::size_t i = 0; i < num_lines * kChecksumLineBytes; i += kChecksumLineBytes) {
    const __m512i line = _mm512_loadu_si512(from + i);
    if constexpr (kStreaming) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), line);
    } else {
      prefetch(ahead + i);
      _mm512_storeu_si512(to + i, line);
    }
    words = _mm512_add_epi64(words, line);
    lines = _mm512_add_epi64(lines, words);
  }
  _mm512_store_si512(lanes.words.data(), words);
  _mm512_store_si512(lanes.lines.data(), lines);
}

#endif

constexpr std::array kCopiers{
    LineCopier{"any", copy_any, copy_any, 1},
#if defined(__x86_64__)
    LineCopier{"avx2", copy_avx2<false>, copy_avx2<true>, 32},
    LineCopier{"avx512", copy_avx512<false>, copy_avx512<true>, 64},
#endif
};

std::size_t count_runnable() noexcept {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) return 1;
  if (!__builtin_cpu_supports("avx512f")) return 2;
#endif
  return kCopiers.size();
}

}  // namespace

std::span<const LineCopier> line_copiers() noexcept {
  static const std::size_t count = count_runnable();
  return std::span(kCopiers).first(count);
}

void streaming_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace kvpush
