// The measurement of a session's path before its first box.
#include <algorithm>
#include <string>

#include "core_world.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

CoreConfig measuring(std::uint64_t min_link_bytes_per_s, std::uint32_t num_slots = 8) {
  CoreConfig config = small_config();
  config.min_link_bytes_per_s = min_link_bytes_per_s;
  config.num_slots = num_slots;
  return config;
}

// Pushes 20 blocks from P to D; how it ended on D.
std::string serve(World& world, Node& d, Node& p, const SessionId& session, const std::string& key) {
  const HandleId push = p.push(key, 1);
  const HandleId receive = d.receive(session, key, 1, {{1, 2, 3, 4}}).first;
  p.advance(push, {{5, 6, 7, 8}});
  p.finish(push);
  world.run_until([&] { return !d.end_of(receive).empty(); });
  return d.end_of(receive);
}

TEST(a_link_is_measured_once_and_a_slow_one_is_counted) {
  struct Case {
    std::uint64_t floor;
    bool mapped;
    std::uint32_t num_slots;
    bool measured;
    bool slow;
  };
  // 400 bytes in one step of the world.
  for (const Case& one :
       {Case{0, false, 8, false, false}, Case{1, false, 8, true, false}, Case{1, false, 1, true, false},
        Case{1'000'000'000'000, false, 8, true, true}, Case{1'000'000'000'000, true, 8, false, false}}) {
    World world;
    world.net.mapped = one.mapped;
    Node& d = world.add({{}}, measuring(0, one.num_slots));
    Node& p = world.add({{}}, measuring(one.floor));
    const SessionId session = world.connect(d, p);
    world.run_for(20 * world.step_us);
    Stats stats = p.core->stats();
    const auto expected = static_cast<std::uint64_t>(400.0 * 1e6 / static_cast<double>(world.step_us));
    CHECK_EQ(stats.link_bytes_per_s, one.measured ? expected : 0U);
    CHECK_EQ(stats.slow_links, one.slow ? 1U : 0U);
    CHECK_EQ(stats.leases_in_use, 0U);
    CHECK_EQ(stats.credits, one.num_slots);

    CHECK_EQ(serve(world, d, p, session, "k"), "received");
    world.run_for(20 * world.step_us);
    stats = p.core->stats();
    // Probes are no traffic of anybody.
    CHECK_EQ(stats.network_ops, stats.boxes_sent);
    CHECK_EQ(d.core->stats().boxes_received, stats.boxes_sent);
    CHECK_EQ(d.core->stats().boxes_discarded, 0U);
    CHECK_EQ(stats.slow_links, one.slow ? 1U : 0U);
    CHECK_EQ(stats.credits, one.num_slots);
  }
}

TEST(a_push_that_is_there_already_waits_for_the_measurement_and_is_served) {
  World world;
  Node& d = world.add({{}}, measuring(0));
  Node& p = world.add({{}}, measuring(1));
  const HandleId push = p.push("k", 1);
  p.advance(push, {{5, 6, 7, 8}});
  p.finish(push);
  const SessionId session = world.connect(d, p);
  const HandleId receive = d.receive(session, "k", 1, {{1, 2, 3, 4}}).first;
  CHECK(world.run_until([&] { return d.end_of(receive) == "received"; }));
  CHECK(p.core->stats().link_bytes_per_s > 0);
}

TEST(a_measurement_carries_no_kv) {
  World world;
  Node& d = world.add({{}}, measuring(0));
  Node& p = world.add({{}}, measuring(1));
  for (std::int32_t block = 0; block < 64; ++block) p.write(0, block, 1, static_cast<std::uint32_t>(block));
  const SessionId first = world.connect(d, p);
  CHECK_EQ(serve(world, d, p, first, "k"), "received");
  // The staging memory now holds KV; the next session's D must not get it.
  Node& other = world.add({{}}, measuring(0));
  const SessionId second = world.connect(other, p);
  world.run_for(20 * world.step_us);
  const Region landing = other.end.landing(second);
  CHECK(std::all_of(landing.data, landing.data + landing.size_bytes,
                    [](std::byte b) { return b == std::byte{0}; }));
}

TEST(a_lease_that_cannot_be_zeroed_is_not_sent_and_the_session_serves) {
  World world;
  Node& d = world.add({{}}, measuring(0));
  Node& p = world.add({{}}, measuring(1));
  p.end.clear_fails = true;
  const SessionId session = world.connect(d, p);
  world.run_for(20 * world.step_us);
  CHECK_EQ(p.core->stats().link_bytes_per_s, 0U);
  CHECK_EQ(p.core->stats().leases_in_use, 0U);
  CHECK_EQ(serve(world, d, p, session, "k"), "received");
}

TEST(a_measurement_that_fails_ends_the_session_and_keeps_its_lease_apart) {
  for (const Fate fate : {Fate::kFailed, Fate::kUnknown}) {
    for (const int which : {1, 2, 3, 4}) {
      World world;
      Node& d = world.add({{}}, measuring(0));
      Node& p = world.add({{}}, measuring(1));
      int num_posts = 0;
      world.net.fate = [&](TicketId) { return ++num_posts == which ? fate : Fate::kCompleted; };
      const SessionId session = world.connect(d, p);
      CHECK(world.run_until([&] { return !p.lost.empty() && !d.lost.empty(); }, 40'000));
      CHECK_EQ(p.core->stats().leases_in_use, 0U);
      CHECK_EQ(p.core->stats().quarantined_bytes, fate == Fate::kUnknown ? 400U : 0U);
      CHECK(p.lost == std::vector<SessionId>{session});
    }
  }
}

TEST(a_session_that_ends_between_the_posts_gives_its_lease_back) {
  for (TimeUs steps = 1; steps < 12; ++steps) {
    World world;
    Node& d = world.add({{}}, measuring(0));
    Node& p = world.add({{}}, measuring(1));
    const SessionId session = world.connect(d, p);
    world.run_for(steps * world.step_us);
    CHECK(d.core->disconnect(session, world.now).ok());
    CHECK(world.run_until([&] { return !p.lost.empty(); }, 40'000));
    world.run_for(2000);
    CHECK_EQ(p.core->stats().leases_in_use, 0U);
  }
}

}  // namespace
