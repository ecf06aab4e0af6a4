// Depth first, by replay: an engine cannot be copied, but the same choices lead to the same state.
#include "exhaustive.hpp"

#include <cstdio>
#include <string>
#include <unordered_set>
#include <vector>

#include "sim_world.hpp"

namespace kvpush::sim {
namespace {

constexpr std::uint8_t kPing = 9;
constexpr std::size_t kTypeAt = 5;

struct Choice {
  enum class Kind : std::uint8_t {
    kDeliver,
    kCallD,
    kCallP,
    kDrop,
    kDuplicate,
    kCancel,
    kAbort,
    kRetract,
    kEvict,
    kBye
  };
  Kind kind = Kind::kDeliver;
  std::uint32_t index = 0;
};
constexpr const char* kKindNames[] = {"deliver", "D calls", "P calls", "drop",  "duplicate",
                                      "cancel",  "abort",   "retract", "evict", "disconnect"};

struct Setting {
  const char* name;
  std::size_t num_transfers;
  std::size_t blocks_each;
  bool mapped;
  bool intent;
};

/// One D, one P, two slots, one box per block. Time stands still until nothing is left to choose.
class SmallWorld final : public SimWorld {
 public:
  explicit SmallWorld(const Setting& setting) : SimWorld(1, WorldKind::kCalm), setting_(setting) {
    net_.mapped = setting.mapped;
    net_.revokes = net_.tells_close = true;
    net_.reorder = net_.trouble = false;
    lazy_ = holes_ = partial_ = 0;
    shapes_ = {GroupShape{{PlaneShape{1, 1, 24, false, 0, 0}}, 8}};
    config_.slot_bytes = 24;
    config_.num_slots = 2;
    config_.num_leases = 2;
    add_node();
    add_node();
    session_ = connect(0, 1);
    for (int i = 0; i < 3; ++i) step(200);
    net_.hold = true;
  }

  [[nodiscard]] std::vector<Choice> choices() const {
    using Kind = Choice::Kind;
    std::vector<Choice> all;
    const auto num_held = static_cast<std::uint32_t>(net_.held.size());
    for (std::uint32_t i = 0; i < num_held; ++i) all.push_back({Kind::kDeliver, i});
    const std::size_t d_calls = setting_.num_transfers * (setting_.intent ? 2U : 1U);
    if (d_called_ < d_calls) all.push_back({Kind::kCallD, 0});
    if (p_called_ < setting_.num_transfers * (2 + setting_.blocks_each)) all.push_back({Kind::kCallP, 0});
    // The end of a life is not a time for a fault: nothing is left that it could change.
    if (faulted_ || all.empty()) return all;
    for (std::uint32_t i = 0; i < num_held; ++i) {
      all.push_back({Kind::kDrop, i});
      all.push_back({Kind::kDuplicate, i});
    }
    if (!receives_.empty() || !claims_.empty()) all.push_back({Kind::kCancel, 0});
    if (!pushes_.empty()) {
      for (const Kind kind : {Kind::kAbort, Kind::kRetract, Kind::kEvict}) all.push_back({kind, 0});
    }
    all.push_back({Kind::kBye, 0});
    all.push_back({Kind::kBye, 1});
    return all;
  }

  void take(const Choice& choice) {
    using Kind = Choice::Kind;
    faulted_ |= choice.kind >= Kind::kDrop;
    std::size_t who = 1;
    switch (choice.kind) {
      case Kind::kDeliver:
      case Kind::kDuplicate: {
        Packet packet = net_.held[choice.index];
        if (choice.kind == Kind::kDeliver) net_.held.erase(net_.held.begin() + choice.index);
        who = packet.to_d ? 0 : 1;
        packet.due = net_.now;
        net_.hand_out(packet);
        remember(who, packet.bytes);
        break;
      }
      case Kind::kDrop:
        remember(0, net_.held[choice.index].bytes);
        net_.held.erase(net_.held.begin() + choice.index);
        break;
      case Kind::kCallD: call_d(), who = 0; break;
      case Kind::kCallP: call_p(); break;
      case Kind::kCancel:
        who = 0;
        if (receives_.empty()) {
          node(0).core->gate().cancel(claims_[0].transfer, net_.now, node(0).core->actions());
        } else {
          cancel(receives_[0]);
        }
        break;
      case Kind::kAbort: abort(pushes_[0]); break;
      case Kind::kRetract: retract(pushes_[0]); break;
      case Kind::kEvict: node(1).core->sender().evict(1, net_.now, node(1).core->actions()); break;
      case Kind::kBye:
        who = choice.index;
        (void)node(who).core->disconnect(session_, net_.now);
        break;
    }
    mix(who, 1000 + static_cast<std::uint64_t>(choice.kind) + (choice.kind == Kind::kDuplicate ? 31 : 0));
    turn(who);
  }

  /// Two histories with the same input to each engine, in the same order, are one state.
  [[nodiscard]] std::uint64_t key() const { return inputs_[0] * 0x9e3779b97f4a7c15U ^ inputs_[1]; }

  void finish_all() {
    net_.hold = false;
    run();
  }

 private:
  void live() override {}

  void mix(std::size_t who, std::uint64_t value) { inputs_[who] = (inputs_[who] ^ value) * 1099511628211U; }
  void remember(std::size_t who, const Bytes& bytes) {
    for (const std::byte byte : bytes) mix(who, static_cast<std::uint64_t>(byte));
  }
  void turn(std::size_t who) {
    for (int i = 0; i < 3; ++i) {
      node(who).core->turn(net_.now);
      for (const protocol::Event& event : node(who).core->take_events()) took(who, event);
    }
    step_pushes();
    std::erase_if(net_.held, [](const Packet& packet) {
      return !packet.is_notice && std::to_integer<std::uint8_t>(packet.bytes[kTypeAt]) == kPing;
    });
  }
  static std::string key_of(std::size_t i) { return "key " + std::to_string(i + 1); }

  void call_d() {
    const std::size_t per = setting_.intent ? 2 : 1;
    const std::size_t i = d_called_ / per;
    if (setting_.intent && d_called_ % 2 == 0) {
      claims_.push_back(expect(0, session_, key_of(i), i + 1));
    } else {
      TransferId claim = 0;
      if (!claims_.empty()) {
        claim = claims_[0].transfer;
        claims_.clear();
      }
      receive(0, session_, key_of(i), i + 1, {setting_.blocks_each}, claim, false);
    }
    ++d_called_;
  }
  void call_p() {
    const std::size_t per = 2 + setting_.blocks_each;
    const std::size_t i = p_called_ / per;
    const std::size_t what = p_called_ % per;
    if (what == 0) {
      begin_push(1, key_of(i), i + 1, {setting_.blocks_each});
    } else if (what < per - 1) {
      advance(pushes_[i], 1);
    } else {
      advance(pushes_[i], 100);
      finish(pushes_[i]);
    }
    ++p_called_;
  }

  Setting setting_;
  SessionId session_;
  std::size_t d_called_ = 0;
  std::size_t p_called_ = 0;
  bool faulted_ = false;
  std::uint64_t inputs_[2] = {1, 2};
};

bool explore(const Setting& setting, std::size_t max_states) {
  std::vector<std::vector<Choice>> todo = {{}};
  std::unordered_set<std::uint64_t> seen;
  std::size_t num_lives = 0;
  std::vector<Choice> path;
  try {
    while (!todo.empty() && seen.size() < max_states) {
      // Last in, first out, but every other time from the middle: a bounded search sees both ends of the
      // tree.
      if (num_lives % 2 == 0) std::swap(todo[todo.size() / 2], todo.back());
      path = std::move(todo.back());
      todo.pop_back();
      SmallWorld world(setting);
      for (const Choice& choice : path) world.take(choice);
      while (seen.insert(world.key()).second) {
        const std::vector<Choice> choices = world.choices();
        if (choices.empty()) {
          ++num_lives;
          world.finish_all();
          break;
        }
        for (std::size_t i = 1; i < choices.size(); ++i) {
          todo.push_back(path);
          todo.back().push_back(choices[i]);
        }
        path.push_back(choices[0]);
        world.take(choices[0]);
      }
    }
  } catch (const std::exception& error) {
    std::printf("%s: %s, after:\n", setting.name, error.what());
    for (const Choice& choice : path) {
      std::printf("  %s %u\n", kKindNames[static_cast<std::size_t>(choice.kind)], choice.index);
    }
    return false;
  }
  std::printf("%s: %zu states, %zu lives%s\n", setting.name, seen.size(), num_lives,
              todo.empty() ? ", all" : ", bounded");
  std::fflush(stdout);
  return true;
}

}  // namespace

bool explore_all(std::size_t most) {
  const Setting settings[] = {
      {"one transfer of one box", 1, 1, false, true},
      {"one transfer of one box, mapped slots", 1, 1, true, true},
      {"one transfer of two boxes", 1, 2, false, false},
      {"one transfer of two boxes, mapped slots", 1, 2, true, false},
      {"two transfers of one box", 2, 1, false, false},
  };
  bool ok = true;
  for (const Setting& setting : settings) ok &= explore(setting, most);
  return ok;
}

}  // namespace kvpush::sim
