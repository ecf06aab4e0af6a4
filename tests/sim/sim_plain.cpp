// Worlds with a story: too little memory, nobody who asks, ranks that do not fit.
#include <algorithm>
#include <deque>

#include "sim_world.hpp"

namespace kvpush::sim {
namespace {

/// Two engines that prefill for each other, each with so few blocks that finished pushes can fill them: then
/// neither can take in what it asked for, and each waits for the other until one of them evicts.
class Starved final : public SimWorld {
 public:
  explicit Starved(std::uint64_t seed) : SimWorld(seed, WorldKind::kStarved) {
    shapes_.resize(1);
    shapes_[0].num_blocks = 10;
    net_.faults.delay = net_.faults.duplicate = 0.1;
    add_node();
    add_node();
  }

 private:
  struct Request {
    std::string key;
    std::uint64_t prompt;
    std::size_t d;
    std::size_t size;
    TransferId claim = 0;
  };

  void live() override {
    SessionId sessions[2] = {connect(0, 1), connect(1, 0)};
    std::deque<Request> to_push[2];
    std::deque<Request> to_receive[2];
    for (std::uint64_t prompt = 1; prompt <= 12; ++prompt) {
      const std::size_t d = prompt % 2;
      Request request{"key " + std::to_string(prompt), prompt, d, 3 + dice().below(5)};
      request.claim = expect(d, sessions[d], request.key, prompt).transfer;
      to_push[1 - d].push_back(request);
      to_receive[d].push_back(request);
    }
    TimeUs moved = net_.now;
    for (int i = 0; !to_receive[0].empty() || !to_receive[1].empty(); ++i) {
      require(i < 4000, "two engines wait for each other's memory for ever");
      for (std::size_t n = 0; n < 2; ++n) {
        // Prefill first: that is what makes them starve.
        if (!to_push[n].empty() && node(n).free[0].size() >= to_push[n].front().size) {
          const Request request = to_push[n].front();
          to_push[n].pop_front();
          Push& push = begin_push(n, request.key, request.prompt, {request.size});
          advance(push, 1000);
          finish(push);
          moved = net_.now;
        } else if (!to_receive[n].empty() && node(n).free[0].size() >= to_receive[n].front().size) {
          const Request request = to_receive[n].front();
          to_receive[n].pop_front();
          receive(n, sessions[n], request.key, request.prompt, {request.size}, request.claim, false);
          moved = net_.now;
        }
      }
      if (net_.now - moved > 2000) {
        SimNode& one = node(dice().below(2));
        note("evict");
        one.core->sender().evict(1, net_.now, one.core->actions());
        moved = net_.now;
      }
      step(static_cast<TimeUs>(50 + dice().below(300)));
    }
    for (const Push& push : pushes_) {
      require(push.open || push.end == "sent" || push.end == "evicted" || push.end == "cancelled",
              "a push of a calm network ended with " + push.end);
    }
  }
};

/// Each timer of docs/protocol.md fires when it should: neither before nor much later.
class Unclaimed final : public SimWorld {
 public:
  explicit Unclaimed(std::uint64_t seed) : SimWorld(seed, WorldKind::kUnclaimed) {
    holes_ = 0;
    add_node();
    add_node();
  }

 private:
  void live() override {
    const SessionId session = connect(0, 1);
    const SessionId other = connect(0, 1);
    const std::vector<std::size_t> sizes(shapes_.size(), 2);
    const protocol::Timeouts& t = config_.timeouts;
    const auto idle = [this] { step(static_cast<TimeUs>(100 + dice().below(300))); };
    for (int i = 0; i < 10; ++i) idle();
    just_in_time(session, sizes);

    begin_push(1, "nobody asks", 1, sizes);
    begin_push(1, "only claimed", 2, sizes);
    begin_push(1, "claim cancelled", 3, sizes);
    begin_push(1, "other digest", 4, sizes);
    begin_push(1, "claimer goes", 8, sizes);
    claims_.push_back(expect(0, other, "claimer goes", 8));
    const Claim claim = expect(0, session, "only claimed", 2);
    const Claim dropped = expect(0, session, "claim cancelled", 3);
    const Claim early = expect(0, session, "cancelled before its push", 5);
    receive(0, session, "no push", 6, sizes, 0, false);
    receive(0, session, "other digest", 4, sizes, 0, true);
    for (int i = 0; i < 10; ++i) idle();
    node(0).core->gate().cancel(early.transfer, net_.now, node(0).core->actions());
    for (int i = 0; i < 5; ++i) idle();
    begin_push(1, "cancelled before its push", 5, sizes);
    for (Push& push : pushes_) {
      advance(push, 1000);
      finish(push);
    }
    const TimeUs finished = net_.now;
    for (int i = 0; i < 5; ++i) idle();
    node(0).core->gate().cancel(dropped.transfer, net_.now, node(0).core->actions());
    require(node(1).core->disconnect(other, net_.now).ok(), "an open session could not be ended");
    const TimeUs gone = net_.now;
    while (net_.now < finished + t.claim_us + 3000) idle();

    const auto push_ends = [this](const char* key, const char* how, TimeUs from, TimeUs to) {
      const auto push = std::ranges::find_if(pushes_, [key](const Push& one) { return one.key == key; });
      require(push->end == how, std::string(key) + ": " + push->end + ", not " + how);
      require(push->ended_at >= from && push->ended_at <= to, std::string(key) + ": ended at the wrong time");
    };
    push_ends("nobody asks", "unclaimed", finished + t.unclaimed_us, finished + t.unclaimed_us + 1000);
    push_ends("only claimed", "claim_expired", finished + t.claim_us, finished + t.claim_us + 1000);
    push_ends("claimer goes", "unclaimed", gone + t.unclaimed_us, gone + t.unclaimed_us + 1000);
    push_ends("claim cancelled", "cancelled", finished, finished + 5000);
    push_ends("other digest", "unclaimed", finished + t.unclaimed_us, finished + t.unclaimed_us + 1000);
    push_ends("cancelled before its push", "cancelled", 0, finished + 1000);
    const auto receive_ends = [this](const char* key, const char* how, TimeUs from, TimeUs to) {
      const auto one = std::ranges::find_if(receives_, [key](const Receive& r) { return r.key == key; });
      require(one->end == how, std::string(key) + ": " + one->end + ", not " + how);
      require(one->ended_at >= from && one->ended_at <= to, std::string(key) + ": ended at the wrong time");
    };
    const TimeUs opened = receives_[1].opened_at;
    receive_ends("no push", "pairing_timeout", opened + t.pairing_us, opened + t.pairing_us + 1000);
    receive_ends("other digest", "digest_mismatch", opened, opened + 5000);
    // Its claim has ended; the receive learns it at once.
    receive(0, session, "only claimed", 2, sizes, claim.transfer, false);
    step(100);
    require(receives_.back().end == "claim_expired", "only claimed: " + receives_.back().end);

    // A tombstone answers at once, until it is old; then a new push of the key is what counts.
    receive(0, session, "only claimed", 2, sizes, 0, false);
    for (int i = 0; i < 10; ++i) idle();
    require(receives_.back().end == "claim_expired", "a tombstone did not answer: " + receives_.back().end);
    Push& again = begin_push(1, "only claimed", 2, sizes);
    advance(again, 1000);
    finish(again);
    receive(0, session, "only claimed", 2, sizes, 0, false);
    receive(0, session, "only claimed", 2, sizes, 0, false);
    for (int i = 0; i < 150; ++i) idle();
    std::vector<std::string> ends = {receives_.back().end, receives_[receives_.size() - 2].end};
    require(ends[1] == "received", "a new push of a key did not replace its tombstone: " + ends[1]);
    require(ends[0].empty() || ends[0] == "taken" || ends[0] == "pairing_timeout" || ends[0] == "unclaimed",
            "second receive: " + ends[0]);

    // A peer that falls silent is given up after peer_timeout, not before.
    const TimeUs silent = net_.now;
    net_.died(*node(1).end);
    node(1).asleep_until = kNever;
    net_.tells_close = false;
    node(0).end->losses.clear();
    receive(0, session, "dead peer", 7, sizes, 0, false);
    while (receives_.back().open && net_.now < silent + 2 * t.peer_us) idle();
    require(receives_.back().end == "peer_lost", "dead peer: " + receives_.back().end);
    require(net_.now - silent >= t.peer_us - 2000 && net_.now - silent <= t.peer_us + 1500,
            "dead peer: given up at the wrong time");
    for (Push& push : pushes_) push.open = false;
    nodes_.pop_back();
  }

  /// What arrives in the very turn in which a timeout is judged was in time.
  void just_in_time(const SessionId& session, const std::vector<std::size_t>& sizes) {
    receive(0, session, "just in time", 9, sizes, 0, false);
    const TimeUs judged = net_.now + config_.timeouts.pairing_us;
    while (net_.now < judged - 3000) step(300);
    node(0).asleep_until = judged;
    Push& push = begin_push(1, "just in time", 9, sizes);
    advance(push, 1000);
    finish(push);
    while (receives_.back().open) step(100);
    require(receives_.back().end == "received", "just in time: " + receives_.back().end);
    require(receives_.back().ended_at >= judged, "just in time: too early to mean anything");
  }
};

/// Tensor-parallel ranks, and caches of other shapes, refuse each other and say why.
class Ranks final : public SimWorld {
 public:
  explicit Ranks(std::uint64_t seed) : SimWorld(seed, WorldKind::kRanks) {
    add_node(0);
    add_node(1);
    add_node(0);
    auto other = shapes_;
    auto& plane = other[dice().below(other.size())].planes[0];
    (dice().chance(0.5) ? plane.content : plane.tokens) += 1;
    std::swap(shapes_, other);
    config_.slot_bytes += 96;
    add_node(0);
    std::swap(shapes_, other);
    config_.slot_bytes -= 96;
  }

 private:
  void live() override {
    for (std::size_t p = 1; p < 4; ++p) {
      const auto offer = node(0).core->offer(net_.now);
      require(offer.ok(), "no offer");
      const auto answer = node(p).core->answer(offer.value(), net_.now);
      if (p == 2) {
        require(answer.ok(), "an engine of the same rank was refused");
        continue;
      }
      require(!answer.ok(), "an engine that does not fit was accepted");
      const std::string why(answer.status().message());
      const char* const fields[] = {"heads", "content_bytes", "num_tokens"};
      require(std::ranges::any_of(fields, [&](const char* f) { return why.find(f) != std::string::npos; }) &&
                  why.find("theirs") != std::string::npos,
              "a refusal does not say what does not fit: " + why);
      require(node(0).core->withdraw(offer.value(), net_.now).ok(), "an offer could not be withdrawn");
    }
    require(!node(0).core->answer(node(0).core->offer(net_.now).value(), net_.now).ok(),
            "an engine answered its own offer");
    require(node(1).core->stats().sessions == 0 && node(3).core->stats().sessions == 0,
            "a refused offer left a session");
    for (int i = 0; i < 5; ++i) step(300);
    nodes_.pop_back();
    nodes_.erase(nodes_.begin() + 1);
  }
};

}  // namespace

std::unique_ptr<SimWorld> make_plain_world(std::uint64_t seed, WorldKind kind) {
  if (kind == WorldKind::kStarved) return std::make_unique<Starved>(seed);
  if (kind == WorldKind::kUnclaimed) return std::make_unique<Unclaimed>(seed);
  return std::make_unique<Ranks>(seed);
}

}  // namespace kvpush::sim
