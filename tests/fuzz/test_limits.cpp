// Every limit that a peer can run into, exceeded by one (docs/access.md).
#include <string>

#include "check.hpp"
#include "core_world.hpp"
#include "engine/handshake.hpp"
#include "protocol/messages.hpp"
#include "protocol/sender.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

constexpr std::size_t kOpenBytesWithoutRanges = 4 + 1 + 1 + 16 + 8 + 8 + (4 + 1) + (4 + 1) + 4 + 4 + 8;

protocol::Envelope open_with(std::size_t num_ranges) {
  protocol::Open open{1, "k", Bytes(1), {{}}};
  for (std::uint32_t i = 0; i < num_ranges; ++i) open.wanted[0].push_back({2 * i, 2 * i + 1});
  return {{}, 0, std::move(open)};
}

Offer an_offer() {
  Offer offer;
  offer.engine.bytes.fill(1);
  offer.session.bytes.fill(2);
  offer.transport = "fake";
  offer.slot_bytes = 400;
  offer.num_slots = 8;
  return offer;
}

Answer an_answer() {
  Answer answer;
  answer.session.bytes.fill(2);
  return answer;
}

/// A P with one plane, one session and room for `max_claims` of its claims.
struct P {
  explicit P(std::size_t max_claims) : sender(cache, {}, max_claims) { join(session); }
  void join(const SessionId& id) { sender.open_session(id, 64); }
  void hear(const SessionId& from, const protocol::Body& body) { sender.on_message(from, body, 0, out); }
  void intend(TransferId transfer, const std::string& key) { hear(session, protocol::Intent{transfer, key}); }
  [[nodiscard]] bool breached() const { return !out.breaches.empty(); }

  Cache cache{{Group{16, {Plane{nullptr, 8, 1, 1, 64, 64, 0, 0, "p", 0}}}}, {}};
  protocol::Sender sender;
  protocol::Actions out;
  SessionId session;
};

std::uint64_t num_open(Node& node) {
  return node.core->stats().sessions_opened - node.core->stats().sessions_ended;
}

}  // namespace

// --- bytes

TEST(a_message_of_more_than_16_KiB_is_refused) {
  const std::size_t most = (protocol::kMaxMessageBytes - kOpenBytesWithoutRanges) / 8;
  const Bytes fits = encode(open_with(most));
  CHECK(fits.size() <= protocol::kMaxMessageBytes);
  CHECK(protocol::decode(fits).ok());
  const Bytes larger = encode(open_with(most + 1));
  CHECK(larger.size() > protocol::kMaxMessageBytes);
  CHECK(!protocol::decode(larger).ok());
}

TEST(a_longer_key_or_digest_is_refused) {
  using protocol::decode;
  const auto intent = [](std::size_t size) {
    return encode(protocol::Envelope{{}, 0, protocol::Intent{1, std::string(size, 'k')}});
  };
  CHECK(decode(intent(protocol::kMaxKeyBytes)).ok());
  CHECK(!decode(intent(protocol::kMaxKeyBytes + 1)).ok());
  const auto open = [](std::size_t size) {
    return encode(protocol::Envelope{{}, 0, protocol::Open{1, "k", Bytes(size), {}}});
  };
  CHECK(decode(open(protocol::kMaxDigestBytes)).ok());
  CHECK(!decode(open(protocol::kMaxDigestBytes + 1)).ok());
}

TEST(an_offer_or_answer_of_more_than_4_MiB_is_refused) {
  Offer offer = an_offer();
  for (std::size_t i = 0; encode(offer).size() <= kMaxHandshakeBytes; ++i) {
    CHECK(decode_offer(encode(offer)).ok());
    for (std::size_t j = 0; j < 16; ++j) {
      offer.identity[std::to_string(100 * i + j)] = std::string(65536, 'v');
    }
  }
  CHECK(!decode_offer(encode(offer)).ok());

  Answer answer = an_answer();
  answer.description = Bytes(std::size_t{1} << 20U);
  CHECK(decode_answer(encode(answer)).ok());
  answer.description.push_back({});
  CHECK(!decode_answer(encode(answer)).ok());
}

TEST(longer_fields_and_lists_of_the_handshake_are_refused) {
  Offer offer = an_offer();
  offer.transport.assign(65537, 't');
  CHECK(!decode_offer(encode(offer)).ok());
  offer = an_offer();
  offer.description = Bytes((std::size_t{1} << 20U) + 1);
  CHECK(!decode_offer(encode(offer)).ok());

  Answer answer = an_answer();
  answer.quiet_sessions.resize(kMaxQuietSessions);
  CHECK(decode_answer(encode(answer)).ok());
  answer.quiet_sessions.emplace_back();
  CHECK(!decode_answer(encode(answer)).ok());
}

TEST(the_fields_of_an_offer_are_sorted_and_unique) {
  Offer offer = an_offer();
  offer.identity = {{"a", "1"}, {"b", "2"}};
  for (const char name : {'a', 'c'}) {
    Bytes bytes = encode(offer);
    // "b" becomes the first field again; "a" one that belongs behind it.
    const std::byte old{name == 'a' ? std::uint8_t{'b'} : std::uint8_t{'a'}};
    const std::byte length[] = {std::byte{1}, {}, {}, {}, old};
    const auto at = std::search(bytes.begin(), bytes.end(), std::begin(length), std::end(length));
    if (!CHECK(at != bytes.end())) return;
    at[4] = static_cast<std::byte>(name);
    ByteWriter sealed;
    sealed.put_raw(ByteView(bytes).first(bytes.size() - 8));
    sealed.put(fnv1a(sealed.bytes()));
    CHECK(!decode_offer(sealed.bytes()).ok());
  }
}

// --- sessions

TEST(a_landing_of_more_slots_than_4096_is_refused) {
  World world;
  Node& p = world.add();
  Offer offer = an_offer();
  offer.identity = p.cache.identity();
  for (const std::uint32_t num_slots : {0U, kMaxSlots + 1, UINT32_MAX}) {
    offer.num_slots = num_slots;
    const auto answer = p.core->answer(encode(offer), world.now);
    CHECK_EQ(answer.status().code(), Code::kHandshake);
    CHECK(answer.status().message().find("1 to 4096 are allowed") != std::string::npos);
  }
}

TEST(max_sessions_holds_on_both_sides) {
  World world;
  CoreConfig config = small_config();
  config.max_sessions = 2;
  Node& p = world.add({{}}, config);
  Node* first = nullptr;
  for (int i = 0; i < 2; ++i) {
    Node& d = world.add();
    if (first == nullptr) first = &d;
    world.connect(d, p);
  }
  Node& late = world.add();
  const auto offer = late.core->offer(world.now);
  const auto answer = p.core->answer(offer.value(), world.now);
  CHECK_EQ(answer.status().code(), Code::kExhausted);
  CHECK(answer.status().message().find("max_sessions (2)") != std::string::npos);
  CHECK_EQ(p.core->offer(world.now).status().code(), Code::kExhausted);

  // Those that are open are not harmed, and one that leaves makes room.
  world.run_for(3'000);
  CHECK_EQ(num_open(p), 2U);
  first->core->shut_down(world.now);
  CHECK(world.run_until([&] { return p.core->answer(offer.value(), world.now).ok(); }));
}

TEST(one_engine_holds_eight_sessions_at_a_peer) {
  World world;
  Node& p = world.add();
  Node& d = world.add();
  std::vector<SessionId> sessions;
  for (std::size_t i = 0; i < kMaxLandingsPerPeer; ++i) sessions.push_back(world.connect(d, p));
  world.run_for(3'000);
  const auto offer = d.core->offer(world.now);
  const auto answer = p.core->answer(offer.value(), world.now);
  CHECK_EQ(answer.status().code(), Code::kExhausted);
  CHECK(answer.status().message().find("has 8 sessions here") != std::string::npos);
  CHECK_EQ(num_open(p), kMaxLandingsPerPeer);

  // Another engine is none of its business; and one of the eight that goes makes room.
  Node& other = world.add();
  world.connect(other, p);
  CHECK(d.core->disconnect(sessions[0], world.now).ok());
  CHECK(world.run_until([&] { return p.core->answer(offer.value(), world.now).ok(); }));
}

TEST(a_landing_that_was_never_used_gives_way) {
  World world;
  Node& p = world.add();
  Node& d = world.add();
  const SessionId used = world.connect(d, p);
  world.run_for(3'000);
  std::vector<Bytes> offers;
  for (std::size_t i = 0; i < kMaxLandingsPerPeer; ++i) {
    offers.push_back(d.core->offer(world.now).value());
    CHECK(p.core->answer(offers.back(), world.now).ok());
    world.step();
  }
  CHECK_EQ(num_open(p), kMaxLandingsPerPeer);
  CHECK(p.core->answer(offers.back(), world.now).ok());
  CHECK(p.lost.size() == 1 && p.lost[0] != used);
  CHECK(d.lost.empty());
}

// --- claims

TEST(a_session_with_more_claims_than_allowed_breaches) {
  P p(3);
  for (TransferId transfer = 1; transfer <= 3; ++transfer) p.intend(transfer, "k" + std::to_string(transfer));
  // Each that ends makes room, and another session has room of its own.
  p.hear(p.session, protocol::Cancel{2});
  p.intend(4, "k4");
  SessionId other;
  other.bytes.fill(9);
  p.join(other);
  p.hear(other, protocol::Intent{1, "k1"});
  CHECK(!p.breached());
  p.hear(p.session, protocol::Open{5, "k5", Bytes(1), {{}}});
  if (!CHECK_EQ(p.out.breaches.size(), 1U)) return;
  CHECK(p.out.breaches[0].first == p.session);
  CHECK_EQ(p.out.breaches[0].second, "more than 3 claims at a time");
  CHECK_EQ(p.sender.num_claims(), 4U);
}

TEST(the_engine_closes_a_session_with_too_many_claims) {
  World world;
  CoreConfig config = small_config();
  config.max_claims = 2;
  Node& p = world.add({{}}, config);
  Node& d = world.add();
  const SessionId session = world.connect(d, p);
  const SessionId other = world.connect(world.add(), p);
  for (int i = 0; i < 3; ++i) d.expect(session, "k" + std::to_string(i));
  CHECK(world.run_until([&] { return !p.lost.empty() && !d.lost.empty(); }));
  CHECK(p.lost == std::vector{session});
  CHECK(p.lost[0] != other);
  CHECK_EQ(p.fresh.back().status, FailCode::kBreach);
}

TEST(more_claims_of_one_key_than_allowed_fail) {
  P p(2 * protocol::kMaxClaimsPerKey);
  TransferId transfer = 1;
  for (; transfer <= protocol::kMaxClaimsPerKey; ++transfer) p.intend(transfer, "k");
  CHECK(p.out.messages.empty());
  p.intend(transfer, "k");
  if (!CHECK_EQ(p.out.messages.size(), 1U)) return;
  const auto& fail = std::get<protocol::Fail>(p.out.messages[0].second);
  CHECK_EQ(fail.transfer, transfer);
  CHECK_EQ(fail.code, FailCode::kTaken);
  // What D sends before it reads that is no breach.
  p.hear(p.session, protocol::Open{transfer, "k", Bytes(1), {{}}});
  p.hear(p.session, protocol::Cancel{transfer});
  CHECK(!p.breached());
  CHECK_EQ(p.sender.num_claims(), protocol::kMaxClaimsPerKey);
}

TEST(cancelled_keys_are_remembered_up_to_a_limit) {
  P p(3);
  for (TransferId transfer = 1; transfer <= 100; ++transfer) {
    p.intend(transfer, "k" + std::to_string(transfer));
    p.hear(p.session, protocol::Cancel{transfer});
  }
  CHECK(!p.breached());
  CHECK_EQ(p.sender.num_keys(), 3U);
  CHECK_EQ(p.sender.num_claims(), 0U);
  // The first three are known, and their pushes end at once; they leave room for others.
  p.sender.push(1, "k2", Bytes(1), 0, p.out);
  CHECK_EQ(p.out.events.size(), 1U);
  p.sender.push(2, "k100", Bytes(1), 0, p.out);
  CHECK_EQ(p.out.events.size(), 1U);
  p.intend(101, "k101");
  p.hear(p.session, protocol::Cancel{101});
  p.sender.push(3, "k101", Bytes(1), 0, p.out);
  CHECK_EQ(p.out.events.size(), 2U);
}
