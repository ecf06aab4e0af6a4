// What callers do in each world.
#include <algorithm>
#include <set>
#include <utility>

#include "sim_world.hpp"

namespace kvpush::sim {
namespace {

/// Everything, at any time, in any order, but most callers know what they do. Calm: only what must not make
/// anything fail. Liars: calm, and peers that say what is not so; sessions without a lie must not feel it.
class RandomLife final : public SimWorld {
 public:
  RandomLife(std::uint64_t seed, WorldKind kind) : SimWorld(seed, kind) {
    Dice& luck = dice();
    calm_ = lossless_ = kind == WorldKind::kCalm || kind == WorldKind::kLiars;
    wild_ = luck.chance(0.2) ? 0.2 : 0.03;
    Faults& faults = net_.faults;
    const auto maybe = [&luck](double how_often, double rate) { return luck.chance(how_often) ? rate : 0; };
    faults.duplicate = maybe(0.5, 0.1);
    faults.delay = maybe(0.5, 0.2);
    faults.again = maybe(0.3, 0.15);
    if (calm_) {
      for (GroupShape& shape : shapes_) shape.num_blocks = 240;
      if (kind == WorldKind::kLiars) faults.lie = luck.chance(0.5) ? 0.03 : 0.005;
      config_.timeouts.pairing_us = config_.timeouts.claim_us = 400'000;
      config_.timeouts.unclaimed_us = config_.timeouts.progress_us = 400'000;
    } else {
      for (GroupShape& shape : shapes_) shape.num_blocks = 120;
      faults.drop = maybe(0.3, 0.001);
      faults.truncate = maybe(0.1, 0.002);
      faults.corrupt = maybe(0.15, 0.002);
      faults.corrupt_data = maybe(0.2, 0.01);
      faults.stray = maybe(0.3, 0.05);
      faults.post_fails = maybe(0.2, 0.005);
      faults.post_unknown = maybe(0.2, 0.005);
      faults.lie = maybe(0.15, 0.01);
      if (luck.chance(0.1)) faults.max_delay_us = 15'000;
      crash_ = maybe(0.3, 0.003);
      pack_fails_ = maybe(0.15, 0.01);
    }
    num_keys_ = kind == WorldKind::kRetry ? 2 : 1000;
    // By the seed, as in SimWorld().
    fences_ = seed % 16 == 2 || seed % 16 == 4 || seed % 16 == 9 || seed % 16 == 12 || seed % 32 == 13;
    for (std::uint64_t n = 2 + luck.below(3); n > 0; --n) add_node();
  }

 private:
  struct Offer {
    std::size_t d;
    std::size_t p;
    Bytes offer;
    Bytes answer;
  };

  void live() override {
    const std::uint64_t num_steps = 60 + dice().below(180);
    for (std::uint64_t i = 0; i < num_steps; ++i) {
      for (std::uint64_t n = dice().below(4); n > 0; --n) act();
      if (!calm_ && dice().chance(crash_)) crash(dice().below(nodes_.size()));
      if (dice().chance(0.01)) sleep();
      step(static_cast<TimeUs>(50 + dice().below(350)));
    }
    // In the end every receive gets its push, and every push its receive.
    for (const Claim& claim : std::exchange(claims_, {})) open(claim);
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const Receive wanted = receives_[i];
      const bool there = std::ranges::any_of(
          pushes_, [&](const Push& push) { return push.key == wanted.key && (calm_ || push.open); });
      if (wanted.open && !there && sizes_.contains(wanted.prompt) && tame())
        begin_push(from_.at(wanted.key), wanted.key, wanted.prompt, sizes_.at(wanted.prompt));
    }
    for (std::size_t i = 0; i < pushes_.size(); ++i) {
      const Push push = pushes_[i];
      const auto link = std::ranges::find_if(links_, [&](const Link& l) { return l.p == push.node; });
      const bool wanted = std::ranges::any_of(
          receives_, [&](const Receive& r) { return r.key == push.key && (calm_ || r.open); });
      if (push.open && !wanted && tame() && link != links_.end())
        receive(link->d, link->id, push.key, push.prompt, sizes_.at(push.prompt), 0, false);
    }
  }

  void act() {
    switch (dice().below(16)) {
      case 0: return hand_shake();
      case 1:
      case 2: return push_something();
      case 3:
      case 4:
      case 5: return receive_something();
      case 6:
      case 7:
      case 8: return with_push([this](Push& push) { advance(push, 1 + dice().below(5)); });
      case 9:
      case 10:
        return with_push([this](Push& push) {
          if (tame()) advance(push, 1000);
          finish(push);
        });
      case 11:
        return with_push([this](Push& push) {
          if (dice().chance(0.3)) retract(push);
        });
      default: break;
    }
    if (!calm_) disturb();
  }

  bool tame() { return calm_ || !dice().chance(wild_); }

  void disturb() {
    SimNode& some = node(dice().below(nodes_.size()));
    const std::uint64_t what = dice().below(12);
    if (what < 7 && tame()) return;
    switch (what) {
      case 0:
        return with_push([this](Push& push) {
          if (dice().chance(0.3)) abort(push);
        });
      case 1:
        if (!receives_.empty()) cancel(receives_[dice().below(receives_.size())]);
        return;
      case 4:
        if (claims_.empty()) return;
        node(claims_.back().node)
            .core->gate()
            .cancel(claims_.back().transfer, net_.now, node(claims_.back().node).core->actions());
        claims_.pop_back();
        return;
      case 5:
        return dice().chance(0.3) ? some.core->sender().evict(1, net_.now, some.core->actions()) : void();
      case 6:
        if (links_.empty() || !dice().chance(0.1)) return;
        {
          const Link link = links_[dice().below(links_.size())];
          note("disconnect");
          net_.count("disconnect");
          (void)node(dice().chance(0.5) ? link.d : link.p).core->disconnect(link.id, net_.now);
        }
        return;
      case 7:
        if (dice().chance(0.5)) some.end->blocked_until = net_.now + static_cast<TimeUs>(dice().below(6000));
        return;
      case 8:
        if (dice().chance(0.1) && !links_.empty() && !tame()) {
          const Link link = links_[dice().below(links_.size())];
          net_.count("transport loses a session");
          node(link.d).end->losses.emplace_back(net_.now, link.id);
          note("the transport loses a session");
        }
        return;
      case 9: some.packer->held = dice().chance(0.2); return;
      default: some.packer->held = false; return;
    }
  }

  /// In one go, or in pieces that may come late, damaged, twice, or never.
  void hand_shake() {
    std::size_t d = dice().below(nodes_.size());
    std::size_t p = (d + 1 + dice().below(nodes_.size() - 1)) % nodes_.size();
    if (calm_ || dice().chance(0.5)) {
      const auto num = std::ranges::count_if(links_, [&](const Link& l) { return l.d == d && l.p == p; });
      if (links_.size() < 5 && num < 3) connect(d, p);
      return;
    }
    if (offers_.size() < 3 && dice().chance(0.4)) {
      auto offer = node(d).core->offer(net_.now);
      if (offer.ok()) offers_.push_back({d, p, std::move(offer).value(), {}});
      return;
    }
    if (offers_.empty()) return;
    const std::size_t which = dice().below(offers_.size());
    Offer& offer = offers_[which];
    if (dice().chance(0.1)) {
      Bytes damaged = offer.answer.empty() ? offer.offer : offer.answer;
      damaged[dice().below(damaged.size())] ^= std::byte{4};
      const bool taken = offer.answer.empty() ? node(offer.p).core->answer(damaged, net_.now).ok()
                                              : node(offer.d).core->establish(damaged, net_.now).ok();
      require(!taken, "a damaged hand-shake was taken");
    } else if (dice().chance(0.2)) {
      require(node(offer.d).core->withdraw(offer.offer, net_.now).ok() ||
                  node(offer.d).incarnation != made_by(offer),
              "an offer could not be withdrawn");
      if (dice().chance(0.5)) offers_.erase(offers_.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (offer.answer.empty()) {
      auto answer = node(offer.p).core->answer(offer.offer, net_.now);
      if (answer.ok()) offer.answer = std::move(answer).value();
    } else {
      const auto session = node(offer.d).core->establish(offer.answer, net_.now);
      if (session.ok()) links_.push_back({offer.d, offer.p, session.value()});
      if (dice().chance(0.8)) offers_.erase(offers_.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  static Incarnation made_by(const Offer& offer) { return decode_offer(offer.offer).value().engine; }

  /// A prompt that was named before, or a new one. Its key, and how many blocks it has.
  std::uint64_t some_prompt() {
    if (!sizes_.empty() && (kind_ == WorldKind::kRetry ? dice().chance(0.6) : !tame())) {
      auto it = sizes_.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(sizes_.size() - 1 -
                                                   dice().below(std::min<std::size_t>(sizes_.size(), 4))));
      return it->first;
    }
    if (kind_ == WorldKind::kRetry && sizes_.size() >= 6) return sizes_.rbegin()->first;
    const std::uint64_t prompt = sizes_.size() + 1;
    for (std::size_t g = 0; g < shapes_.size(); ++g) sizes_[prompt].push_back(dice().below(9));
    return prompt;
  }
  std::string key_of(std::uint64_t prompt) const { return "key " + std::to_string(prompt % num_keys_); }

  void push_something() {
    const bool sane = tame();
    std::uint64_t prompt = some_prompt();
    if (kind_ == WorldKind::kRetry && sane) {
      for (const Receive& r : receives_) {
        if (r.open && r.key == key_of(prompt) && sizes_.contains(r.prompt)) prompt = r.prompt;
      }
      for (const Claim& claim : claims_) {
        if (claim.key == key_of(prompt)) prompt = claim.prompt;
      }
    }
    std::size_t n = dice().below(nodes_.size());
    if (const auto known = from_.find(key_of(prompt)); known != from_.end() && sane) n = known->second;
    if (sane) {
      if (links_.empty() || too_full(n)) return;
      // Of a prompt that somebody can still want.
      if (std::ranges::none_of(links_, [&](const Link& link) { return link.p == n; })) return;
    }
    // The engine refuses a second open push of a key.
    if (std::ranges::any_of(pushes_, [&](const Push& push) {
          return push.open && push.node == n && push.key == key_of(prompt);
        }))
      return;
    from_[key_of(prompt)] = n;
    Push& push = begin_push(n, key_of(prompt), prompt, sizes_.at(prompt));
    if (tame()) return;
    for (std::size_t g = 0; g < shapes_.size(); ++g) {
      for (std::int32_t& block : push.blocks[g]) {
        if (!dice().chance(0.2)) continue;
        node(n).owner[g][static_cast<std::size_t>(block)] = Owner::kNobody;
        node(n).free[g].push_back(block);
        block = -1;
      }
    }
  }
  /// In a calm world nothing may fail for want of blocks.
  bool too_full(std::size_t n) {
    const std::size_t room = calm_ ? 100 : 10;
    return std::ranges::any_of(node(n).free, [room](const auto& list) { return list.size() < room; });
  }
  bool asked(const Push& push) const {
    if (kind_ != WorldKind::kRetry) return asked_.contains(push.key);
    return std::ranges::any_of(receives_, [&](const Receive& r) { return r.open && r.key == push.key; }) ||
           std::ranges::any_of(claims_, [&](const Claim& claim) { return claim.key == push.key; });
  }

  void receive_something() {
    if (links_.empty()) return;
    const Link link = links_[dice().below(links_.size())];
    const bool sane = tame();
    if (!claims_.empty() && dice().chance(0.5)) {
      const Claim claim = claims_.back();
      if (sane && too_full(claim.node)) return;
      claims_.pop_back();
      return open(claim);
    }
    std::uint64_t prompt = 0;
    for (const Push& push : pushes_) {
      if (push.node != link.p || !dice().chance(push.open ? 0.5 : 0.02)) continue;
      if (sane && (!push.open || asked(push))) continue;
      prompt = push.prompt;
    }
    if (prompt == 0) {
      prompt = some_prompt();
      if (sane && from_.contains(key_of(prompt))) return;
      from_.try_emplace(key_of(prompt), link.p);
    }
    if (sane && (too_full(link.d) || claims_.size() + num_open_receives() > 10)) return;
    asked_.insert(key_of(prompt));
    if (dice().chance(0.4)) {
      claims_.push_back(expect(link.d, link.id, key_of(prompt), prompt));
    } else {
      receive(link.d, link.id, key_of(prompt), prompt, wanted(prompt), 0, !tame());
    }
  }
  /// Each is owed a push, which must find room at the end of this life.
  std::size_t num_open_receives() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(receives_, [](const Receive& r) { return r.open; }));
  }
  void open(const Claim& claim) {
    receive(claim.node, claim.session, claim.key, claim.prompt, wanted(claim.prompt), claim.transfer, false);
  }
  std::vector<std::size_t> wanted(std::uint64_t prompt) {
    std::vector<std::size_t> sizes = sizes_.at(prompt);
    if (!tame()) ++sizes[dice().below(sizes.size())];
    return sizes;
  }

  template <typename Do>
  void with_push(Do act_on) {
    if (pushes_.empty()) return;
    Push& push = pushes_[pushes_.size() - 1 - dice().below(std::min<std::size_t>(pushes_.size(), 8))];
    if (push.open) act_on(push);
  }

  /// One engine, or all, take no turn for a while. A calm world's sleeper wakes before its peers give it up.
  void sleep() {
    const TimeUs peer = config_.timeouts.peer_us;
    if (dice().chance(0.3)) {
      note("everybody sleeps");
      net_.count("all sleep");
      net_.now += 5 * peer / 2;
      return;
    }
    for (const auto& one : nodes_) {
      if (one->asleep_until + peer > net_.now) return;
    }
    net_.count("sleep");
    const TimeUs most = tame() ? peer / 2 : 2 * peer;
    node(dice().below(nodes_.size())).asleep_until =
        net_.now + static_cast<TimeUs>(dice().below(static_cast<std::uint64_t>(most)));
  }

  void crash(std::size_t n) {
    note("crash " + std::to_string(n));
    net_.count("crash");
    ++num_crashes_;
    net_.died(*node(n).end);
    for (Push& push : pushes_) {
      if (push.node == n) push.open = false, push.ended_at = -1;
    }
    for (Receive& receive : receives_) {
      if (receive.node == n) receive.open = false, receive.ended_at = -1;
    }
    std::erase_if(claims_, [n](const Claim& claim) { return claim.node == n; });
    std::erase_if(forwards_, [n](const Forward& forward) { return forward.node == n; });
    std::erase_if(links_, [n](const Link& link) { return link.d == n || link.p == n; });
    dead_.push_back(std::move(nodes_[n]));
    dead_.back()->core.reset();
    add_node();
    std::swap(nodes_[n], nodes_.back());
    nodes_.pop_back();
  }

  bool calm_ = false;
  double wild_ = 0;  ///< chance of a caller to do what makes no sense
  double crash_ = 0;
  std::uint64_t num_keys_ = 0;
  std::vector<Offer> offers_;
  std::map<std::uint64_t, std::vector<std::size_t>> sizes_;  ///< of each prompt, per group
  std::map<std::string, std::size_t> from_;                  ///< where a key is pushed
  std::set<std::string> asked_;
  std::vector<std::unique_ptr<SimNode>> dead_;
};

}  // namespace

std::unique_ptr<SimWorld> make_world(std::uint64_t seed, WorldKind kind) {
  if (kind == WorldKind::kRandom || kind == WorldKind::kRetry || kind == WorldKind::kCalm ||
      kind == WorldKind::kLiars)
    return std::make_unique<RandomLife>(seed, kind);
  return make_plain_world(seed, kind);
}

}  // namespace kvpush::sim
