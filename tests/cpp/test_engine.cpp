// Engines with their threads, over shared memory.
#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "engine/engine.hpp"
#include "fenced_packer.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "transport/shm/shm_transport.hpp"

using namespace kvpush;

namespace {

constexpr std::int64_t kNumBlocks = 1024;
constexpr std::int64_t kUnitBytes = 256;
constexpr std::size_t kNumPlanes = 4;
constexpr TimeUs kLongUs = 20'000'000;  // no test waits that long unless it has failed

struct Worker {
  std::vector<Bytes> memory;
  fake::FencedPacker* packer = nullptr;  ///< the engine's, until it closes
  std::unique_ptr<Engine> engine;
  std::map<HandleId, std::vector<protocol::Event>> ends;
  std::size_t num_lost = 0;

  explicit Worker(EngineConfig config = {}, unsigned num_threads = 1) {
    auto cache = std::make_unique<Cache>();
    Group group{16, {}};
    for (std::size_t p = 0; p < kNumPlanes; ++p) {
      memory.emplace_back(static_cast<std::size_t>(kNumBlocks * kUnitBytes));
      group.planes.push_back({memory.back().data(), kNumBlocks, 1, 1, kUnitBytes, kUnitBytes, 0, 0, "p", 0});
    }
    cache->groups = {std::move(group)};
    config.core.slot_bytes = 8 * kUnitBytes;
    EngineParts parts;
    static_cast<Uuid&>(parts.incarnation) = random_uuid();
    auto transport = make_shm_transport(parts.incarnation, 1'000'000);
    if (!transport.ok()) SKIP(transport.status().message());
    parts.transport = std::move(transport).value();
    auto made_packer = std::make_unique<fake::FencedPacker>(make_cpu_packer(*cache, num_threads));
    packer = made_packer.get();
    parts.packer = std::move(made_packer);
    auto made = Engine::create(std::move(cache), config, std::move(parts));
    CHECK(made.ok());
    engine = std::move(made).value();
  }

  void write(std::int32_t block, std::uint32_t value) {
    for (std::size_t p = 0; p < kNumPlanes; ++p) {
      std::fill_n(memory[p].begin() + block * kUnitBytes, kUnitBytes, static_cast<std::byte>(value + 7 * p));
    }
  }
  [[nodiscard]] bool holds(std::int32_t block, std::uint32_t value) const {
    bool same = true;
    for (std::size_t p = 0; p < kNumPlanes; ++p) {
      for (std::int64_t i = 0; i < kUnitBytes; ++i) {
        same &= memory[p][static_cast<std::size_t>(block * kUnitBytes + i)] ==
                static_cast<std::byte>(value + 7 * p);
      }
    }
    return same;
  }

  /// Polls until `num` handles have ended; false when the engine was closed before.
  bool collect(std::size_t num) {
    while (ends.size() < num) {
      auto events = engine->poll(kLongUs);
      if (!events.ok() || events.value().empty()) return false;
      for (auto& event : events.value()) {
        if (event.kind == protocol::Event::Kind::kLost) {
          ++num_lost;
        } else {
          ends[event.handle].push_back(std::move(event));
        }
      }
    }
    return true;
  }
  /// What is left after close(): every event, then Closed.
  void collect_rest() {
    for (auto events = engine->poll(0); events.ok(); events = engine->poll(0)) {
      for (auto& event : events.value()) {
        if (event.kind == protocol::Event::Kind::kLost) {
          ++num_lost;
        } else {
          ends[event.handle].push_back(std::move(event));
        }
      }
    }
  }
};

SessionId connect(Worker& d, Worker& p) {
  const auto offer = d.engine->offer();
  if (!CHECK(offer.ok())) return {};
  const auto answer = p.engine->answer(offer.value());
  if (!CHECK(answer.ok())) return {};
  const auto session = d.engine->establish(answer.value());
  return CHECK(session.ok()) ? session.value() : SessionId{};
}

Bytes digest() {
  return Bytes(32, std::byte{1});
}

}  // namespace

TEST(many_threads_submit_and_one_polls) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  constexpr std::int32_t kThreads = 4;
  constexpr std::int32_t kEach = 32;
  constexpr std::int32_t kBlocks = 8;  // per prompt
  for (std::int32_t block = 0; block < kNumBlocks; ++block) p.write(block, static_cast<std::uint32_t>(block));
  const auto submit = [&](std::int32_t thread) {
    for (std::int32_t i = 0; i < kEach; ++i) {
      const std::int32_t first = (thread * kEach + i) * kBlocks;
      const std::string key = std::to_string(first);
      const auto claim = d.engine->expect(session, key);
      const auto push = p.engine->push(key, digest());
      if (!CHECK(claim.ok() && push.ok())) return;
      std::vector<std::int32_t> from(kBlocks);
      std::iota(from.begin(), from.end(), first);
      const std::vector<std::int32_t> to(from.rbegin(), from.rend());
      CHECK(d.engine->receive(session, claim.value(), key, digest(), {{to}, {0}}).ok());
      CHECK(p.engine->advance(push.value(), {{from.begin(), from.begin() + 3}}).ok());
      if (i % 4 == 0) {
        const auto at = p.engine->retract(push.value());
        if (!CHECK(at.ok())) return;
        CHECK(p.engine->advance(push.value(), {{from.begin() + at.value()[0], from.end()}}).ok());
      } else {
        CHECK(p.engine->advance(push.value(), {{from.begin() + 3, from.end()}}).ok());
      }
      CHECK(p.engine->finish(push.value()).ok());
    }
  };
  std::vector<std::thread> threads;
  for (std::int32_t t = 0; t < kThreads; ++t) threads.emplace_back(submit, t);
  CHECK(d.collect(kThreads * kEach));
  CHECK(p.collect(kThreads * kEach));
  for (std::thread& thread : threads) thread.join();
  for (const Worker* worker : {&d, &p}) {
    for (const auto& [handle, events] : worker->ends) {
      CHECK_EQ(events.size(), 1U);
      CHECK_EQ(events[0].status, FailCode::kNone);
    }
  }
  for (std::int32_t i = 0; i < kThreads * kEach; ++i) {
    for (std::int32_t b = 0; b < kBlocks; ++b) {
      CHECK(d.holds(i * kBlocks + kBlocks - 1 - b, static_cast<std::uint32_t>(i * kBlocks + b)));
    }
  }
  const auto stats = p.engine->stats();
  CHECK(stats.ok() && stats.value().pushes_sent == kThreads * kEach && stats.value().open_pushes == 0);
}

TEST(close_ends_every_open_handle_once) {
  for (const bool d_first : {true, false}) {
    Worker d;
    Worker p;
    const SessionId session = connect(d, p);
    std::vector<HandleId> pushes;
    std::vector<HandleId> receives;
    for (std::int32_t i = 0; i < 30; ++i) {
      const std::string key = std::to_string(i);
      const auto push = p.engine->push(key, digest());  // a third claimed, a third opened, none finished
      if (!CHECK(push.ok())) return;
      pushes.push_back(push.value());
      CHECK(p.engine->advance(push.value(), {{i, i + 30}}).ok());
      if (i % 3 == 1) CHECK(d.engine->expect(session, key).ok());
      if (i % 3 == 2) {
        const auto receive = d.engine->receive(session, 0, key, digest(), {{{i, i + 30, i + 60}}, {0}});
        if (!CHECK(receive.ok())) return;
        receives.push_back(receive.value().first);
      }
    }
    std::atomic<bool> stop{false};
    std::thread busy([&] {  // submits into the closing engine
      while (!stop) (void)p.engine->abort(pushes[0], "busy");
    });
    for (Worker* worker : d_first ? std::vector{&d, &p} : std::vector{&p, &d}) worker->engine->close();
    stop = true;
    busy.join();
    d.collect_rest();
    p.collect_rest();
    CHECK_EQ(p.ends.size(), pushes.size());
    CHECK_EQ(d.ends.size(), receives.size());
    for (const Worker* worker : {&d, &p}) {
      for (const auto& [handle, events] : worker->ends) {
        CHECK_EQ(events.size(), 1U);
        CHECK(events[0].status != FailCode::kNone);
      }
      CHECK_EQ(worker->num_lost, 1U);
    }
  }
}

TEST(a_closed_engine_says_so) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  const auto push = p.engine->push("k", digest());
  std::thread waiting([&] {  // a poll that waits is woken
    CHECK(!d.collect(1));
  });
  d.engine->close();
  d.engine->close();
  waiting.join();
  CHECK(d.engine->closed());
  CHECK_EQ(d.engine->offer().status().code(), Code::kClosed);
  CHECK_EQ(d.engine->answer({}).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->establish({}).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->disconnect(session).code(), Code::kClosed);
  CHECK_EQ(d.engine->push("k", digest()).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->advance(1, {{1}}).code(), Code::kClosed);
  CHECK_EQ(d.engine->retract(1).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->finish(1).code(), Code::kClosed);
  CHECK_EQ(d.engine->abort(1, "").code(), Code::kClosed);
  CHECK_EQ(d.engine->evict(1).code(), Code::kClosed);
  CHECK_EQ(d.engine->expect(session, "k").status().code(), Code::kClosed);
  CHECK_EQ(d.engine->receive(session, 0, "k", digest(), {{{1}}, {0}}).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->cancel(1).code(), Code::kClosed);
  CHECK_EQ(d.engine->stats().status().code(), Code::kClosed);
  CHECK_EQ(d.engine->poll(0).status().code(), Code::kClosed);
  CHECK_EQ(d.engine->transport(), "shm");
  CHECK(push.ok() && p.engine->abort(push.value(), "").ok());
}

TEST(calls_are_judged_at_once) {
  EngineConfig config;
  config.max_open_transfers = 2;
  Worker worker(config);
  Engine& engine = *worker.engine;
  const auto code = [](const auto& result) { return result.status().code(); };
  CHECK_EQ(code(engine.push("", digest())), Code::kInvalidArgument);
  CHECK_EQ(code(engine.push(std::string(513, 'k'), digest())), Code::kInvalidArgument);
  CHECK_EQ(code(engine.push("k", {})), Code::kInvalidArgument);
  CHECK_EQ(code(engine.push("k", Bytes(65))), Code::kInvalidArgument);
  const auto push = engine.push("k", digest());
  CHECK(push.ok());
  CHECK_EQ(code(engine.push("k", digest())), Code::kDuplicateKey);
  CHECK(engine.push("l", digest()).ok());
  CHECK_EQ(code(engine.push("m", digest())), Code::kQueueFull);
  CHECK_EQ(engine.advance(push.value(), {{kNumBlocks}}).code(), Code::kInvalidArgument);
  CHECK_EQ(engine.advance(push.value(), {{}, {}}).code(), Code::kInvalidArgument);
  CHECK_EQ(code(engine.receive({}, 0, "k", digest(), {{{1}}, {0, 0}})), Code::kInvalidArgument);
  CHECK_EQ(code(engine.receive({}, 0, "k", digest(), {{{1}}, {UINT32_MAX}})), Code::kInvalidArgument);
  std::vector<std::int32_t> holes;
  for (std::int32_t i = 0; i < 5000; ++i) holes.push_back(i % 2 == 0 ? 1 : -1);
  CHECK_EQ(code(engine.receive({}, 0, "k", digest(), {{holes}, {0}})), Code::kInvalidArgument);
  // After its end a handle takes calls and does nothing; its key and its room are free.
  CHECK(engine.abort(push.value(), "enough").ok());
  CHECK(worker.collect(1));
  CHECK_EQ(worker.ends.at(push.value())[0].detail, "enough");
  CHECK(engine.advance(push.value(), {{1}}).ok());
  CHECK(engine.finish(push.value()).ok());
  CHECK(engine.retract(push.value()).ok());
  CHECK(engine.push("k", digest()).ok());
}

TEST(a_session_that_is_not_open_is_refused_at_the_call) {
  Worker d;
  Worker p;
  CHECK_EQ(d.engine->receive({}, 0, "k", digest(), {{{1}}, {0}}).status().code(), Code::kPeerLost);
  CHECK_EQ(d.engine->expect({}, "k").status().code(), Code::kPeerLost);
  CHECK_EQ(d.engine->disconnect({}).code(), Code::kPeerLost);
  const SessionId session = connect(d, p);
  const auto claim = d.engine->expect(session, "k");
  CHECK(claim.ok() && d.engine->disconnect(session).ok());
  // A claim that outlived its session still becomes a receive, which ends with an event.
  const auto receive = d.engine->receive(session, claim.value(), "k", digest(), {{{1}}, {0}});
  if (!CHECK(receive.ok() && d.collect(1))) return;
  CHECK_EQ(d.ends.at(receive.value().first)[0].status, FailCode::kPeerClosed);
}

TEST(a_claim_keeps_room_for_its_receive) {
  EngineConfig config;
  config.max_open_transfers = 1;
  Worker d(config);
  Worker p;
  const SessionId session = connect(d, p);
  const auto claim = d.engine->expect(session, "k");
  if (!CHECK(claim.ok())) return;
  CHECK_EQ(d.engine->expect(session, "l").status().code(), Code::kQueueFull);
  const auto refused = d.engine->receive(session, claim.value(), "k", digest(), {{{kNumBlocks}}, {0}});
  CHECK_EQ(refused.status().code(), Code::kInvalidArgument);
  CHECK_EQ(d.engine->expect(session, "l").status().code(), Code::kQueueFull);
  const auto receive = d.engine->receive(session, claim.value(), "k", digest(), {{{1}}, {0}});
  if (!CHECK(receive.ok())) return;
  CHECK_EQ(d.engine->expect(session, "l").status().code(), Code::kQueueFull);
  CHECK(d.engine->cancel(claim.value()).ok() && d.collect(1));
  CHECK(d.engine->expect(session, "l").ok());
}

TEST(a_peer_that_closes_is_noticed) {
  Worker d;
  auto p = std::make_unique<Worker>();
  const SessionId session = connect(d, *p);
  const auto receive = d.engine->receive(session, 0, "k", digest(), {{{1}}, {0}});
  CHECK(receive.ok());
  p.reset();
  if (!CHECK(d.collect(1))) return;
  const FailCode code = d.ends.begin()->second[0].status;
  CHECK(code == FailCode::kPeerClosed || code == FailCode::kPeerLost);
}

TEST(calls_wait_for_their_events_and_the_thread_looks_by_itself) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  const auto push = p.engine->push("k", digest());
  CHECK(p.engine->advance(push.value(), {{1, 2}}, 5).ok());
  CHECK(p.engine->finish(push.value()).ok());
  const auto receive = d.engine->receive(session, 0, "k", digest(), {{{8, 9}}, {0}}, 6);
  CHECK(receive.ok());
  CHECK_EQ(p.engine->stats().value().boxes_sent, 0U);
  p.write(1, 11);
  p.write(2, 12);
  d.packer->pass(6);
  p.packer->pass(5);
  CHECK(d.collect(1));
  CHECK(p.collect(1));
  CHECK(d.holds(8, 11) && d.holds(9, 12));
  CHECK_EQ(d.ends.begin()->second[0].kind, protocol::Event::Kind::kReceived);
}

TEST(a_refused_event_leaves_nothing_half_done) {
  EngineConfig config;
  config.max_open_transfers = 1;
  Worker d(config);
  Worker p;
  const SessionId session = connect(d, p);
  const auto claim = d.engine->expect(session, "k");
  CHECK(claim.ok());
  d.packer->fails = p.packer->fails = true;
  const auto refused = d.engine->receive(session, claim.value(), "k", digest(), {{{8}}, {0}}, 6);
  CHECK_EQ(refused.status().code(), Code::kTransport);
  const auto push = p.engine->push("k", digest());
  CHECK_EQ(p.engine->advance(push.value(), {{1}}, 5).code(), Code::kTransport);
  d.packer->fails = p.packer->fails = false;
  // The claim is open still, its block is free, and the push has no position too many.
  CHECK_EQ(d.engine->expect(session, "other").status().code(), Code::kQueueFull);
  CHECK(d.engine->receive(session, claim.value(), "k", digest(), {{{8}}, {0}}).ok());
  p.write(2, 12);
  CHECK(p.engine->advance(push.value(), {{2}}).ok());
  CHECK(p.engine->finish(push.value()).ok());
  CHECK(d.collect(1));
  CHECK(d.holds(8, 12));
}

TEST(a_capture_that_takes_long_holds_up_nobody_else) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  const auto push = p.engine->push("k", digest());
  // What the driver does in another thread's call: the engine goes on, and ends only after it.
  std::promise<void> entered;
  std::promise<void> leave;
  p.packer->in_capture = [&] {
    entered.set_value();
    leave.get_future().wait();
  };
  Status taken;
  std::jthread caller([&] { taken = p.engine->advance(push.value(), {{1, 2}}, 5); });
  entered.get_future().wait();
  const auto other = p.engine->push("other", digest());
  CHECK(other.ok());
  CHECK(p.engine->advance(other.value(), {{3}}).ok());
  CHECK(p.engine->finish(other.value()).ok());
  CHECK(d.engine->receive(session, 0, "other", digest(), {{{8}}, {0}}).ok());
  CHECK(d.collect(1) && p.collect(1));
  std::jthread closer([&] { p.engine->close(); });
  while (!p.engine->closed()) std::this_thread::yield();
  leave.set_value();
  caller.join();
  closer.join();
  CHECK_EQ(taken.code(), Code::kClosed);
}

TEST(close_waits_for_a_capture_up_to_its_deadline) {
  EngineConfig config;
  config.close_timeout_us = 1000;
  Worker p(config);
  const auto push = p.engine->push("k", digest());
  std::promise<void> entered;
  std::promise<void> leave;
  p.packer->in_capture = [&] {
    entered.set_value();
    leave.get_future().wait();
  };
  Status taken;
  std::jthread caller([&] { taken = p.engine->advance(push.value(), {{1, 2}}, 5); });
  entered.get_future().wait();
  p.engine->close();
  leave.set_value();
  caller.join();
  CHECK_EQ(taken.code(), Code::kClosed);
}

TEST(a_copy_that_close_gives_up_on_keeps_the_cache_in_use) {
  EngineConfig config;
  config.close_timeout_us = 1000;
  Worker d;
  Worker p(config);
  p.packer->holds = true;
  const SessionId session = connect(d, p);
  const auto push = p.engine->push("k", digest());
  CHECK(push.ok() && p.engine->advance(push.value(), {{1, 2}}).ok());
  CHECK(d.engine->receive(session, 0, "k", digest(), {{{8, 9}}, {0}}).ok());
  while (p.packer->num_started == 0) std::this_thread::yield();
  p.engine->close();
  CHECK(p.engine->cache_in_use());
  d.engine->close();
  CHECK(!d.engine->cache_in_use());
}

TEST(a_refused_receive_leaves_no_fence) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  CHECK(!d.engine->receive(session, 0, "k", digest(), {{{kNumBlocks}}, {0}}, 6).ok());
  CHECK(!d.engine->receive(SessionId{}, 0, "k", digest(), {{{8}}, {0}}, 6).ok());
  CHECK_EQ(d.packer->num_fences(), 0U);
}

TEST(retract_and_close_wait_for_no_event) {
  Worker d;
  Worker p;
  const SessionId session = connect(d, p);
  const auto push = p.engine->push("k", digest());
  CHECK(p.engine->advance(push.value(), {{1, 2}}, 5).ok());
  const auto positions = p.engine->retract(push.value());
  CHECK(positions.ok() && positions.value() == std::vector<std::uint32_t>{0});
  CHECK_EQ(p.packer->num_fences(), 0U);
  CHECK(p.engine->advance(push.value(), {{3, 4}}, 5).ok());
  CHECK(d.engine->receive(session, 0, "k", digest(), {{{8, 9}}, {0}}, 6).ok());
  p.engine->close();
  d.engine->close();
  p.collect_rest();
  d.collect_rest();
  CHECK_EQ(p.ends.size(), 1U);
  CHECK_EQ(d.ends.size(), 1U);
  CHECK_EQ(p.ends.begin()->second.size(), 1U);
  CHECK_EQ(d.ends.begin()->second.size(), 1U);
  CHECK_EQ(p.engine->advance(push.value(), {{1}}, 5).code(), Code::kClosed);
}
