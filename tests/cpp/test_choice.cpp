// Several transports in one engine, and how one of them is chosen.
#include <algorithm>
#include <string>
#include <vector>

#include "core_world.hpp"
#include "engine/choice.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

using Names = std::vector<std::string>;
using Rank = Path::Rank;

const Path kShm{"shm", "host a", Rank::kHost};
const Path kElsewhere{"shm", "host b", Rank::kHost};
const Path kEfa{"fabric", "efa", Rank::kRdma};
const Path kTcp{"fabric", "tcp", Rank::kNetwork};
const Path kNixl{"nixl", "", Rank::kNetwork};
const Path kNixlRdma{"nixl", "", Rank::kRdma};

TEST(the_best_common_path_comes_first) {
  struct Case {
    std::vector<Path> ours;
    std::vector<Path> theirs;
    Names common;
  };
  for (const Case& one : {
           Case{{kShm, kEfa, kNixl}, {kShm, kEfa, kNixl}, {"shm", "fabric", "nixl"}},
           Case{{kShm, kEfa, kNixlRdma}, {kElsewhere, kEfa, kNixlRdma}, {"fabric", "nixl"}},
           Case{{kShm, kTcp, kNixlRdma}, {kElsewhere, kTcp, kNixlRdma}, {"nixl", "fabric"}},
           // RDMA at one end is not RDMA.
           Case{{kShm, kTcp, kNixlRdma}, {kElsewhere, kTcp, kNixl}, {"fabric", "nixl"}},
           Case{{kShm, kEfa, kNixlRdma}, {kElsewhere, kTcp, kNixl}, {"nixl"}},
           Case{{kNixl}, {kShm, kTcp}, {}},
           Case{{kShm}, {kElsewhere}, {}},
           Case{{kShm}, {}, {}},
       }) {
    CHECK(common_paths(one.ours, one.theirs) == one.common);
  }
  CHECK_EQ(describe({kTcp, kNixl}), "fabric (tcp), nixl");
  CHECK_EQ(describe({}), "none");
}

TEST(a_slow_path_gives_way_to_the_next_and_the_fastest_is_kept_when_all_are_slow) {
  Rates rates;
  Incarnation peer;
  peer.bytes[0] = 1;
  Incarnation other;
  other.bytes[0] = 2;
  const Names names = {"a", "b"};
  CHECK_EQ(rates.choose(peer, names, 100), "a");
  rates.note(peer, "a", 50);
  CHECK_EQ(rates.choose(peer, names, 100), "b");
  CHECK_EQ(rates.choose(other, names, 100), "a");
  rates.note(peer, "b", 40);
  CHECK_EQ(rates.choose(peer, names, 100), "a");
  rates.note(peer, "b", 60);
  CHECK_EQ(rates.choose(peer, names, 100), "b");
  rates.note(peer, "a", 100);
  CHECK_EQ(rates.choose(peer, names, 100), "a");
  // A path that does not work is the last, also where nothing is too slow.
  rates.note(peer, "a", 0);
  CHECK_EQ(rates.choose(peer, names, 0), "b");
  rates.note(peer, "b", 0);
  CHECK_EQ(rates.choose(peer, names, 0), "a");
  // Anybody may name new peers.
  for (int i = 0; i < 1000; ++i) {
    static_cast<Uuid&>(other) = random_uuid();
    rates.note(other, "a", 0);
  }
}

TEST(a_hello_is_read_as_it_was_written_and_no_other_bytes_are_one) {
  Hello hello;
  hello.engine.bytes[3] = 9;
  hello.measures = true;
  hello.paths = {kShm, kEfa, kNixl};
  const Bytes bytes = encode(hello);
  const auto read = decode_hello(bytes);
  CHECK(read.ok());
  CHECK(read.value().engine == hello.engine);
  CHECK(read.value().measures);
  CHECK(read.value().paths == hello.paths);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK(!decode_hello(ByteView(bytes).first(size)).ok());
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes damaged = bytes;
    damaged[i] ^= std::byte{1};
    CHECK(!decode_hello(damaged).ok());
  }
  hello.paths.assign(kMaxPaths + 1, kNixl);
  CHECK(!decode_hello(encode(hello)).ok());
}

// Pushes four blocks over this session; how it ended on D.
std::string serve(World& world, Node& d, Node& p, const SessionId& session, const std::string& key) {
  const HandleId push = p.push(key, 1);
  const HandleId receive = d.receive(session, key, 1, {{1, 2, 3, 4}}).first;
  p.advance(push, {{5, 6, 7, 8}});
  p.finish(push);
  world.run_until([&] { return !d.end_of(receive).empty(); });
  return d.end_of(receive);
}

/// P and D with three transports: "fake", which is slow, "fast", and "mapped".
struct Three {
  World world;
  Net fast;
  Net mapped;
  Node* d = nullptr;
  Node* p = nullptr;

  explicit Three(std::uint64_t floor = 0) {
    fast.name = "fast";
    mapped.name = "mapped";
    mapped.mapped = true;
    CoreConfig config = small_config();
    config.min_link_bytes_per_s = floor;
    d = &world.add({{}}, config);
    p = &world.add({{}}, config);
    for (Node* node : {d, p}) {
      node->add(fast);
      node->add(mapped);
    }
  }
};

TEST(sessions_of_one_engine_live_on_different_transports_and_end_apart) {
  Three three;
  World& world = three.world;
  Node& d = *three.d;
  Node& p = *three.p;
  const SessionId first = world.connect(d, p);
  const SessionId second = world.connect(d, p, {"fast", {}, false});
  const SessionId third = world.connect(d, p, {"mapped", {}, false});
  CHECK(world.net.sessions.contains(first));
  CHECK(three.fast.sessions.contains(second));
  CHECK(three.mapped.sessions.contains(third));
  CHECK_EQ(serve(world, d, p, first, "a"), "received");
  CHECK(p.end.num_staging > 0);
  CHECK_EQ(p.others[0]->num_staging, 0U);
  CHECK_EQ(serve(world, d, p, second, "b"), "received");
  CHECK_EQ(serve(world, d, p, third, "c"), "received");
  // Each pool is its transport's, and mapped slots need none.
  CHECK(p.others[0]->num_staging > 0);
  CHECK_EQ(p.others[1]->num_staging, 0U);
  CHECK_EQ(p.core->stats().leases_in_use, 0U);

  CHECK(d.core->disconnect(second, world.now).ok());
  CHECK(world.run_until([&] { return p.lost.size() == 1 && d.lost.size() == 1; }, 40'000));
  CHECK(world.run_until([&] { return three.fast.sessions.at(second).released; }));
  CHECK_EQ(serve(world, d, p, first, "d"), "received");
  CHECK_EQ(serve(world, d, p, third, "e"), "received");
  CHECK_EQ(d.core->link(first).value().transport, "fake");
  CHECK_EQ(d.core->link(third).value().transport, "mapped");
  CHECK(d.core->link(second).status().code() == Code::kPeerLost);
}

TEST(a_lease_of_unknown_fate_is_set_aside_in_its_own_pool_and_settled_there) {
  Three three;
  World& world = three.world;
  int num_posts = 0;
  three.fast.fate = [&](TicketId) { return ++num_posts == 1 ? Fate::kUnknown : Fate::kCompleted; };
  const SessionId slow = world.connect(*three.d, *three.p);
  const SessionId fast = world.connect(*three.d, *three.p, {"fast", {}, false});
  CHECK(serve(world, *three.d, *three.p, fast, "a") != "received");
  CHECK_EQ(three.p->core->stats().quarantined_bytes, 400U);
  CHECK_EQ(serve(world, *three.d, *three.p, slow, "b"), "received");
}

TEST(a_transport_that_one_side_lacks_is_refused_in_words) {
  Three three;
  Node& other = three.world.add();
  const auto offer = three.d->core->offer(three.world.now, {"mapped", {}, false});
  CHECK(offer.ok());
  const auto answer = other.core->answer(offer.value(), three.world.now);
  CHECK(!answer.ok());
  CHECK(answer.status().message().find("theirs mapped, ours fake") != std::string::npos);
  CHECK(!three.d->core->offer(three.world.now, {"absent", {}, false}).ok());
}

TEST(d_is_told_the_rate_and_takes_another_path_next) {
  // 400 bytes in one step of 200 us: 2 MB/s, below the floor.
  Three three(10'000'000);
  World& world = three.world;
  Core& core = *three.d->core;
  Incarnation peer;
  peer.bytes[0] = 7;
  const Names names = {"fake", "fast"};
  const SessionId first = world.connect(*three.d, *three.p, {"fake", peer, true});
  CHECK(core.link(first).value().is_measuring);
  CHECK(world.run_until([&] { return !core.link(first).value().is_measuring; }));
  CHECK_EQ(core.link(first).value().bytes_per_s, 2'000'000U);
  CHECK_EQ(three.p->core->link(first).value().bytes_per_s, 2'000'000U);
  CHECK_EQ(core.rates().choose(peer, names, 10'000'000), "fast");
  CHECK_EQ(core.rates().choose(peer, names, 1'000'000), "fake");

  world.step_us = 20;  // now it is fast
  const SessionId second = world.connect(*three.d, *three.p, {"fast", peer, true});
  CHECK(world.run_until([&] { return !core.link(second).value().is_measuring; }));
  CHECK_EQ(core.link(second).value().bytes_per_s, 20'000'000U);
  CHECK_EQ(core.rates().choose(peer, names, 10'000'000), "fast");
  CHECK_EQ(serve(world, *three.d, *three.p, second, "a"), "received");
}

TEST(a_path_that_carries_nothing_is_tried_last) {
  Three three(1);
  World& world = three.world;
  Incarnation peer;
  peer.bytes[0] = 7;
  world.net.drop = 1;
  const SessionId silent = world.connect(*three.d, *three.p, {"fake", peer, true});
  CHECK(world.run_until([&] { return !three.d->lost.empty(); }, 100'000));
  CHECK(three.d->lost == std::vector<SessionId>{silent});
  CHECK_EQ(three.d->core->rates().choose(peer, {"fake", "fast"}, 1), "fast");

  three.d->others[0]->fail_connect = true;
  const auto offer = three.d->core->offer(world.now, {"fast", peer, true});
  const auto answer = three.p->core->answer(offer.value(), world.now);
  CHECK(!three.d->core->establish(answer.value(), world.now).ok());
  CHECK_EQ(three.d->core->rates().choose(peer, {"fast", "mapped"}, 1), "mapped");
}

}  // namespace
