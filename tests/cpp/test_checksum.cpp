// The fast checksum against its definition, for every length, split and alignment that is small.
#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"
#include "pack/checksum.hpp"

using namespace kvpush;

namespace {

Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace

TEST(worked_examples) {
  static_assert(checksum_weight(0) == 0x9E3779B1U);
  static_assert(checksum_weight(1) == (0x3C6EF362U | 1U));
  const Bytes one{std::byte{1}};
  CHECK_EQ(checksum(one), 0x9E3779B1U);
  const Bytes fifth{std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0}, std::byte{2}};
  CHECK_EQ(checksum(fifth), 2 * std::uint64_t{0x3C6EF363U});
  CHECK_EQ(checksum({}), 0);
}

TEST(equals_its_definition_at_every_length) {
  const Bytes bytes = random_bytes(700, 1);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const ByteView view = ByteView(bytes).first(size);
    CHECK_EQ(checksum(view), checksum_by_definition(view));
  }
}

TEST(largest_words_do_not_overflow_a_lane) {
  const Bytes bytes(1 << 20, std::byte{0xFF});
  CHECK_EQ(checksum(bytes), checksum_by_definition(bytes));
}

TEST(parts_add_up_for_every_split) {
  const Bytes bytes = random_bytes(97, 2);
  const ByteView all(bytes);
  const std::uint64_t whole = checksum_by_definition(all);
  for (std::size_t a = 0; a <= all.size(); ++a) {
    for (std::size_t b = a; b <= all.size(); ++b) {
      CHECK_EQ(checksum_part(all.first(a), 0) + checksum_part(all.subspan(a, b - a), a) +
                   checksum_part(all.subspan(b), b),
               whole);
    }
  }
}

TEST(memory_alignment_does_not_matter) {
  const Bytes bytes = random_bytes(300, 3);
  for (std::size_t shift = 0; shift < 9; ++shift) {
    Bytes moved(bytes.size() + shift);
    std::copy(bytes.begin(), bytes.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
    for (std::uint64_t offset = 0; offset < 9; ++offset) {
      CHECK_EQ(checksum_part(ByteView(moved).subspan(shift), offset), checksum_part(bytes, offset));
    }
  }
}

TEST(weights_go_on_past_four_gigabytes) {
  const Bytes bytes = random_bytes(64, 4);
  for (const std::uint64_t base : {std::uint64_t{1} << 32U, (std::uint64_t{1} << 34U) - 32}) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      sum += (std::uint64_t{static_cast<std::uint8_t>(bytes[i])} << (8 * ((base + i) % 4))) *
             checksum_weight((base + i) / 4);
    }
    CHECK_EQ(checksum_part(bytes, base), sum);
  }
}

TEST(notices_a_flipped_bit_and_swapped_words) {
  Bytes bytes = random_bytes(256, 5);
  const std::uint64_t before = checksum(bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<std::byte>(1U << bit);
      CHECK(checksum(bytes) != before);
      bytes[i] ^= static_cast<std::byte>(1U << bit);
    }
  }
  for (std::ptrdiff_t i = 0; i + 8 <= 256; i += 4) {
    std::rotate(bytes.begin() + i, bytes.begin() + i + 4, bytes.begin() + i + 8);
    CHECK(checksum(bytes) != before);
    std::rotate(bytes.begin() + i, bytes.begin() + i + 4, bytes.begin() + i + 8);
  }
}
