// Whole engines without threads, when something is lost or fails: both sides end in bounded time.
#include <string>
#include <vector>

#include "core_world.hpp"
#include "protocol/messages.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

constexpr TimeUs kBound =
    40'000;  // peer_timeout, its PING, and some turns; peer_timeout once more for the other side
constexpr TimeUs kUnclaimed = 30'000;

std::string name_of_message(ByteView bytes) {
  const auto decoded = protocol::decode(bytes);
  return decoded.ok() ? std::string(protocol::name_of(decoded.value().body)) : "?";
}

struct Pushed {
  HandleId push = 0;
  HandleId receive = 0;
};

/// Intent, push, receive, all blocks, finish; nothing is waited for.
Pushed start(World& world, Node& d, Node& p, const SessionId& session, const std::string& key,
             std::int32_t num) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < num; ++i) {
    ids.push_back(i);
    p.write(0, i, 1, static_cast<std::uint32_t>(i));
  }
  const TransferId claim = d.expect(session, key);
  world.step();
  Pushed pushed;
  pushed.push = p.push(key, 1);
  p.advance(pushed.push, {ids});
  world.step();
  pushed.receive = d.receive(session, key, 1, {ids}, {}, claim).first;
  p.finish(pushed.push);
  return pushed;
}

void expect_nothing_open(const Node& node) {
  const Stats stats = node.core->stats();
  CHECK_EQ(stats.sessions, 0U);
  CHECK_EQ(stats.open_pushes, 0U);
  CHECK_EQ(stats.open_claims, 0U);
  CHECK_EQ(stats.open_receives, 0U);
  CHECK_EQ(stats.leases_in_use, 0U);
  CHECK_EQ(stats.landing_bytes, 0U);
  CHECK(node.core->quiet());
}

}  // namespace

TEST(one_lost_message_of_each_kind_ends_both_sides) {
  for (const std::string kind : {"INTENT", "OPEN", "DONE", "CREDIT", "ACCEPT", "BOX", "END"}) {
    for (const bool mapped : {false, true}) {
      World world;
      world.net.mapped = mapped;
      Node& d = world.add();
      Node& p = world.add();
      const SessionId session = world.connect(d, p);
      bool lost = false;
      world.net.lose = [&](bool, ByteView bytes) {
        if (lost || name_of_message(bytes) != kind) return false;
        return lost = true;
      };
      const Pushed pushed = start(world, d, p, session, "k", 60);
      const bool ended = world.run_until([&] { return !d.lost.empty() && !p.lost.empty(); }, kBound);
      if (!CHECK(ended && lost)) check::fail(__FILE__, __LINE__, kind);
      // A push of which P never heard a claim waits for another one.
      CHECK(world.run_until([&] { return !p.end_of(pushed.push).empty(); }, kUnclaimed));
      CHECK(p.end_of(pushed.push) != "twice");
      const std::string end = d.end_of(pushed.receive);
      CHECK_EQ(end, kind == "DONE" || kind == "CREDIT" ? end : "peer_lost");
      CHECK(end == "peer_lost" || end == "received");
      if (end == "received") CHECK(d.holds(0, 59, 1, 59));
      world.run_for(1000);
      expect_nothing_open(d);
      expect_nothing_open(p);
      // A new session serves.
      const SessionId again = world.connect(d, p);
      const Pushed next = start(world, d, p, again, "l", 20);
      CHECK(world.run_until([&] { return d.end_of(next.receive) == "received"; }));
      CHECK_EQ(p.end_of(next.push), "sent");
    }
  }
}

TEST(a_lost_fail_or_cancel_ends_both_sides) {
  for (const std::string kind : {"FAIL", "CANCEL"}) {
    World world;
    Node& d = world.add();
    Node& p = world.add();
    const SessionId session = world.connect(d, p);
    world.net.lose = [&](bool, ByteView bytes) { return name_of_message(bytes) == kind; };
    const HandleId push = p.push("k", 1);
    const auto [receive, transfer] = d.receive(session, "k", 1, {{1, 2}});
    world.run_for(1000);
    if (kind == "FAIL") p.abort(push);
    if (kind == "CANCEL") d.cancel(transfer);
    CHECK(world.run_until([&] { return !d.end_of(receive).empty() && !p.end_of(push).empty(); }, kBound));
    CHECK_EQ(d.end_of(receive), kind == "FAIL" ? "peer_lost" : "cancelled");
    CHECK_EQ(p.end_of(push), kind == "FAIL" ? "aborted" : "peer_lost");
  }
}

TEST(a_lost_ping_or_bye_is_no_loss_of_data) {
  for (const std::string kind : {"PING", "BYE"}) {
    World world;
    Node& d = world.add();
    Node& p = world.add();
    const SessionId session = world.connect(d, p);
    int num_lost = 0;
    world.net.lose = [&](bool, ByteView bytes) { return name_of_message(bytes) == kind && num_lost++ < 5; };
    const Pushed pushed = start(world, d, p, session, "k", 30);
    CHECK(world.run_until([&] { return d.end_of(pushed.receive) == "received"; }));
    CHECK(d.core->disconnect(session, world.now).ok());
    CHECK(world.run_until([&] { return !p.lost.empty(); }, kBound));
    CHECK_EQ(p.end_of(pushed.push), "sent");
  }
}

TEST(duplicates_delays_and_disorder_are_no_loss) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    World world;
    world.net.random.seed(seed);
    world.net.duplicate = 0.2;
    world.net.delay = 0.3;
    world.net.reorder = true;
    world.net.again = 0.2;
    world.net.mapped = seed % 2 == 0;
    Node& d = world.add({{}}, small_config(), true);
    Node& p = world.add({{}}, small_config(), true);
    const SessionId session = world.connect(d, p);
    const Pushed pushed = start(world, d, p, session, "k", 60);
    CHECK(world.run_until([&] { return !d.end_of(pushed.receive).empty(); }));
    CHECK_EQ(d.end_of(pushed.receive), "received");
    CHECK_EQ(p.end_of(pushed.push), "sent");
    for (std::int32_t i = 0; i < 60; ++i) CHECK(d.holds(0, i, 1, static_cast<std::uint32_t>(i)));
    world.net.again = world.net.delay = 0;
    world.run_for(5000);
    CHECK_EQ(p.core->stats().credits, 8U);
    CHECK_EQ(p.core->stats().open_claims, 0U);
    CHECK(d.lost.empty() && p.lost.empty());
  }
}

TEST(pings_that_are_refused_most_of_the_time_are_no_silence) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  world.net.again = 0.7;
  world.run_for(2'000'000);
  CHECK(d.lost.empty() && p.lost.empty());
  world.net.again = 0;
  const Pushed pushed = start(world, d, p, session, "k", 6);
  CHECK(world.run_until([&] { return !d.end_of(pushed.receive).empty(); }));
  CHECK_EQ(d.end_of(pushed.receive), "received");
}

TEST(posts_that_fail) {
  for (const bool proves_quiet : {false, true}) {
    for (const Fate fate : {Fate::kFailed, Fate::kUnknown}) {
      World world;
      world.net.proves_quiet = proves_quiet;
      Node& d = world.add();
      Node& p = world.add();
      const SessionId session = world.connect(d, p);
      const SessionId bystander = world.connect(d, p);
      int num_posts = 0;
      TicketId failed = 0;
      world.net.fate = [&](TicketId ticket) {
        if (++num_posts != 3) return Fate::kCompleted;
        failed = ticket;
        return fate;
      };
      const Pushed pushed = start(world, d, p, session, "k", 60);
      CHECK(world.run_until([&] { return !d.lost.empty() && !p.lost.empty(); }, kBound));
      CHECK_EQ(p.end_of(pushed.push), "transport");
      CHECK_EQ(d.end_of(pushed.receive), "peer_lost");
      CHECK(d.lost == std::vector<SessionId>{session} && p.lost == d.lost);
      CHECK_EQ(p.core->stats().leases_in_use, 0U);
      const bool unknown = fate == Fate::kUnknown;
      CHECK_EQ(p.core->stats().quarantined_bytes, unknown ? 400U : 0U);
      CHECK_EQ(d.core->stats().landing_bytes, 3200U);
      CHECK_EQ(d.core->stats().quarantined_bytes, proves_quiet ? 0U : 3200U);

      // The other session has not noticed, and a new one tells what became of the old one.
      const Pushed other = start(world, d, p, bystander, "l", 20);
      CHECK(world.run_until([&] { return d.end_of(other.receive) == "received"; }));
      world.connect(d, p);
      world.run_for(1000);
      CHECK_EQ(d.core->stats().quarantined_bytes, proves_quiet || !unknown ? 0U : 3200U);
      CHECK_EQ(world.net.num_wild_writes, 0U);
      const std::size_t num_staging = p.end.num_staging;
      p.end.settled = {failed, failed + 1000};
      world.step();
      CHECK_EQ(p.core->stats().quarantined_bytes, 0U);
      CHECK_EQ(p.end.num_staging, unknown ? num_staging - 1 : num_staging);
    }
  }
}

TEST(a_later_answer_frees_a_quiet_landing) {
  World world;
  world.net.proves_quiet = false;
  CoreConfig config = small_config();
  config.max_quarantined_bytes = 6400;
  Node& d = world.add({{}}, config);
  Node& p = world.add();
  Node& other = world.add();
  const auto serve = [&](Node* peer) {
    const SessionId session = world.connect(d, *peer);
    const Pushed pushed = start(world, d, *peer, session, "k", 4);
    CHECK(world.run_until([&] { return d.end_of(pushed.receive) == "received"; }));
    CHECK(d.core->disconnect(session, world.now).ok());
    world.run_for(2000);
  };
  for (Node* peer : {&p, &other, &p}) serve(peer);
  // Of p's two sessions the first was given back by the second's answer; the other peer's stays.
  CHECK_EQ(d.core->stats().quarantined_bytes, 6400U);
  CHECK_EQ(d.lost.size(), 3U);
  CHECK_EQ(p.lost.size(), 2U);
  Node& third = world.add();
  serve(&third);
  const auto refused = d.core->offer(world.now);
  CHECK_EQ(refused.status().code(), Code::kExhausted);
  CHECK(refused.status().message().find("9600 bytes") != std::string::npos);
}

TEST(a_landing_that_its_transport_keeps_counts_whatever_the_peer_says) {
  World world;
  world.net.keeps_until_quiet = true;
  world.net.proves_quiet = false;
  Node& d = world.add();
  Node& p = world.add();
  for (int i = 0; i < 2; ++i) {
    const SessionId session = world.connect(d, p);
    world.run_for(1000);
    CHECK(d.core->disconnect(session, world.now).ok());
    world.run_for(2000);
  }
  CHECK_EQ(d.core->stats().quarantined_bytes, 6400U);
  world.net.proves_quiet = true;
  world.run_for(1000);
  CHECK_EQ(d.core->stats().quarantined_bytes, 0U);
}

TEST(quiet_sessions_of_a_turn_ago_are_told_of_first) {
  // BYE, and a new session at once: the old one's end is still reported, once.
  World world;
  world.net.proves_quiet = false;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId old = world.connect(d, p);
  world.run_for(1000);
  CHECK(d.core->disconnect(old, world.now).ok());
  ++world.net.round;
  p.turn(world.now);
  world.connect(d, p);
  world.run_for(1000);
  CHECK(d.lost == std::vector<SessionId>{old});
  CHECK(p.lost == std::vector<SessionId>{old});
  CHECK_EQ(d.core->stats().quarantined_bytes, 0U);
}

TEST(staging_that_runs_out_only_slows_down) {
  World world;
  Node& d = world.add();
  CoreConfig config = small_config();
  config.num_leases = 2;
  Node& p = world.add({{}}, config);
  p.end.max_staging = 1;
  const SessionId session = world.connect(d, p);
  const Pushed pushed = start(world, d, p, session, "k", 60);
  CHECK(world.run_until([&] { return d.end_of(pushed.receive) == "received"; }));
  CHECK_EQ(p.end.num_staging, 1U);
}

TEST(a_silent_peer_is_lost_by_both_ends) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  const HandleId push = p.push("k", 1);
  const auto receive = d.receive(session, "k", 1, {{1, 2}}).first;
  world.run_for(1000);
  world.net.drop = 1;
  CHECK(world.run_until([&] { return !d.lost.empty() && !p.lost.empty(); }, 12'000));
  CHECK_EQ(d.end_of(receive), "peer_lost");
  CHECK_EQ(p.end_of(push), "peer_lost");
}

TEST(garbage_is_a_breach_of_its_session_alone) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  const SessionId bystander = world.connect(d, p);
  world.run_for(1000);
  CHECK_EQ(d.end.send(session, Bytes(50)), Sent::kYes);
  world.run_for(1000);
  CHECK(p.lost == std::vector<SessionId>{session});
  CHECK_EQ(p.core->stats().breaches, 1U);
  const Pushed pushed = start(world, d, p, bystander, "k", 10);
  CHECK(world.run_until([&] { return d.end_of(pushed.receive) == "received"; }));
}

TEST(test_case_b3_good_messages_ahead_of_a_poison_one_complete) {
  World world;
  Node& d = world.add();
  Node& p = world.add();
  const SessionId session = world.connect(d, p);
  const SessionId bystander = world.connect(d, p);
  std::vector<HandleId> pushes;
  std::vector<HandleId> receives;
  for (int i = 0; i < 4; ++i) {
    const std::string key = std::to_string(i);
    p.write(0, i, 1, 0);
    pushes.push_back(p.push(key, 1));
    p.advance(pushes.back(), {{i}});
    receives.push_back(d.receive(i == 3 ? bystander : session, key, 1, {{40 + i}}).first);
  }
  // All boxes are in; what is left is an END each.
  CHECK(world.run_until([&] { return d.core->stats().bytes_received == std::size_t{4} * 2 * 48; }));
  world.run_for(1000);
  p.finish(pushes[0]);
  p.finish(pushes[1]);
  p.turn(world.now);
  CHECK_EQ(p.end.send(session, Bytes(50)), Sent::kYes);
  p.finish(pushes[3]);
  p.turn(world.now);
  d.turn(world.now);  // one batch
  for (const int i : {0, 1, 3}) {
    CHECK_EQ(d.end_of(receives[static_cast<std::size_t>(i)]), "received");
    CHECK(d.holds(0, 40 + i, 1, 0));
  }
  CHECK_EQ(d.end_of(receives[2]), "breach");
  CHECK_EQ(d.core->stats().breaches, 1U);
  CHECK(d.lost == std::vector<SessionId>{session});
  CHECK(world.run_until([&] { return p.end_of(pushes[2]) == "peer_lost"; }, kBound));
  const Pushed other = start(world, d, p, bystander, "k", 10);
  CHECK(world.run_until([&] { return d.end_of(other.receive) == "received"; }));
}
