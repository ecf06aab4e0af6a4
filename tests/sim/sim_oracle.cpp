// What must hold of every event, and of everything once it has come to rest.
#include <algorithm>
#include <utility>

#include "sim_world.hpp"

namespace kvpush::sim {
namespace {

constexpr std::uint64_t kMaxAttempts = 64;
constexpr TimeUs kStepUs = 400;

}  // namespace

void SimWorld::took(std::size_t n, const protocol::Event& event) {
  using Kind = protocol::Event::Kind;
  net_.mix(event.handle * 8 + static_cast<std::uint64_t>(event.kind));
  const std::string name = event.kind == Kind::kSent       ? "sent"
                           : event.kind == Kind::kReceived ? "received"
                                                           : std::string(to_string(event.status));
  if (event.kind == Kind::kLost) {
    note("node " + std::to_string(n) + " lost a session: " + name + ": " + event.detail);
    const auto lost = std::erase_if(links_, [&](const Link& link) { return link.id == event.session; });
    require(!lossless_ || lost == 0 || net_.lied(event.session),
            "a session was lost without cause: " + event.detail);
    return;
  }
  note("node " + std::to_string(n) + ": " + event.key + " " + name + " " + event.detail + ", handle " +
       std::to_string(event.handle));
  require(event.status != FailCode::kBreach || net_.num_damaged + net_.num_lies > 0,
          "honest engines called a breach: " + event.detail);
  require(event.status != FailCode::kChecksum || net_.num_data_damaged + net_.num_lies > 0,
          "a checksum failed of data that nobody damaged");
  require(event.status != FailCode::kPack || pack_fails_ > 0 || net_.num_lies > 0,
          "a pack failed that nobody broke");
  if (event.side == protocol::Event::Side::kPush) {
    const auto found = std::ranges::find_if(pushes_, [&](const Push& push) {
      return push.node == n && push.handle == event.handle && push.ended_at >= 0;
    });
    require(found != pushes_.end(), "an event of a push that never was");
    require(found->open, "a second event of push " + found->key);
    require(event.kind != Kind::kReceived, "a push was received");
    require(event.kind != Kind::kSent || found->finished, "sent came before finish()");
    const bool waits = forget_forwards(n, event.handle);
    require(event.kind != Kind::kSent || !waits, "sent came before the forward had ended");
    found->open = false;
    found->end = name;
    found->ended_at = net_.now;
    node(n).give_back(found->blocks);
    ++ends_[name];
    return;
  }
  const auto found = std::ranges::find_if(receives_, [&](const Receive& receive) {
    return receive.node == n && receive.handle == event.handle && receive.ended_at >= 0;
  });
  require(found != receives_.end(), "an event of a receive that never was");
  require(found->open, "a second event of receive " + found->key);
  require(event.kind != Kind::kSent, "a receive was sent");
  require(!lossless_ || event.kind == Kind::kReceived || found->cancelled || net_.lied(found->session),
          "a receive failed without cause: " + name + ": " + event.detail);
  require(!forget_forwards(n, event.handle), "a receive has ended and waits for a forward");
  found->open = false;
  found->end = name;
  found->ended_at = net_.now;
  if (event.kind == Kind::kReceived) check_received(n, *found);
  node(n).give_back(found->blocks);
  ++ends_[name];
}

void SimWorld::check_received(std::size_t n, const Receive& receive) {
  bool wants = false;
  for (const auto& ids : receive.blocks) wants |= std::ranges::any_of(ids, [](auto id) { return id >= 0; });
  if (!wants) return;
  require(attempts(receive.prompt) != 0, "received what nobody pushed: " + receive.key);
  for (std::uint64_t attempt = 1; attempt <= attempts(receive.prompt); ++attempt) {
    bool same = true;
    for (std::size_t g = 0; g < shapes_.size() && same; ++g) {
      for (std::size_t i = 0; i < receive.blocks[g].size() && same; ++i) {
        const std::int32_t block = receive.blocks[g][i];
        const auto pos = receive.first[g] + static_cast<std::uint32_t>(i);
        same = block < 0 || node(n).holds(g, block, receive.prompt * kMaxAttempts + attempt, pos);
      }
    }
    if (same) return;
  }
  throw Violation("what was received is not what any push of this prompt held: " + receive.key);
}

/// Nothing new and nothing broken any more: everything must end, in the time that docs/protocol.md gives it.
void SimWorld::settle() {
  net_.trouble = false;
  const protocol::Timeouts& t = config_.timeouts;
  for (auto& one : nodes_) {
    one->asleep_until = one->end->blocked_until = 0;
    one->packer->fails = 0;
    one->packer->held = false;
  }
  for (const Claim& claim : claims_) {
    node(claim.node).core->gate().cancel(claim.transfer, net_.now, node(claim.node).core->actions());
  }
  claims_.clear();
  note("settling");
  // Who is lied to may wait for a box that never comes.
  const TimeUs progress = net_.num_lies > 0 ? t.progress_us : 0;
  const TimeUs receives_end = t.pairing_us + progress + 3 * t.peer_us;
  const TimeUs pushes_end = t.claim_us + t.unclaimed_us + progress + 3 * t.peer_us;
  // A queue of boxes over one slot may take its time, as long as it moves.
  TimeUs since = net_.now;
  std::uint64_t moved = 0;
  while (any_open()) {
    for (Push& push : pushes_) {
      advance(push, 1000);
      finish(push);
    }
    step(any_busy() ? kStepUs / 4 : kStepUs);
    std::uint64_t boxes = 0;
    for (const auto& one : nodes_) boxes += one->core->stats().boxes_received;
    if (std::exchange(moved, boxes) != boxes) since = net_.now;
    for (const Receive& receive : receives_) {
      require(!receive.open || net_.now - since < receives_end, "receive " + receive.key + " never ends");
    }
    for (const Push& push : pushes_) {
      require(!push.open || net_.now - since < pushes_end, "push " + push.key + " never ends");
    }
  }
  // Long enough for whatever is half open, on either side, to be given up.
  for (TimeUs end = net_.now + t.handshake_us + 3 * t.peer_us; net_.now < end;) step(kStepUs);
  end_lied();
}

/// Whoever lied of credits or claims has fewer of them as long as its session lives.
void SimWorld::end_lied() {
  const std::vector<Link> links = links_;
  for (const Link& link : links) {
    const SimNet::Session& session = net_.sessions.at(link.id);
    require(!lossless_ || !session.must_end, "a breach of protocol did not end its session");
    if (!session.lied) continue;
    note("end a session of lies");
    require(node(link.d).core->disconnect(link.id, net_.now).ok(), "an open session could not be ended");
  }
  for (TimeUs end = net_.now + 2 * config_.timeouts.peer_us; net_.now < end;) step(kStepUs);
}

void SimWorld::check_quiet() {
  net_.check_released();
  std::uint64_t credits = 0;
  std::uint64_t slots = 0;
  std::uint64_t sessions = 0;
  for (const auto& one : nodes_) {
    const Stats stats = one->core->stats();
    require(stats.open_pushes == 0, "pushes are left");
    require(stats.open_claims == 0, "claims are left");
    require(stats.open_receives == 0, "receives are left");
    require(stats.leases_in_use == 0, "leases are left");
    require(one->core->quiet() && one->packer->idle(), "work is left");
    require(!one->core->open(), "open() of an engine without transfers");
    require(stats.breaches == 0 || net_.num_damaged + net_.num_lies > 0, "honest engines called a breach");
    credits += stats.credits;
    slots += stats.landing_bytes / config_.slot_bytes;
    sessions += stats.sessions;
    one->check_all_free();
    for (std::size_t g = 0; g < shapes_.size(); ++g) {
      require(one->free[g].size() == static_cast<std::size_t>(shapes_[g].num_blocks), "blocks are left");
    }
  }
  require(sessions % 2 == 0, "a session is open on one side only");
  require(credits == slots, "credits are lost: " + std::to_string(credits) + " of " + std::to_string(slots));
  require(!lossless_ || sessions == 2 * links_.size(), "a session was lost without cause");

  // The peers that live tell each other which sessions are quiet; what is left is what nobody can vouch for.
  // A P has room for only so many sessions of one D.
  lossless_ = false;
  while (!links_.empty()) {
    const Link link = links_.back();
    require(node(link.d).core->disconnect(link.id, net_.now).ok(), "an open session could not be ended");
    links_.pop_back();
  }
  for (int i = 0; i < 40; ++i) step(kStepUs);
  for (std::size_t d = 0; d < nodes_.size(); ++d) {
    for (std::size_t p = 0; p < nodes_.size(); ++p) {
      if (d != p && node(d).core->stats().quarantined_bytes > 0) {
        require(connect(d, p) != SessionId{}, "a quiet engine has no room for a session");
      }
    }
  }
  for (int i = 0; i < 8; ++i) step(kStepUs);
  for (const auto& one : nodes_) {
    std::uint64_t expected = one->end->num_unknown * config_.slot_bytes;
    for (const auto& [id, session] : net_.sessions) {
      if (session.d == one->end.get() && !session.d_open && session.unknown && !session.p_dead &&
          !net_.revokes) {
        expected += session.landing.size();
      }
    }
    require(one->core->stats().quarantined_bytes <= expected,
            "memory is kept back for nothing: " + std::to_string(one->core->stats().quarantined_bytes) +
                " bytes, " + std::to_string(expected) + " may be");
  }
}

void SimWorld::close_all() {
  lossless_ = false;
  for (const auto& one : nodes_) {
    one->core->shut_down(net_.now);
    one->core->shut_down(net_.now);
  }
  for (int i = 0; i < 60; ++i) step(kStepUs);
  for (const auto& one : nodes_) {
    require(one->core->quiet(), "a closed engine has work left");
    require(one->core->stats().sessions == 0, "a closed engine has sessions");
    require(one->core->stats().leases_in_use == 0, "a closed engine has leases out");
    one->core.reset();
    require(one->end->num_staging == one->end->num_unknown, "staging memory was not given back");
  }
  net_.check_released();
}

}  // namespace kvpush::sim
