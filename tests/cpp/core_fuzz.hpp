// A random life of a few engines: pushes, receives and everything that can happen to them, by one seed.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core_world.hpp"

namespace kvpush::fake {

/// Prompts are numbers; their KV is Node::content(). Sources and destinations come out of one free list per
/// node and group; a block that nobody owns holds kFree, and must go on holding it.
class Fuzz {
 public:
  explicit Fuzz(std::uint64_t seed) : random_(seed) {
    world_.net.random.seed(seed + 1);
    Net& net = world_.net;
    net.mapped = chance(0.5);
    net.proves_quiet = chance(0.5);
    net.tells_close = chance(0.5);
    net.again = chance(0.3) ? 0.1 : 0;
    net.reorder = chance(0.5);
    if (chance(0.5)) net.delay = net.duplicate = 0.2;
    if (chance(0.3)) net.drop = 0.01;
    if (chance(0.2)) {
      net.fate = [this](TicketId) {
        if (!faulty_ || !chance(0.01)) return Fate::kCompleted;
        return chance(0.5) ? Fate::kFailed : Fate::kUnknown;
      };
    }
    CoreConfig config = small_config();
    config.num_slots = static_cast<std::uint32_t>(1 + below(8));
    config.num_leases = 1 + below(6);
    const std::vector<GroupShape> shapes = {{static_cast<std::int64_t>(1 + below(9)), 40, 64}, {1, 90, 64}};
    for (std::uint64_t n = 2 + below(2); n > 0; --n) {
      world_.add(shapes, config, chance(0.5));
      for (auto& ids : free_.emplace_back(shapes.size())) {
        for (std::int32_t block = 0; block < 64; ++block) ids.insert(block);
      }
    }
  }

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      for (std::uint64_t n = below(4); n > 0; --n) act();
      step();
    }
    // Nothing new, nothing broken any more: everything must end.
    faulty_ = false;
    world_.net.drop = world_.net.again = 0;
    for (Push& push : pushes_) {
      if (push.open && !push.fenced) node(push.node).finish(push.handle);
    }
    for (const Claim& claim : claims_) node(claim.node).cancel(claim.transfer);
    const auto open = [this] {
      bool any = false;
      for (const Push& push : pushes_) any |= push.open;
      for (const Receive& receive : receives_) any |= receive.open;
      return any;
    };
    for (int i = 0; i < 2000 && open(); ++i) step();
    ok &= CHECK(!open());
    for (int i = 0; i < 200; ++i) step();
    check_quiet();
  }

  bool ok = true;
  std::uint64_t num_received = 0;
  std::uint64_t num_sent = 0;

 private:
  struct Session {
    std::size_t d;
    std::size_t p;
    SessionId id;
  };
  struct Push {
    std::size_t node;
    HandleId handle;
    std::uint64_t prompt;
    BlockTable blocks;
    std::vector<std::size_t> advanced;
    bool finished = false;
    bool fenced = false;
    bool open = true;
  };
  struct Claim {
    std::size_t node;
    SessionId session;
    TransferId transfer;
    std::uint64_t prompt;
  };
  struct Receive {
    std::size_t node;
    HandleId handle;
    TransferId transfer;
    std::uint64_t prompt;
    BlockTable blocks;
    std::vector<std::uint32_t> first;
    bool open = true;
  };

  bool chance(double rate) { return std::uniform_real_distribution<>(0, 1)(random_) < rate; }
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  Node& node(std::size_t n) { return *world_.nodes[n]; }
  static std::string key_of(std::uint64_t prompt) { return "key " + std::to_string(prompt); }

  std::vector<std::int32_t> take(std::size_t n, std::size_t group, std::size_t num) {
    std::set<std::int32_t>& free = free_[n][group];
    std::vector<std::int32_t> ids;
    while (ids.size() < num && !free.empty()) {
      auto it = free.lower_bound(static_cast<std::int32_t>(below(64)));
      if (it == free.end()) it = free.begin();
      ok &= CHECK(node(n).is_wiped(group, *it));
      ids.push_back(*it);
      free.erase(it);
    }
    return ids;
  }
  /// What the caller owns again, no pack or unpack may touch.
  void expect_unused(std::size_t n, std::size_t group, std::int32_t block) {
    const auto* lazy = dynamic_cast<const LazyPacker*>(node(n).packer.get());
    ok &= CHECK(lazy == nullptr || !lazy->uses(group, block));
  }
  void give_back(std::size_t n, const BlockTable& blocks) {
    for (std::size_t g = 0; g < blocks.size(); ++g) {
      for (const std::int32_t block : blocks[g]) {
        if (block < 0) continue;
        expect_unused(n, g, block);
        node(n).wipe(g, block);
        ok &= CHECK(free_[n][g].insert(block).second);
      }
    }
  }

  void act() {
    switch (below(12)) {
      case 0: return connect();
      case 1: return begin_push();
      case 2:
      case 3: return begin_receive();
      case 4:
      case 5:
      case 6: return with_push([this](Push& push) { advance(push); });
      case 7:
        return with_push([this](Push& push) {
          if (push.finished || push.fenced) return;
          while (chance(0.95)) advance(push);
          push.finished = true;
          node(push.node).finish(push.handle);
        });
      case 8:
        if (chance(0.7)) return;
        return with_push([this](Push& push) { node(push.node).abort(push.handle); });
      case 9:
        return with_push([this](Push& push) {
          if (chance(0.5)) return;
          node(push.node).core->sender().fence(push.handle);
          push.fenced = true;
        });
      case 10: return cancel_something();
      default: break;
    }
    if (chance(0.9)) return;
    Node& some = node(below(world_.nodes.size()));
    if (chance(0.5)) some.core->sender().evict(1, world_.now, some.core->actions());
    if (chance(0.2) && !sessions_.empty()) {
      const Session& session = sessions_[below(sessions_.size())];
      (void)node(chance(0.5) ? session.d : session.p).core->disconnect(session.id, world_.now);
    }
  }

  void connect() {
    if (sessions_.size() >= 4) return;
    const std::size_t d = below(world_.nodes.size());
    const std::size_t p = (d + 1 + below(world_.nodes.size() - 1)) % world_.nodes.size();
    sessions_.push_back({d, p, world_.connect(node(d), node(p))});
  }

  void begin_push() {
    const std::size_t n = below(world_.nodes.size());
    Push push{n, 0, next_prompt_++, {}, {}};
    for (std::size_t g = 0; g < 2; ++g) {
      push.blocks.push_back(take(n, g, below(12)));
      for (std::int32_t& block : push.blocks[g]) {
        if (!chance(0.005)) continue;
        free_[n][g].insert(block);
        block = -1;
      }
      push.advanced.push_back(0);
    }
    push.handle = node(n).push(key_of(push.prompt), push.prompt);
    pushes_.push_back(std::move(push));
  }

  /// Of a push that may or may not be there (yet, still), over a session that may have ended.
  void begin_receive() {
    if (sessions_.empty()) return;
    const Session& session = sessions_[below(sessions_.size())];
    std::uint64_t prompt = next_prompt_;
    std::vector<std::size_t> sizes = {below(12), below(12)};
    for (const Push& push : pushes_) {
      if (push.node != session.p || !chance(push.open ? 0.5 : 0.02)) continue;
      prompt = push.prompt;
      if (chance(0.9)) sizes = {push.blocks[0].size(), push.blocks[1].size()};
    }
    Node& d = node(session.d);
    if (chance(0.3)) {
      claims_.push_back({session.d, session.id, d.expect(session.id, key_of(prompt)), prompt});
      return;
    }
    TransferId claim = 0;
    SessionId id = session.id;
    std::size_t n = session.d;
    if (!claims_.empty() && chance(0.5)) {
      const Claim used = claims_.back();
      claims_.pop_back();
      claim = used.transfer;
      id = used.session;
      n = used.node;
      prompt = used.prompt;
    }
    Receive receive{n, 0, 0, prompt, {}, {}};
    for (std::size_t g = 0; g < 2; ++g) {
      const auto first = sizes[g] == 0 ? 0 : below(sizes[g]);
      receive.first.push_back(static_cast<std::uint32_t>(first));
      receive.blocks.push_back(take(n, g, sizes[g] - first));
    }
    const std::uint64_t digest = chance(0.05) ? prompt + 1 : prompt;
    std::tie(receive.handle, receive.transfer) =
        node(n).receive(id, key_of(prompt), digest, receive.blocks, receive.first, claim);
    receives_.push_back(std::move(receive));
  }

  template <typename Do>
  void with_push(Do act_on) {
    if (pushes_.empty()) return;
    Push& push = pushes_[below(pushes_.size())];
    if (push.open) act_on(push);
  }

  void advance(Push& push) {
    if (push.finished || push.fenced) return;
    BlockTable ids(2);
    for (std::size_t g = 0; g < 2; ++g) {
      for (std::uint64_t n = below(6); n > 0 && push.advanced[g] < push.blocks[g].size(); --n) {
        const std::int32_t block = push.blocks[g][push.advanced[g]];
        const auto pos = static_cast<std::uint32_t>(push.advanced[g]++);
        if (block >= 0) node(push.node).write(g, block, push.prompt, pos);
        ids[g].push_back(block);
      }
    }
    node(push.node).advance(push.handle, ids);
  }

  void cancel_something() {
    if (!claims_.empty() && chance(0.3)) {
      node(claims_.back().node).cancel(claims_.back().transfer);
      claims_.pop_back();
    } else if (!receives_.empty() && chance(0.5)) {
      const Receive& receive = receives_[below(receives_.size())];
      node(receive.node).cancel(receive.transfer);
    }
  }

  void step() {
    world_.step();
    for (Push& push : pushes_) {
      if (push.open && push.fenced) unfence(push);
    }
    for (std::size_t n = 0; n < world_.nodes.size(); ++n) {
      for (const auto& event : std::exchange(node(n).fresh, {})) took(n, event);
    }
  }

  /// The fence is over: whatever was advanced may be overwritten, and goes on where the engine says.
  void unfence(Push& push) {
    protocol::Sender& sender = node(push.node).core->sender();
    if (!sender.quiescent(push.handle)) return;
    const auto positions = sender.resume(push.handle);
    push.fenced = push.finished = false;
    for (std::size_t g = 0; g < 2; ++g) {
      ok &= CHECK(positions[g] <= push.advanced[g]);
      push.advanced[g] = positions[g];
      for (const std::int32_t block : push.blocks[g]) {
        if (block < 0) continue;
        expect_unused(push.node, g, block);
        node(push.node).wipe(g, block);
      }
    }
    if (!faulty_) node(push.node).finish(push.handle);
  }

  void took(std::size_t n, const protocol::Event& event) {
    if (event.kind == protocol::Event::Kind::kLost) {
      std::erase_if(sessions_, [&](const Session& session) { return session.id == event.session; });
      return;
    }
    ok &= CHECK_EQ(node(n).ends.at(event.handle).size(), 1U);
    for (Push& push : pushes_) {
      if (push.node != n || push.handle != event.handle) continue;
      push.open = false;
      give_back(n, push.blocks);
      if (event.kind == protocol::Event::Kind::kSent) ++num_sent;
    }
    for (Receive& receive : receives_) {
      if (receive.node != n || receive.handle != event.handle) continue;
      receive.open = false;
      for (std::size_t g = 0; g < 2 && event.kind == protocol::Event::Kind::kReceived; ++g) {
        for (std::size_t i = 0; i < receive.blocks[g].size(); ++i) {
          const auto pos = receive.first[g] + static_cast<std::uint32_t>(i);
          ok &= CHECK(node(n).holds(g, receive.blocks[g][i], receive.prompt, pos));
        }
      }
      give_back(n, receive.blocks);
      if (event.kind == protocol::Event::Kind::kReceived) ++num_received;
    }
  }

  void check_quiet() {
    std::uint64_t sessions_of_p = 0;
    std::uint64_t credits = 0;
    std::uint64_t slots = 0;
    for (std::size_t n = 0; n < world_.nodes.size(); ++n) {
      const Stats stats = node(n).core->stats();
      ok &= CHECK_EQ(stats.open_pushes, 0U);
      ok &= CHECK_EQ(stats.open_claims, 0U);
      ok &= CHECK_EQ(stats.open_receives, 0U);
      ok &= CHECK_EQ(stats.leases_in_use, 0U);
      ok &= CHECK_EQ(stats.breaches, 0U);
      ok &= CHECK(node(n).core->quiet());
      credits += stats.credits;
      slots += stats.landing_bytes / 400;
      sessions_of_p += stats.sessions;
      for (std::size_t g = 0; g < 2; ++g) {
        ok &= CHECK_EQ(free_[n][g].size(), 64U);
        for (const std::int32_t block : free_[n][g]) ok &= CHECK(node(n).is_wiped(g, block));
      }
    }
    ok &= CHECK_EQ(credits, slots);
    ok &= CHECK_EQ(sessions_of_p % 2, 0U);  // both ends, or neither
    ok &= CHECK_EQ(world_.net.num_wild_writes, 0U);
  }

  std::mt19937_64 random_;
  World world_;
  std::vector<std::vector<std::set<std::int32_t>>> free_;  ///< per node and group
  std::vector<Session> sessions_;
  std::vector<Push> pushes_;
  std::vector<Claim> claims_;
  std::vector<Receive> receives_;
  std::uint64_t next_prompt_ = 1;
  bool faulty_ = true;
};

}  // namespace kvpush::fake
