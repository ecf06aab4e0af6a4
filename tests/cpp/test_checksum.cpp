// Running sums and every copy loop against the checksum's definition.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "pack/checksum.hpp"
#include "pack/cpu/copy_lines.hpp"

using namespace kvpush;

namespace {

Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Adds `bytes` to `run`, byte by byte.
void add(ChecksumRun& run, ByteView bytes) {
  for (const std::byte byte : bytes) run.add_in_word(static_cast<std::uint64_t>(byte), 1);
}

std::uint64_t checksum(ByteView bytes, std::uint64_t dense_offset = 0) {
  ChecksumRun run(dense_offset);
  add(run, bytes);
  return run.finish();
}

/// Memory that starts `shift` bytes behind the start of a line.
struct Lines {
  Bytes storage;
  std::byte* data;

  Lines(std::size_t size, std::size_t shift) : storage(size + shift + kChecksumLineBytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    data = storage.data() + (kChecksumLineBytes - address % kChecksumLineBytes) + shift;
  }
};

}  // namespace

TEST(worked_examples) {
  static_assert(checksum_mix(0) == 0xE220A8397B1DCDAFU);
  static_assert(checksum_weight(0) ==
                checksum_segment_weight(0) * (checksum_word_weight(0) + 256 * checksum_line_weight(0)));
  static_assert(checksum_weight(2047) ==
                checksum_segment_weight(0) * (checksum_word_weight(7) + checksum_line_weight(7)));
  static_assert(checksum_weight(2048) ==
                checksum_segment_weight(1) * (checksum_word_weight(0) + 256 * checksum_line_weight(0)));
  const Bytes one{std::byte{1}};
  CHECK_EQ(checksum(one), checksum_weight(0));
  Bytes ninth(9);
  ninth[8] = std::byte{2};
  CHECK_EQ(checksum(ninth), 2 * checksum_weight(1));
  CHECK_EQ(checksum({}), 0);
}

TEST(every_weight_is_odd) {
  for (std::uint64_t i = 0; i < 3 * 2048; ++i) CHECK_EQ(checksum_weight(i) % 2, 1);
}

TEST(equals_its_definition_at_every_length) {
  const Bytes bytes = random_bytes(700, 1);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const ByteView view = ByteView(bytes).first(size);
    CHECK_EQ(checksum(view), checksum_by_definition(view));
  }
}

TEST(equals_its_definition_at_the_ends_of_segments) {
  const Bytes bytes(random_bytes(2 * kChecksumSegmentBytes + 100, 2));
  for (const std::size_t near : {kChecksumSegmentBytes, 2 * kChecksumSegmentBytes}) {
    for (std::size_t size = near - 65; size <= near + 65; ++size) {
      const ByteView view = ByteView(bytes).first(size);
      CHECK_EQ(checksum(view), checksum_by_definition(view));
    }
  }
}

TEST(parts_add_up_for_every_split) {
  const Bytes bytes = random_bytes(97, 3);
  const ByteView all(bytes);
  for (const std::uint64_t base : {std::uint64_t{0}, std::uint64_t{kChecksumSegmentBytes - 40}}) {
    const std::uint64_t whole = checksum_by_definition(all, base);
    for (std::size_t a = 0; a <= all.size(); ++a) {
      for (std::size_t b = a; b <= all.size(); ++b) {
        CHECK_EQ(checksum(all.first(a), base) + checksum(all.subspan(a, b - a), base + a) +
                     checksum(all.subspan(b), base + b),
                 whole);
      }
    }
  }
}

TEST(parts_of_a_word_may_have_any_size) {
  const Bytes bytes = random_bytes(64, 4);
  for (std::size_t first = 1; first < 8; ++first) {
    ChecksumRun run;
    for (std::size_t at = 0; at < bytes.size(); at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + at, 8);
      run.add_in_word(word & ((std::uint64_t{1} << (8 * first)) - 1), first);
      run.add_in_word(word >> (8 * first), 8 - first);
    }
    CHECK_EQ(run.finish(), checksum_by_definition(bytes));
  }
}

TEST(weights_go_on_past_four_gigabytes) {
  const Bytes bytes = random_bytes(200, 5);
  for (const std::uint64_t base : {(std::uint64_t{1} << 32U) - 100, std::uint64_t{1} << 40U}) {
    CHECK_EQ(checksum(bytes, base), checksum_by_definition(bytes, base));
  }
}

TEST(every_copy_loop_copies_and_sums_at_every_alignment) {
  constexpr std::size_t kMost = 5;
  for (const LineCopier& copier : line_copiers()) {
    for (std::size_t shift = 0; shift < kChecksumLineBytes; ++shift) {
      for (std::size_t num_lines = 0; num_lines <= kMost; ++num_lines) {
        const std::size_t size = num_lines * kChecksumLineBytes;
        const Bytes bytes = random_bytes(size, shift);
        for (const bool streaming : {false, true}) {
          if (streaming && shift % copier.streaming_alignment != 0) continue;
          Lines from(size, streaming ? 64 - shift % 64 : shift);
          std::copy(bytes.begin(), bytes.end(), from.data);
          Lines to(size + 1, shift);
          const Bytes before = to.storage;
          ChecksumRun run(3 * kChecksumLineBytes);
          (streaming ? copier.streaming : copier.cached)(to.data, from.data, from.data, num_lines,
                                                         run.lanes());
          streaming_fence();
          run.added_lines(num_lines);
          CHECK_EQ(run.finish(), checksum_by_definition(bytes, 3 * kChecksumLineBytes));
          CHECK(std::equal(bytes.begin(), bytes.end(), to.data));
          std::fill_n(to.data, size, std::byte{0});
          CHECK(to.storage == before);
        }
      }
    }
  }
}

TEST(largest_words_do_not_overflow_a_lane) {
  const Bytes bytes(kChecksumSegmentBytes + 64, std::byte{0xFF});
  for (const LineCopier& copier : line_copiers()) {
    Lines to(bytes.size(), 0);
    ChecksumRun run;
    copier.cached(to.data, bytes.data(), bytes.data(), kChecksumSegmentLines, run.lanes());
    run.added_lines(kChecksumSegmentLines);
    copier.cached(to.data, bytes.data() + kChecksumSegmentBytes, bytes.data(), 1, run.lanes());
    run.added_lines(1);
    CHECK_EQ(run.finish(), checksum_by_definition(bytes));
  }
}

TEST(notices_a_flipped_bit_a_zeroed_word_and_swapped_words) {
  Bytes bytes = random_bytes(256, 6);
  const std::uint64_t before = checksum(bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<std::byte>(1U << bit);
      CHECK(checksum(bytes) != before);
      bytes[i] ^= static_cast<std::byte>(1U << bit);
    }
  }
  for (std::ptrdiff_t i = 0; i + 16 <= 256; i += 8) {
    std::rotate(bytes.begin() + i, bytes.begin() + i + 8, bytes.begin() + i + 16);
    CHECK(checksum(bytes) != before);
    std::rotate(bytes.begin() + i, bytes.begin() + i + 8, bytes.begin() + i + 16);
    Bytes zeroed = bytes;
    std::fill_n(zeroed.begin() + i, 8, std::byte{0});
    CHECK(checksum(zeroed) != before);
  }
}

// Blocks of another request, or in another order: rows swapped, repeated, shifted, left as they were.
TEST(notices_rows_in_the_wrong_place) {
  constexpr std::size_t kRows = 24;
  for (const std::size_t row : {16U, 64U, 576U, 4096U, 16384U}) {
    // Noise, and what tests like to fill blocks with.
    for (const bool noise : {true, false}) {
      Bytes bytes = random_bytes(kRows * row, row);
      if (!noise) {
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i / row + 1);
      }
      const ByteView all(bytes);
      const std::uint64_t before = checksum_by_definition(all);
      std::vector<std::uint64_t> sums(kRows * kRows);  // of row a at place b
      for (std::size_t a = 0; a < kRows; ++a) {
        for (std::size_t b = 0; b < kRows; ++b)
          sums[a * kRows + b] = checksum(all.subspan(a * row, row), b * row);
      }
      std::uint64_t shifted = 0;
      for (std::size_t b = 0; b < kRows; ++b) shifted += sums[(b + 1) % kRows * kRows + b];
      CHECK(shifted != before);
      for (std::size_t a = 0; a < kRows; ++a) {
        for (std::size_t b = 0; b < kRows; ++b) {
          if (a == b) continue;
          const std::uint64_t at_home = sums[a * kRows + a] + sums[b * kRows + b];
          CHECK(sums[a * kRows + b] + sums[b * kRows + a] != at_home);
          CHECK(sums[a * kRows + b] != sums[b * kRows + b]);
        }
      }
    }
  }
}
