// Engines without threads on a FakeNet, with caches whose bytes tell what they are.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "engine/core.hpp"
#include "fake_net.hpp"
#include "fenced_packer.hpp"
#include "pack/cpu/cpu_packer.hpp"

namespace kvpush::fake {

using BlockTable = std::vector<std::vector<std::int32_t>>;

struct GroupShape {
  std::int64_t num_planes = 2;
  std::int64_t unit_bytes = 48;
  std::int64_t num_blocks = 64;
};

constexpr std::byte kFree{0xEE};  ///< fills blocks that nobody uses

/// Packs and unpacks take some polls, as chance wants.
class LazyPacker final : public Packer {
 public:
  LazyPacker(const Cache& cache, Net& net) : cache_(cache), net_(net) {}
  void start(PackJob job) override { jobs_.push_back(std::move(job)); }
  void poll(std::vector<PackDone>& done) override {
    for (PackJob& job : std::exchange(jobs_, {})) {
      if (held || net_.hits(0.5)) {
        jobs_.push_back(std::move(job));
      } else {
        done.push_back(run_pack_job(cache_, job));
      }
    }
  }
  /// Whether a job under way reads or writes this block.
  [[nodiscard]] bool uses(std::size_t group, std::int32_t block) const {
    return std::any_of(jobs_.begin(), jobs_.end(), [&](const PackJob& job) {
      return job.box.group == group &&
             std::find(job.block_ids.begin(), job.block_ids.end(), block) != job.block_ids.end();
    });
  }
  bool held = false;

 private:
  const Cache& cache_;
  Net& net_;
  std::vector<PackJob> jobs_;
};

inline CoreConfig small_config() {
  CoreConfig config;
  config.slot_bytes = 400;
  config.num_slots = 8;
  config.timeouts = {30'000, 60'000, 30'000, 60'000, 10'000, 30'000};
  return config;
}

/// One engine, its memory, and what its caller has seen.
class Node {
 public:
  Node(Net& net, const std::vector<GroupShape>& shapes, const CoreConfig& config, bool lazy, TimeUs now)
      : end(net) {
    for (std::size_t g = 0; g < shapes.size(); ++g) {
      const GroupShape& shape = shapes[g];
      Group group{16, {}};
      for (std::int64_t p = 0; p < shape.num_planes; ++p) {
        auto& bytes = memory.emplace_back(
            std::make_unique<Bytes>(static_cast<std::size_t>(shape.num_blocks * shape.unit_bytes), kFree));
        group.planes.push_back({bytes->data(), shape.num_blocks, 1, 1, shape.unit_bytes, shape.unit_bytes, 0,
                                0, "layer " + std::to_string(p), 0});
      }
      cache.groups.push_back(std::move(group));
    }
    if (lazy) {
      auto made = std::make_unique<LazyPacker>(cache, net);
      lazy_packer = made.get();
      packer = std::make_unique<FencedPacker>(std::move(made));
    } else {
      packer = std::make_unique<FencedPacker>(make_cpu_packer(cache, 0));
    }
    static_cast<Uuid&>(incarnation) = random_uuid();
    core = std::make_unique<Core>(cache, config, end, *packer, incarnation, now);
  }

  End& add(Net& net) {
    others.push_back(std::make_unique<End>(net));
    core->add(*others.back());
    return *others.back();
  }

  [[nodiscard]] std::byte* unit(std::size_t group, std::size_t plane, std::int32_t block) const {
    const Plane& where = cache.groups[group].planes[plane];
    return where.base + block * where.block_stride_bytes;
  }
  /// Calls visit(bytes, size, plane) for every unit of a block.
  template <typename Visit>
  void each_unit(std::size_t group, std::int32_t block, Visit visit) const {
    for (std::size_t p = 0; p < cache.groups[group].planes.size(); ++p) {
      visit(unit(group, p, block), cache.groups[group].planes[p].unit_bytes(), p);
    }
  }
  void wipe(std::size_t group, std::int32_t block) const {
    each_unit(group, block,
              [](std::byte* bytes, std::size_t size, std::size_t) { std::fill_n(bytes, size, kFree); });
  }
  [[nodiscard]] bool is_wiped(std::size_t group, std::int32_t block) const {
    bool wiped = true;
    each_unit(group, block, [&](const std::byte* bytes, std::size_t size, std::size_t) {
      for (std::size_t i = 0; i < size; ++i) wiped &= bytes[i] == kFree;
    });
    return wiped;
  }
  /// The KV of one position of a prompt.
  void write(std::size_t group, std::int32_t block, std::uint64_t prompt, std::uint32_t pos) const {
    each_unit(group, block, [&](std::byte* bytes, std::size_t size, std::size_t plane) {
      for (std::size_t i = 0; i < size; ++i) bytes[i] = content(prompt, group, plane, pos, i);
    });
  }
  [[nodiscard]] bool holds(std::size_t group, std::int32_t block, std::uint64_t prompt,
                           std::uint32_t pos) const {
    bool same = true;
    each_unit(group, block, [&](const std::byte* bytes, std::size_t size, std::size_t plane) {
      for (std::size_t i = 0; i < size; ++i) same &= bytes[i] == content(prompt, group, plane, pos, i);
    });
    return same;
  }
  static std::byte content(std::uint64_t prompt, std::size_t group, std::size_t plane, std::uint32_t pos,
                           std::size_t i) {
    std::uint64_t x = prompt * 0x9e3779b97f4a7c15U + group * 1000003 + plane * 10007 + pos * 101 + i * 7919;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9U;
    return static_cast<std::byte>(x >> 40);
  }
  static Bytes digest(std::uint64_t prompt) { return Bytes(8, static_cast<std::byte>(prompt)); }

  // --- what an engine does between its caller and the core
  HandleId push(const std::string& key, std::uint64_t prompt) {
    core->sender().push(next_handle, key, digest(prompt), now, core->actions());
    return next_handle++;
  }
  void advance(HandleId handle, const BlockTable& ids, std::uint64_t after = 0) {
    core->gate().advance(handle, ids, packer->capture(after).value(), now, core->actions());
  }
  void finish(HandleId handle) { core->gate().finish(handle, now, core->actions()); }
  void abort(HandleId handle) { core->gate().abort(handle, "", now, core->actions()); }
  TransferId expect(const SessionId& session, const std::string& key) {
    core->receiver().expect(session, next_transfer, key, now, core->actions());
    return next_transfer++;
  }
  /// claim 0: a new one. The handle, and the transfer.
  std::pair<HandleId, TransferId> receive(const SessionId& session, const std::string& key,
                                          std::uint64_t prompt, const BlockTable& to,
                                          std::vector<std::uint32_t> first = {}, TransferId claim = 0,
                                          std::uint64_t after = 0) {
    first.resize(to.size());
    const TransferId transfer = claim != 0 ? claim : next_transfer++;
    core->gate().receive(session, transfer, next_handle, key, digest(prompt), {to, std::move(first)},
                         packer->capture(after).value(), now, core->actions());
    return {next_handle++, transfer};
  }
  void cancel(TransferId transfer) { core->gate().cancel(transfer, now, core->actions()); }

  bool turn(TimeUs at) {
    now = at;
    const bool progressed = core->turn(at);
    for (auto& event : core->take_events()) {
      if (event.kind == protocol::Event::Kind::kLost) {
        lost.push_back(event.session);
      } else {
        ends[event.handle].push_back(event);
      }
      fresh.push_back(std::move(event));
    }
    return progressed;
  }
  /// "" while the handle is open; "sent", "received", or the code of its failure. "twice" must never be seen.
  [[nodiscard]] std::string end_of(HandleId handle) const {
    const auto found = ends.find(handle);
    if (found == ends.end()) return "";
    if (found->second.size() > 1) return "twice";
    const auto& event = found->second[0];
    if (event.kind == protocol::Event::Kind::kSent) return "sent";
    return event.kind == protocol::Event::Kind::kReceived ? "received" : std::string(to_string(event.status));
  }

  Cache cache;
  std::vector<std::unique_ptr<Bytes>> memory;
  End end;
  std::vector<std::unique_ptr<End>> others;  ///< further transports of the core
  std::unique_ptr<FencedPacker> packer;
  LazyPacker* lazy_packer = nullptr;  ///< within it, if lazy
  Incarnation incarnation;
  std::unique_ptr<Core> core;
  HandleId next_handle = 1;
  TransferId next_transfer = 1;
  TimeUs now = 0;
  std::map<HandleId, std::vector<protocol::Event>> ends;
  std::vector<SessionId> lost;
  std::vector<protocol::Event> fresh;  ///< since the test last looked
};

struct World {
  Net net;
  std::vector<std::unique_ptr<Node>> nodes;
  TimeUs now = 1'000'000;
  TimeUs step_us = 200;

  Node& add(const std::vector<GroupShape>& shapes = {{}}, const CoreConfig& config = small_config(),
            bool lazy = false) {
    nodes.push_back(std::make_unique<Node>(net, shapes, config, lazy, now));
    nodes.back()->now = now;
    return *nodes.back();
  }
  SessionId connect(Node& d, Node& p, const Core::Choice& choice = {}) {
    const auto offer = d.core->offer(now, choice);
    if (!CHECK(offer.ok())) return {};
    const auto answer = p.core->answer(offer.value(), now);
    if (!CHECK(answer.ok())) return {};
    const auto session = d.core->establish(answer.value(), now);
    CHECK(session.ok());
    return session.ok() ? session.value() : SessionId{};
  }
  void step() {
    now += step_us;
    ++net.round;
    for (const auto& node : nodes) node->turn(now);
  }
  void run_for(TimeUs us) {
    for (const TimeUs until = now + us; now < until;) step();
  }
  /// Steps until the condition holds, for `us` at most.
  template <typename Condition>
  bool run_until(Condition condition, TimeUs us = 200'000) {
    for (const TimeUs until = now + us; now < until && !condition();) step();
    return condition();
  }
};

}  // namespace kvpush::fake
