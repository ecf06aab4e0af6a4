// Calls that wait for a fence: nothing before it, the order kept, and every way to end while one waits.
#include <numeric>

#include "core_world.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

constexpr std::uint64_t kEvent = 7;
constexpr std::uint64_t kLater = 8;

struct Pair {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  SessionId session = world.connect(d, p);

  /// Positions [begin, end) of a prompt in P's blocks of the same ids.
  BlockTable prompt(std::int32_t begin, std::int32_t end, std::uint64_t prompt = 1) {
    BlockTable ids(1);
    for (std::int32_t pos = begin; pos < end; ++pos) {
      p.write(0, pos, prompt, static_cast<std::uint32_t>(pos));
      ids[0].push_back(pos);
    }
    return ids;
  }
  [[nodiscard]] bool arrived(const BlockTable& to, std::uint64_t prompt = 1) const {
    bool same = true;
    for (std::uint32_t pos = 0; pos < to[0].size(); ++pos) same &= d.holds(0, to[0][pos], prompt, pos);
    return same;
  }
  std::uint64_t sent() { return p.core->stats().boxes_sent; }
};

BlockTable to_blocks(std::int32_t num) {
  BlockTable to(1, std::vector<std::int32_t>(static_cast<std::size_t>(num)));
  std::iota(to[0].begin(), to[0].end(), 20);
  return to;
}

}  // namespace

TEST(no_box_leaves_before_the_fence) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const BlockTable to = to_blocks(8);
  const HandleId receive = d.receive(session, "k", 1, to).first;
  world.run_for(2000);
  BlockTable ids = pair.prompt(0, 8);
  for (const std::int32_t block : ids[0]) p.wipe(0, block);
  p.advance(push, ids, kEvent);
  p.finish(push);
  world.run_for(5000);
  CHECK_EQ(pair.sent(), 0U);
  CHECK_EQ(p.end_of(push), "");
  CHECK(p.core->fenced() && p.core->open());
  (void)pair.prompt(0, 8);  // the forward writes them, then the event happens
  p.packer->pass(kEvent);
  CHECK(world.run_until([&] { return !d.end_of(receive).empty(); }));
  CHECK_EQ(d.end_of(receive), "received");
  CHECK_EQ(p.end_of(push), "sent");
  CHECK(pair.arrived(to));
  CHECK(!p.core->fenced());
  CHECK_EQ(p.packer->num_fences(), 0U);
}

TEST(the_calls_of_one_push_keep_their_order_and_pushes_do_not_wait_for_each_other) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const HandleId other = p.push("other", 2);
  const BlockTable to = to_blocks(8);
  const HandleId receive = d.receive(session, "k", 1, to).first;
  const HandleId second = d.receive(session, "other", 2, {{40, 41}}).first;
  p.advance(push, pair.prompt(0, 2), kEvent);
  p.advance(push, pair.prompt(2, 4));  // ready, but behind the first
  p.advance(push, pair.prompt(4, 8), kLater);
  p.finish(push);
  p.write(0, 10, 2, 0);
  p.write(0, 11, 2, 1);
  p.advance(other, {{10, 11}});
  p.finish(other);
  CHECK(world.run_until([&] { return d.end_of(second) == "received" && p.end_of(other) == "sent"; }));
  const std::uint64_t before = pair.sent();
  p.packer->pass(kLater);  // before the first: nothing may overtake it
  world.run_for(5000);
  CHECK_EQ(pair.sent(), before);
  p.packer->pass(kEvent);
  CHECK(world.run_until([&] { return d.end_of(receive) == "received" && p.end_of(push) == "sent"; }));
  CHECK(pair.arrived(to));
}

TEST(an_event_is_what_it_stood_for_at_the_call) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const BlockTable to = to_blocks(4);
  const HandleId receive = d.receive(session, "k", 1, to).first;
  p.advance(push, pair.prompt(0, 2), kEvent);
  p.packer->pass(kEvent);
  p.advance(push, pair.prompt(2, 4), kEvent);  // recorded anew: this has not happened
  p.finish(push);
  world.run_for(5000);
  CHECK_EQ(p.packer->num_fences(), 1U);
  CHECK_EQ(p.end_of(push), "");
  p.packer->pass(kEvent);
  CHECK(world.run_until([&] { return d.end_of(receive) == "received"; }));
  CHECK(pair.arrived(to));
}

TEST(retract_drops_what_waits_and_does_not_wait_for_it) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const BlockTable to = to_blocks(8);
  const HandleId receive = d.receive(session, "k", 1, to).first;
  p.advance(push, pair.prompt(0, 3));
  world.run_for(2000);
  p.advance(push, pair.prompt(3, 6), kEvent);
  p.advance(push, pair.prompt(6, 8), kLater);
  p.finish(push);
  world.run_for(2000);
  p.core->gate().retract(push);
  // At once: no turn lies between, and no fence has passed.
  CHECK(p.core->sender().quiescent(push));
  const auto positions = p.core->sender().resume(push);
  CHECK_EQ(positions.size(), 1U);
  CHECK(positions[0] <= 3);
  CHECK_EQ(p.packer->num_fences(), 0U);
  for (std::int32_t block = 0; block < 8; ++block) p.wipe(0, block);
  world.run_for(5000);
  CHECK_EQ(d.end_of(receive), "");
  p.advance(push, pair.prompt(static_cast<std::int32_t>(positions[0]), 8), kEvent);
  p.finish(push);
  p.packer->pass(kEvent);
  CHECK(world.run_until([&] { return d.end_of(receive) == "received" && p.end_of(push) == "sent"; }));
  CHECK(pair.arrived(to));
}

TEST(abort_drops_what_waits) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const HandleId receive = d.receive(session, "k", 1, to_blocks(4)).first;
  p.advance(push, pair.prompt(0, 4), kEvent);
  p.finish(push);
  world.run_for(1000);
  p.abort(push);
  CHECK_EQ(p.packer->num_fences(), 0U);
  CHECK(world.run_until([&] { return d.end_of(receive) == "aborted" && p.end_of(push) == "aborted"; }));
  CHECK(!p.core->open());
}

TEST(a_push_that_its_peer_ended_ignores_what_waited) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const auto [receive, transfer] = d.receive(session, "k", 1, to_blocks(4));
  p.advance(push, pair.prompt(0, 4), kEvent);
  p.finish(push);
  world.run_for(1000);
  d.cancel(transfer);
  CHECK(world.run_until([&] { return p.end_of(push) == "cancelled" && d.end_of(receive) == "cancelled"; }));
  p.packer->pass(kEvent);
  world.run_for(2000);
  CHECK_EQ(p.end_of(push), "cancelled");
  CHECK_EQ(pair.sent(), 0U);
  CHECK(!p.core->open());
}

TEST(a_receive_waits_for_its_fence_and_claims_its_key_meanwhile) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  p.advance(push, pair.prompt(0, 4));
  p.finish(push);
  const BlockTable to = to_blocks(4);
  const HandleId receive = d.receive(session, "k", 1, to, {}, 0, kEvent).first;
  // A later one of the same session must not make P take the first for an old one.
  const HandleId later = p.push("later", 2);
  p.write(0, 10, 2, 0);
  p.advance(later, {{10}});
  p.finish(later);
  const HandleId second = d.receive(session, "later", 2, {{50}}).first;
  CHECK(world.run_until([&] { return d.end_of(second) == "received"; }));
  // Longer than P keeps a push that nobody claims.
  world.run_for(small_config().timeouts.unclaimed_us + 5000);
  CHECK_EQ(p.end_of(push), "");
  for (const std::int32_t block : to[0]) CHECK(d.is_wiped(0, block));
  d.packer->pass(kEvent);
  CHECK(world.run_until([&] { return d.end_of(receive) == "received" && p.end_of(push) == "sent"; }));
  CHECK(pair.arrived(to));
  CHECK(!d.core->open());
}

TEST(a_receive_that_waits_can_be_cancelled) {
  for (const bool claimed : {false, true}) {
    Pair pair;
    auto& [world, d, p, session] = pair;
    const HandleId push = p.push("k", 1);
    p.advance(push, pair.prompt(0, 4));
    p.finish(push);
    const TransferId claim = claimed ? d.expect(session, "k") : 0;
    world.run_for(1000);
    const BlockTable to = to_blocks(4);
    const auto [receive, transfer] = d.receive(session, "k", 1, to, {}, claim, kEvent);
    world.run_for(1000);
    d.cancel(transfer);
    CHECK_EQ(d.packer->num_fences(), 0U);
    d.turn(world.now);
    CHECK_EQ(d.end_of(receive), "cancelled");
    CHECK(world.run_until([&] { return p.end_of(push) == "cancelled"; }));
    for (const std::int32_t block : to[0]) CHECK(d.is_wiped(0, block));
    CHECK(!d.core->open());
  }
}

TEST(a_receive_that_waits_ends_with_its_session) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId receive = d.receive(session, "k", 1, to_blocks(4), {}, 0, kEvent).first;
  const TransferId claim = d.expect(session, "c");
  const HandleId of_claim = d.receive(session, "c", 1, {{40}}, {}, claim, kEvent).first;
  world.run_for(1000);
  CHECK(p.core->disconnect(session, world.now).ok());
  CHECK(world.run_until([&] { return d.end_of(receive) == "peer_closed" && !d.end_of(of_claim).empty(); }));
  CHECK_EQ(d.end_of(of_claim), "peer_closed");
  CHECK_EQ(d.packer->num_fences(), 0U);
  // The session is gone when the call comes: it fails at once.
  const HandleId late = d.receive(session, "k", 1, to_blocks(4), {}, 0, kLater).first;
  d.turn(world.now);
  CHECK_EQ(d.end_of(late), "peer_lost");
  CHECK_EQ(d.packer->num_fences(), 0U);
  d.packer->pass(kEvent);
  world.run_for(1000);
  CHECK_EQ(d.end_of(receive), "peer_closed");
  CHECK(!d.core->open());
}

TEST(a_second_receive_of_a_claim_that_waits_is_refused_and_both_end) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const TransferId claim = d.expect(session, "k");
  const HandleId first = d.receive(session, "k", 1, {{20}}, {}, claim, kEvent).first;
  const HandleId second = d.receive(session, "k", 1, {{21}}, {}, claim, kEvent).first;
  d.packer->pass(kEvent);
  world.run_for(1000);
  CHECK_EQ(d.end_of(second), "cancelled");
  CHECK_EQ(d.end_of(first), "");
  d.cancel(claim);
  world.run_for(1000);
  CHECK_EQ(d.end_of(first), "cancelled");
}

TEST(closing_waits_for_no_fence) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  const HandleId receive = d.receive(session, "other", 1, to_blocks(4), {}, 0, kEvent).first;
  p.advance(push, pair.prompt(0, 4), kEvent);
  p.finish(push);
  world.run_for(1000);
  for (Node* node : {&p, &d}) {
    node->core->shut_down(world.now);
    node->turn(world.now);
    CHECK_EQ(node->packer->num_fences(), 0U);
    CHECK(!node->core->open() && node->core->quiet());
  }
  CHECK_EQ(p.end_of(push), "engine_closed");
  CHECK_EQ(d.end_of(receive), "engine_closed");
}

TEST(a_fence_is_asked_for_once_a_turn_and_only_the_first_of_a_push) {
  Pair pair;
  auto& [world, d, p, session] = pair;
  const HandleId push = p.push("k", 1);
  for (std::int32_t i = 0; i < 10; ++i) p.advance(push, pair.prompt(i, i + 1), kEvent);
  const std::size_t before = p.packer->num_asked;
  p.turn(world.now);
  CHECK_EQ(p.packer->num_asked, before + 1);
  p.abort(push);
}
