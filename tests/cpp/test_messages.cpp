// The byte form of messages: round trips, and everything that must be refused.
#include <algorithm>
#include <string>
#include <vector>

#include "check.hpp"
#include "protocol/messages.hpp"

using namespace kvpush;
using namespace kvpush::protocol;

namespace {

constexpr std::size_t kBodyAt = 4 + 1 + 1 + 16 + 8;  // magic, version, type, sender, seq

Incarnation incarnation(std::uint8_t first) {
  Incarnation id;
  for (std::size_t i = 0; i < id.bytes.size(); ++i) id.bytes[i] = static_cast<std::uint8_t>(first + i);
  return id;
}

std::vector<Envelope> one_of_each() {
  const Bytes digest(32, std::byte{7});
  std::vector<Body> bodies = {
      Intent{1, "key"},
      Open{2, "k", digest, {{{0, 3}, {5, 9}}, {}, {{1, 2}}}},
      Open{3, std::string(kMaxKeyBytes, 'x'), Bytes(kMaxDigestBytes, std::byte{1}), {}},
      Cancel{4},
      Done{UINT64_MAX},
      Credit{{0, 7, UINT32_MAX}},
      Credit{},
      Accept{5},
      BoxNotice{6, 3, {1, 2, 3, 0, 4, 10, 20}, 0x0123456789abcdefU},
      End{7, 8, 9},
      Fail{8, FailCode::kMissing},
      Ping{10, 11},
      Bye{},
  };
  std::vector<Envelope> all;
  for (Body& body : bodies) all.push_back({incarnation(9), 1000 + all.size(), std::move(body)});
  return all;
}

/// `bytes` with a hash that fits them: damage made on purpose.
Bytes resealed(Bytes bytes) {
  const std::uint64_t hash = fnv1a(ByteView(bytes).first(bytes.size() - 8));
  std::memcpy(bytes.data() + bytes.size() - 8, &hash, 8);
  return bytes;
}

void put_u32(Bytes& bytes, std::size_t at, std::uint32_t value) {
  std::memcpy(bytes.data() + at, &value, 4);
}

}  // namespace

TEST(test_case_c6_no_count_in_a_message_is_narrower_than_64_bits) {
  constexpr std::uint64_t kMost = UINT64_MAX;
  for (const Body& body :
       std::vector<Body>{Intent{kMost, "k"}, Open{kMost, "k", Bytes(1), {}}, Cancel{kMost}, Done{kMost},
                         Accept{kMost}, BoxNotice{kMost, 0, {}, kMost}, End{kMost, kMost, kMost},
                         Fail{kMost, FailCode::kMissing}, Ping{kMost, kMost}}) {
    const Bytes bytes = encode({incarnation(9), kMost, body});
    const Result<Envelope> got = decode(bytes);
    if (!CHECK(got.ok())) continue;
    CHECK_EQ(got.value().seq, kMost);
    CHECK(encode(got.value()) == bytes);
    // The first field: the transfer, or a PING's messages_sent.
    const ByteView counts = ByteView(bytes).subspan(kBodyAt);
    CHECK(std::all_of(counts.begin(), counts.begin() + 8,
                      [](std::byte byte) { return byte == std::byte{0xFF}; }));
    if (const auto* end = std::get_if<End>(&got.value().body)) {
      CHECK(end->transfer == kMost && end->num_boxes == kMost && end->num_units == kMost);
    } else if (const auto* ping = std::get_if<Ping>(&got.value().body)) {
      CHECK(ping->messages_sent == kMost && ping->boxes_completed == kMost);
    }
  }
}

TEST(each_type_round_trips) {
  for (const Envelope& sent : one_of_each()) {
    const Bytes bytes = encode(sent);
    const Result<Envelope> got = decode(bytes);
    if (!CHECK(got.ok())) continue;
    CHECK(got.value().sender == sent.sender);
    CHECK_EQ(got.value().seq, sent.seq);
    CHECK_EQ(name_of(got.value().body), name_of(sent.body));
    CHECK(encode(got.value()) == bytes);
  }
  const auto open = decode(encode(one_of_each()[1]));
  const auto& m = std::get<Open>(open.value().body);
  CHECK_EQ(m.transfer, 2U);
  CHECK_EQ(m.key, "k");
  CHECK_EQ(m.digest.size(), 32U);
  CHECK(m.wanted == (Wanted{{{0, 3}, {5, 9}}, {}, {{1, 2}}}));
  const auto box = decode(encode(one_of_each()[8]));
  CHECK(std::get<BoxNotice>(box.value().body).box == (Box{1, 2, 3, 0, 4, 10, 20}));
}

TEST(every_truncation_and_extension_is_refused) {
  for (const Envelope& sent : one_of_each()) {
    const Bytes bytes = encode(sent);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      CHECK(!decode(ByteView(bytes).first(size)).ok());
      if (size < 8) continue;
      CHECK(!decode(resealed(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)))).ok());
    }
    Bytes longer = bytes;
    longer.push_back(std::byte{0});
    CHECK(!decode(longer).ok());
    CHECK(!decode(resealed(longer)).ok());
  }
}

TEST(every_flipped_bit_is_refused) {
  for (const Envelope& sent : one_of_each()) {
    Bytes bytes = encode(sent);
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      CHECK(!decode(bytes).ok());
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
  }
}

TEST(huge_counts_are_refused) {
  const auto refused = [](const Body& body, std::size_t at) {
    for (const std::uint32_t count : {5U, 0x10000U, 0x7fffffffU, 0xffffffffU}) {
      Bytes bytes = encode({{}, 0, body});
      put_u32(bytes, kBodyAt + at, count);
      const auto got = decode(resealed(bytes));
      CHECK(!got.ok());
    }
  };
  refused(Intent{1, "abc"}, 8);
  const Open open{1, "abc", Bytes(4), {{{0, 1}}, {{0, 1}}}};
  refused(open, 8);           // key
  refused(open, 8 + 7);       // digest
  refused(open, 8 + 7 + 8);   // groups
  refused(open, 8 + 7 + 12);  // ranges of group 0
  refused(Credit{{1, 2}}, 0);
  Open long_key = open;
  long_key.key.assign(kMaxKeyBytes + 1, 'x');
  CHECK(!decode(encode({{}, 0, long_key})).ok());
  Open long_digest = open;
  long_digest.digest.resize(kMaxDigestBytes + 1);
  CHECK(!decode(encode({{}, 0, long_digest})).ok());
  Open many_groups = open;
  many_groups.wanted.resize(kMaxGroups + 1);
  CHECK(!decode(encode({{}, 0, many_groups})).ok());
  many_groups.wanted.resize(kMaxGroups);
  CHECK(decode(encode({{}, 0, many_groups})).ok());
  CHECK(!decode(encode({{}, 0, Credit{std::vector<std::uint32_t>(kMaxMessageBytes / 4)}})).ok());
}

TEST(another_version_is_named) {
  Bytes bytes = encode({{}, 0, Bye{}});
  bytes[4] = std::byte{42};
  const auto got = decode(resealed(bytes));
  CHECK(!got.ok());
  CHECK(got.status().message().find("version 42") != std::string::npos);
  CHECK(got.status().message().find("ours is 1") != std::string::npos);
}

TEST(unknown_types_and_fail_codes) {
  Bytes bytes = encode({{}, 0, Bye{}});
  for (unsigned type = std::variant_size_v<Body>; type < 256; ++type) {
    bytes[5] = static_cast<std::byte>(type);
    CHECK(!decode(resealed(bytes)).ok());
  }
  Bytes fail = encode({{}, 0, Fail{1, FailCode::kTaken}});
  for (const unsigned code : {0U, unsigned{kNumFailCodes}, 255U}) {
    fail[kBodyAt + 8] = static_cast<std::byte>(code);
    const auto got = decode(resealed(fail));
    if (CHECK(got.ok())) CHECK_EQ(std::get<Fail>(got.value().body).code, FailCode::kBreach);
  }
}
