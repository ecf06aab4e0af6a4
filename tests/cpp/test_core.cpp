// Whole engines without threads: data, sessions, budgets. Loss and failing posts: test_core_loss.cpp.
#include <algorithm>
#include <numeric>
#include <random>

#include "core_world.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

std::vector<std::int32_t> shuffled(std::size_t num, std::size_t of, std::uint64_t seed) {
  std::vector<std::int32_t> ids(of);
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937_64 random(seed);
  if (seed != 0) std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(num);
  return ids;
}

/// One prompt of `num` positions per group; D wants all but the first `first`. Returns the network
/// operations.
std::uint64_t transfer(World& world, Node& d, Node& p, const SessionId& session,
                       const std::vector<std::size_t>& num, std::uint32_t first, std::uint64_t seed,
                       std::size_t piece) {
  static std::uint64_t prompt = 0;
  ++prompt;
  const std::string key = "k" + std::to_string(prompt);
  const std::uint64_t ops_before = p.core->stats().network_ops;
  BlockTable from;
  BlockTable to;
  std::vector<std::uint32_t> firsts;
  for (std::size_t g = 0; g < num.size(); ++g) {
    const auto of = static_cast<std::size_t>(p.cache.groups[g].num_blocks());
    from.push_back(shuffled(num[g], of, seed));
    firsts.push_back(std::min(first, static_cast<std::uint32_t>(num[g])));
    to.push_back(shuffled(num[g] - firsts[g], of, seed == 0 ? 0 : seed + 1));
    for (std::size_t b = 0; b < of; ++b) {
      p.wipe(g, static_cast<std::int32_t>(b));
      d.wipe(g, static_cast<std::int32_t>(b));
    }
    for (std::uint32_t pos = 0; pos < num[g]; ++pos) p.write(g, from[g][pos], prompt, pos);
  }
  const HandleId push = p.push(key, prompt);
  const auto [receive, id] = d.receive(session, key, prompt, to, firsts);
  world.step();
  for (std::size_t at = 0, more = 1; more != 0; at += piece) {
    BlockTable part(num.size());
    more = 0;
    for (std::size_t g = 0; g < num.size(); ++g) {
      const auto begin = from[g].begin() + static_cast<std::ptrdiff_t>(std::min(at, num[g]));
      const auto end = from[g].begin() + static_cast<std::ptrdiff_t>(std::min(at + piece, num[g]));
      part[g].assign(begin, end);
      more += part[g].size();
    }
    p.advance(push, part);
    world.step();
  }
  p.finish(push);
  CHECK(world.run_until([&] { return !d.end_of(receive).empty() && !p.end_of(push).empty(); }));
  bool wants = false;
  for (const auto& ids : to) wants |= !ids.empty();
  CHECK_EQ(p.end_of(push), wants ? "sent" : "cancelled");
  CHECK_EQ(d.end_of(receive), "received");
  for (std::size_t g = 0; g < num.size(); ++g) {
    for (std::uint32_t pos = firsts[g]; pos < num[g]; ++pos)
      CHECK(d.holds(g, to[g][pos - firsts[g]], prompt, pos));
    for (std::int32_t block = 0; block < d.cache.groups[g].num_blocks(); ++block) {
      if (std::find(to[g].begin(), to[g].end(), block) == to[g].end()) CHECK(d.is_wiped(g, block));
    }
  }
  world.run_for(1000);
  return p.core->stats().network_ops - ops_before;
}

void expect_all_returned(const World& world, std::size_t credits) {
  std::uint64_t all_credits = 0;
  for (const auto& node : world.nodes) {
    const Stats stats = node->core->stats();
    CHECK_EQ(stats.open_pushes, 0U);
    CHECK_EQ(stats.open_claims, 0U);
    CHECK_EQ(stats.open_receives, 0U);
    CHECK_EQ(stats.leases_in_use, 0U);
    CHECK(node->core->quiet());
    all_credits += stats.credits;
  }
  CHECK_EQ(all_credits, credits);
}

}  // namespace

TEST(bytes_arrive_whatever_the_block_tables) {
  for (const bool mapped : {false, true}) {
    World world;
    world.net.mapped = mapped;
    const std::vector<GroupShape> shapes = {{5, 48, 40}, {1, 100, 64}, {12, 16, 30}};
    Node& d = world.add(shapes);
    Node& p = world.add(shapes);
    const SessionId session = world.connect(d, p);
    const std::uint64_t flat = transfer(world, d, p, session, {33, 64, 17}, 0, 0, 1000);
    CHECK(flat > 0);
    for (const std::uint64_t seed : {1U, 2U, 3U}) {
      CHECK_EQ(transfer(world, d, p, session, {33, 64, 17}, 0, seed, 1000), flat);
    }
    for (const std::size_t piece : {1U, 2U, 7U}) transfer(world, d, p, session, {33, 64, 17}, 0, 5, piece);
    for (std::uint32_t first = 0; first <= 33; ++first)
      transfer(world, d, p, session, {33, 20, 0}, first, 7, 1000);
    expect_all_returned(world, 8);
  }
}

TEST(holes) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  for (std::int32_t pos = 0; pos < 6; ++pos) p.write(0, 10 + pos, 1, static_cast<std::uint32_t>(pos));
  const HandleId push = p.push("k", 1);
  p.advance(push, {{10, -1, 12, 13, -1, 15}});
  p.finish(push);
  const auto [receive, id] = d.receive(session, "k", 1, {{-1, 40, -1, -1, 41}}, {1});
  CHECK(world.run_until([&] { return d.end_of(receive) == "received"; }));
  CHECK(d.holds(0, 40, 1, 2));
  CHECK(d.holds(0, 41, 1, 5));
  const HandleId second = p.push("l", 1);
  p.advance(second, {{10, -1, 12}});
  p.finish(second);
  const auto [lacking, id2] = d.receive(session, "l", 1, {{1, 2, 3}});
  CHECK(world.run_until([&] { return d.end_of(lacking) == "missing" && p.end_of(second) == "missing"; }));
  world.run_for(2000);
  expect_all_returned(world, 8);
}

TEST(many_transfers_through_eight_slots_are_served_in_turn) {
  World world;
  world.step_us = 20;
  const std::vector<GroupShape> shapes = {{4, 100, 2048}};
  Node& d = world.add(shapes);
  Node& p = world.add(shapes);
  const SessionId session = world.connect(d, p);
  constexpr int kNum = 256;
  std::vector<HandleId> receives;
  for (int i = 0; i < kNum; ++i) {
    const auto key = std::to_string(i);
    const auto prompt = static_cast<std::uint64_t>(i);
    std::vector<std::int32_t> from;
    std::vector<std::int32_t> to;
    for (int pos = 0; pos < 5; ++pos) {
      from.push_back(5 * i + pos);
      to.push_back(2047 - 5 * i - pos);
      p.write(0, from.back(), prompt, static_cast<std::uint32_t>(pos));
    }
    const HandleId push = p.push(key, prompt);
    p.advance(push, {from});
    p.finish(push);
    receives.push_back(d.receive(session, key, prompt, {to}).first);
  }
  std::vector<HandleId> order;
  CHECK(world.run_until([&] {
    for (const auto& event : std::exchange(d.fresh, {})) order.push_back(event.handle);
    return order.size() == kNum;
  }));
  CHECK(std::is_sorted(order.begin(), order.end()));  // equal sizes, first come first served
  for (int i = 0; i < kNum; ++i) {
    for (int pos = 0; pos < 5; ++pos) {
      CHECK(d.holds(0, 2047 - 5 * i - pos, static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(pos)));
    }
  }
  world.run_for(2000);
  expect_all_returned(world, 8);
}

TEST(test_case_c6_ids_beyond_32_bits) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  d.next_transfer = d.next_handle = p.next_handle = UINT32_MAX - 3;
  std::vector<std::pair<HandleId, HandleId>> handles;
  for (std::int32_t i = 0; i < 8; ++i) {
    const std::string key = std::to_string(i);
    const auto prompt = static_cast<std::uint64_t>(i);
    p.write(0, i, prompt, 0);
    const HandleId push = p.push(key, prompt);
    p.advance(push, {{i}});
    p.finish(push);
    handles.emplace_back(push, d.receive(session, key, prompt, {{63 - i}}).first);
  }
  world.run_for(5000);
  for (std::int32_t i = 0; i < 8; ++i) {
    CHECK_EQ(p.end_of(handles[static_cast<std::size_t>(i)].first), "sent");
    CHECK_EQ(d.end_of(handles[static_cast<std::size_t>(i)].second), "received");
    CHECK(d.holds(0, 63 - i, static_cast<std::uint64_t>(i), 0));
  }
  expect_all_returned(world, 8);
}

TEST(test_case_f15_a_queue_without_credits_is_no_work) {
  constexpr int kNum = 800;  // 100 times the credits
  World world;
  // The last in line wait longer than progress_timeout: on P the boxes of the others count.
  CoreConfig patient = small_config();
  patient.timeouts.progress_us *= 10;
  Node& d = world.add({{2, 48, kNum}}, patient);
  Node& p = world.add({{2, 48, kNum}});
  const SessionId session = world.connect(d, p);
  std::vector<HandleId> receives;
  for (int i = 0; i < kNum; ++i) {
    p.write(0, i, 1, 0);
    const HandleId push = p.push(std::to_string(i), 1);
    p.advance(push, {{i}});
    p.finish(push);
    receives.push_back(d.receive(session, std::to_string(i), 1, {{i}}).first);
  }
  d.turn(world.now);  // and D stands still
  while (p.turn(world.now)) {
  }
  CHECK_EQ(p.core->stats().boxes_sent, 8U);
  CHECK_EQ(p.core->stats().credits, 0U);
  // The progress thread's rule: again at once after progress, else at the next deadline.
  const TimeUs peer_us = small_config().timeouts.peer_us;
  const TimeUs until = world.now + peer_us * 9 / 10;
  int num_turns = 0;
  while (world.now < until && ++num_turns < 1000) {
    if (!p.turn(world.now)) world.now = p.core->next_deadline();
  }
  CHECK(num_turns <= 3 * 10);  // PINGs, ten per peer_timeout
  CHECK(!p.core->busy(world.now));
  CHECK_EQ(p.core->stats().boxes_sent, 8U);

  std::vector<HandleId> order;
  CHECK(world.run_until([&] {
    for (const auto& event : std::exchange(d.fresh, {})) order.push_back(event.handle);
    return order.size() == kNum;
  }));
  CHECK(order == receives);
  CHECK(d.lost.empty() && p.lost.empty());
}

TEST(peers_do_not_wait_for_each_other) {
  // D2 never returns a credit; D1 gets its data from the same P all the same.
  World world;
  const std::vector<GroupShape> shapes = {{4, 100, 256}};
  Node& d1 = world.add(shapes);
  Node& d2 = world.add(shapes, small_config(), true);
  Node& p = world.add(shapes);
  const SessionId to1 = world.connect(d1, p);
  const SessionId to2 = world.connect(d2, p);
  d2.lazy_packer->held = true;
  std::vector<std::int32_t> ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  for (const char* key : {"1", "2"}) {
    const HandleId push = p.push(key, 1);
    p.advance(push, {ids});
    p.finish(push);
  }
  const auto slow = d2.receive(to2, "2", 1, {ids}).first;
  const auto fast = d1.receive(to1, "1", 1, {ids}).first;
  CHECK(world.run_until([&] { return d1.end_of(fast) == "received"; }, 20'000));
  CHECK_EQ(d2.end_of(slow), "");
  CHECK_EQ(p.core->stats().leases_in_use, 0U);
}

TEST(hand_shake_errors) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const auto says = [](const auto& result, const std::string& text) {
    CHECK(!result.ok());
    if (result.status().message().find(text) == std::string::npos)
      check::fail(__FILE__, __LINE__, result.status().message());
    return result.status().code() == Code::kHandshake;
  };
  const Bytes offer = d.core->offer(world.now).value();
  CHECK(says(d.core->answer(offer, world.now), "own"));
  Node& other = world.add({{3, 48, 64}});
  CHECK(says(other.core->answer(offer, world.now), "num_planes: theirs 2, ours 3"));
  CHECK(says(p.core->answer(Bytes(100), world.now), "not an offer"));
  CHECK(says(p.core->answer(Bytes(3), world.now), "not an offer"));
  Bytes version = offer;
  version[4] = std::byte{9};
  CHECK(says(p.core->answer(version, world.now), "theirs 9, ours 1"));
  Bytes damaged = offer;
  damaged[60] ^= std::byte{1};
  CHECK(says(p.core->answer(damaged, world.now), "hash"));
  world.net.name = "else";
  CHECK(says(p.core->answer(offer, world.now), "transport: theirs fake, ours else"));
  world.net.name = "fake";

  const Bytes answer = p.core->answer(offer, world.now).value();
  CHECK(p.core->answer(offer, world.now).value() == answer);
  CHECK(says(other.core->establish(answer, world.now), "did not make"));
  CHECK(says(d.core->establish(offer, world.now), "not an answer"));
  CHECK(d.core->establish(answer, world.now).ok());
  CHECK(says(d.core->establish(answer, world.now), "answered before"));

  // Late: both ends give up, and D's landing is freed.
  const Bytes late = d.core->offer(world.now).value();
  const Bytes late_answer = p.core->answer(late, world.now).value();
  world.run_for(31'000);
  CHECK(says(d.core->establish(late_answer, world.now), "expired"));
  CHECK_EQ(p.core->stats().sessions, 1U);
  CHECK_EQ(d.core->stats().landing_bytes, 3200U);
  CHECK_EQ(d.core->stats().quarantined_bytes, 0U);

  d.end.fail_connect = true;
  const Bytes third = p.core->answer(d.core->offer(world.now).value(), world.now).value();
  const auto refused = d.core->establish(third, world.now);
  CHECK_EQ(refused.status().code(), Code::kTransport);
  world.run_for(31'000);
  CHECK_EQ(d.core->stats().sessions, 1U);
}

TEST(slots_and_cache_must_fit) {
  Node node(*std::make_unique<Net>(), {{1, 500, 4}}, small_config(), false, 0);
  const auto refused = [&](const CoreConfig& config, const char* text) {
    const Status status = Core::check(node.cache, config);
    CHECK_EQ(status.code(), Code::kInvalidArgument);
    CHECK(status.message().find(text) != std::string::npos);
  };
  refused(small_config(), "largest unit of the cache is 500");
  CoreConfig config = small_config();
  config.slot_bytes = 500;
  CHECK(Core::check(node.cache, config).ok());
  config.num_slots = 0;
  refused(config, "num_slots is 0");
  config = {};
  config.landing_bytes = 1000;
  refused(config, "landing_bytes is 1000");
}

TEST(the_landing_budget_ends_the_longest_idle_session) {
  World world;
  CoreConfig config = small_config();
  config.landing_bytes = 2 * 3200;
  Node& d = world.add({{}}, config);
  Node& p1 = world.add();
  Node& p2 = world.add();
  Node& p3 = world.add();
  const SessionId first = world.connect(d, p1);
  world.step();
  const SessionId second = world.connect(d, p2);
  world.step();
  const auto waiting = d.receive(first, "k", 1, {{1}}).first;  // makes the first one busy
  world.step();
  const SessionId third = world.connect(d, p3);
  world.run_for(1000);
  CHECK(d.lost == std::vector<SessionId>{second});
  CHECK(p2.lost == std::vector<SessionId>{second});
  CHECK(p1.lost.empty() && p3.lost.empty());
  const auto waiting3 = d.receive(third, "k", 1, {{2}}).first;
  world.step();
  const auto refused = d.core->offer(world.now);
  CHECK_EQ(refused.status().code(), Code::kExhausted);
  CHECK(world.run_until(
      [&] { return d.end_of(waiting) == "pairing_timeout" && d.end_of(waiting3) == "pairing_timeout"; }));
  CHECK(d.core->offer(world.now).ok());
  CHECK_EQ(d.core->disconnect(second, world.now).code(), Code::kPeerLost);
}

TEST(bye_fails_what_is_open) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  const HandleId push = p.push("k", 1);
  const auto receive = d.receive(session, "k", 1, {{1, 2}}).first;
  const HandleId unclaimed = p.push("l", 1);
  world.run_for(1000);
  CHECK(d.core->disconnect(session, world.now).ok());
  world.run_for(1000);
  CHECK_EQ(d.end_of(receive), "peer_closed");
  CHECK_EQ(p.end_of(push), "peer_closed");
  CHECK_EQ(p.end_of(unclaimed), "");
  CHECK_EQ(d.lost.size(), 1U);
  CHECK_EQ(p.lost.size(), 1U);
  const auto late = d.receive(session, "k", 1, {{1, 2}}).first;
  p.core->shut_down(world.now);
  world.step();
  CHECK_EQ(d.end_of(late), "peer_lost");
  CHECK_EQ(p.end_of(unclaimed), "engine_closed");
  expect_all_returned(world, 0);
  CHECK_EQ(d.core->stats().landing_bytes + d.core->stats().quarantined_bytes, 0U);
}

TEST(whoever_slept_judges_nobody) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  world.connect(d, p);
  world.run_for(5000);
  world.now += 100'000;  // both asleep
  world.run_for(20'000);
  CHECK(d.lost.empty() && p.lost.empty());
  for (int i = 0; i < 60; ++i) {  // only D turns: P's silence is P's
    world.now += world.step_us;
    d.turn(world.now);
  }
  CHECK_EQ(d.lost.size(), 1U);
}

// The transport is drained before any timeout is judged: what arrives in that very turn was in time.
TEST(test_case_f13_what_arrives_as_its_timeout_is_judged_is_in_time) {
  const protocol::Timeouts timeouts = small_config().timeouts;
  for (const std::string wait : {"for a push", "for a claim", "for a peer"}) {
    World world;
    Node& d = world.add();
    Node& p = world.add();
    const SessionId session = world.connect(d, p);
    world.run_for(5000);
    p.write(0, 5, 1, 0);
    HandleId push = 0;
    HandleId receive = 0;
    const auto push_all = [&] {
      push = p.push("k", 1);
      p.advance(push, {{5}});
      p.finish(push);
    };
    TimeUs judged = world.now;
    if (wait == "for a push") {
      receive = d.receive(session, "k", 1, {{1}}).first;
      judged += timeouts.pairing_us;
      world.run_for(timeouts.pairing_us - 1000);
      push_all();
      for (const TimeUs at : {judged - 2, judged - 1}) p.turn(at);
      d.turn(judged);
    } else if (wait == "for a claim") {
      push_all();
      judged += timeouts.unclaimed_us;
      world.run_for(timeouts.unclaimed_us - 1000);
      receive = d.receive(session, "k", 1, {{1}}).first;
      d.turn(judged - 1);
      p.turn(judged);
    } else {
      const auto pings = [&] { return p.core->stats().messages_sent; };
      const auto before = pings();
      CHECK(world.run_until([&] { return pings() != before; }));
      d.turn(world.now += world.step_us);  // hears it, the last for long
      judged = world.now + timeouts.peer_us;
      while (world.now < judged - 2000) d.turn(world.now += 1000);
      p.turn(judged - 1);
      d.turn(judged);
      push_all();
      receive = d.receive(session, "k", 1, {{1}}).first;
    }
    world.now = judged;
    world.run_for(3000);
    CHECK(d.lost.empty());
    if (!CHECK_EQ(d.end_of(receive), "received")) check::fail(__FILE__, __LINE__, wait);
    CHECK_EQ(p.end_of(push), "sent");
    CHECK(d.holds(0, 1, 1, 0));
  }
}
