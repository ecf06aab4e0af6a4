// Lanes: which rails lead to a peer, which of them work, and what takes which.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

// So long a trial that does not start is offered again at each poll; then once a second.
constexpr TimeUs kEagerUs = 1'000'000;

using State = FabricLane::State;

int rank_of(const FabricLane& lane) {
  return static_cast<int>(lane.state);
}

int best_rank(const FabricPeer& peer) {
  int best = static_cast<int>(State::kGone);
  for (const FabricLane& lane : peer.lanes) best = std::min(best, rank_of(lane));
  return best;
}

bool is_on_trial(const FabricPeer& peer) {
  return std::any_of(peer.lanes.begin(), peer.lanes.end(),
                     [](const FabricLane& lane) { return lane.on_trial; });
}

}  // namespace

Result<FabricPeer> FabricTransport::make_peer(const FabricDescription& peer) {
  FabricPeer made;
  Status why(Code::kHandshake, "fabric: no rail that still works leads to the peer");
  const auto num_lanes = static_cast<std::uint32_t>(std::max(rails_.size(), peer.rails.size()));
  for (std::uint32_t i = 0; i < num_lanes; ++i) {
    FabricLane& lane = made.lanes.emplace_back();
    lane.rail = i % static_cast<std::uint32_t>(rails_.size());
    lane.remote = i % static_cast<std::uint32_t>(peer.rails.size());
    lane.state = num_lanes == 1 ? State::kWorks : State::kUntried;
    const bool alive = !rails_[lane.rail].out && peer.rails[lane.remote].alive;
    auto address = alive ? rails_[lane.rail].endpoint->insert(peer.rails[lane.remote].endpoint) : why;
    if (address.ok()) {
      lane.address = address.value();
    } else {
      lane.state = State::kGone;
      why = address.status();
    }
  }
  if (best_rank(made) == static_cast<int>(State::kGone)) return why;
  return made;
}

std::size_t FabricTransport::num_best_lanes(const FabricPeer& peer) const {
  const int best = best_rank(peer);
  const auto count = std::count_if(peer.lanes.begin(), peer.lanes.end(),
                                   [&](const FabricLane& lane) { return rank_of(lane) == best; });
  return static_cast<std::size_t>(count);
}

std::optional<std::uint32_t> FabricTransport::choose_lane(const FabricPeer& peer, std::uint32_t tried,
                                                          bool by_load) const {
  const int best = best_rank(peer);
  if (best == static_cast<int>(State::kGone)) return std::nullopt;
  std::optional<std::uint32_t> chosen;
  const auto load = [&](std::uint32_t lane) { return rails_[peer.lanes[lane].rail].num_bytes; };
  const auto num_lanes = static_cast<std::uint32_t>(peer.lanes.size());
  for (std::uint32_t i = 0; i < num_lanes; ++i) {
    const std::uint32_t lane = by_load ? (peer.next_lane + i) % num_lanes : i;
    if (rank_of(peer.lanes[lane]) != best || (tried >> lane & 1U) != 0) continue;
    if (!chosen || (by_load && load(lane) < load(*chosen))) chosen = lane;
  }
  return chosen;
}

void FabricTransport::note_start(FabricLane& lane) {
  if (lane.num_operations++ == 0) lane.moved_at = monotonic_us();
}

void FabricTransport::find_stalled_lanes(FabricPeer& peer, TimeUs now) {
  if (peer.lanes.size() == 1) return;  // its silence is the peer's, which is found by others
  for (std::uint32_t i = 0; i < peer.lanes.size(); ++i) {
    FabricLane& lane = peer.lanes[i];
    const bool is_used = lane.state == State::kWorks || lane.state == State::kUntried;
    if (!is_used || lane.num_operations == 0 || now - lane.moved_at < stall_us_) continue;
    const std::string reason =
        "nothing has moved for " + std::to_string((now - lane.moved_at) / 1000) + " ms";
    note_lane(peer, i, &reason);
    for (const FabricOperation* operation : operations_.under_way(lane.rail)) {
      if (operation->peer != &peer || operation->lane != i) continue;
      lose(operation->session, "rail " + rails_[lane.rail].label + ": " + reason);
    }
  }
}

void FabricTransport::note_lane(FabricPeer& peer, std::uint32_t index, const std::string* error) {
  FabricLane& lane = peer.lanes[index];
  // Where there is no choice there is nothing to note.
  if (peer.lanes.size() == 1 || lane.state == State::kGone) return;
  const State before = lane.state;
  lane.state = error == nullptr ? State::kWorks : State::kFailed;
  if (error != nullptr) lane.try_at = monotonic_us() + try_again_us_;
  if (before == lane.state || (before == State::kUntried && error == nullptr)) return;
  // Of a peer that ends all lanes fail.
  const bool is_partial = error != nullptr && best_rank(peer) == static_cast<int>(State::kWorks);
  log(is_partial ? LogLevel::kWarning : LogLevel::kInfo,
      "fabric rail " + rails_[lane.rail].label + " to a peer's rail " + std::to_string(lane.remote) +
          (error == nullptr ? " works again" : " fails, boxes go over the others: " + *error));
}

void FabricTransport::try_lanes(FabricPeer& peer) {
  const TimeUs now = monotonic_us();
  for (std::uint32_t i = 0; i < peer.lanes.size(); ++i) {
    FabricLane& lane = peer.lanes[i];
    const bool is_due = lane.state == State::kUntried || (lane.state == State::kFailed && now >= lane.try_at);
    if (!is_due || std::exchange(lane.on_trial, true)) continue;
    ++peer.num_users;
    trials_.push_back({.peer = &peer, .lane = i, .since = now});
  }
}

void FabricTransport::start_trials() {
  for (std::size_t left = trials_.size(); left > 0; --left) {
    const Trial trial = trials_.front();
    trials_.pop_front();
    FabricLane& lane = trial.peer->lanes[trial.lane];
    FabricStart started = FabricStart::kNo;
    if (lane.state != State::kGone) {
      FabricMessage* const message = operations_.take_message({}, FabricKind::kTrial, 0, 0, {});
      started = message != nullptr ? start_on(*message, *trial.peer, trial.lane) : FabricStart::kAgain;
      if (message != nullptr && started != FabricStart::kYes) operations_.give_back(*message);
    }
    if (started == FabricStart::kAgain) {
      trials_.push_back(trial);
      refused_ |= monotonic_us() < trial.since + kEagerUs;
    } else if (started == FabricStart::kNo) {
      lane.on_trial = false;
      note_lane(*trial.peer, trial.lane, &refusal_);
      release(*trial.peer);
    }
  }
}

FabricStart FabricTransport::start_write(PostId id, FabricPost& post) {
  FabricPeer& peer = *post.peer;
  // A lane that does not work would end the session, and which do is about to be known.
  if (best_rank(peer) != static_cast<int>(State::kWorks) && is_on_trial(peer)) return FabricStart::kAgain;
  const ByteView part = post.source.first(std::min(post.source.size(), post.part_bytes));
  const std::uint32_t immediate =
      std::uint32_t{post.index} << 16U | static_cast<std::uint16_t>(post.next_write);
  const std::vector<FabricRailInfo>& remote = sessions_.at(post.session).remote_rails;
  FabricOperation& write = operations_.take_write();
  FabricStart result = FabricStart::kNo;
  std::uint32_t tried = 0;
  while (const std::optional<std::uint32_t> index = choose_lane(peer, tried, true)) {
    tried |= 1U << *index;
    const FabricLane& lane = peer.lanes[*index];
    FabricRail& rail = rails_[lane.rail];
    if (rail.num_writes >= queue_entries_ / 4) {
      result = FabricStart::kAgain;
      continue;
    }
    void* const descriptor =
        post.staging != nullptr ? post.staging->registrations[lane.rail]->mem_desc : nullptr;
    const FabricRailInfo& to = remote[lane.remote];
    const FabricStart started = rail.endpoint->write(lane.address, part, descriptor, immediate,
                                                     to.base + post.offset, to.key, &write);
    if (started == FabricStart::kYes) {
      write.session = post.session;
      write.peer = &peer;
      write.post = id;
      write.lane = *index;
      write.rail = lane.rail;
      write.size_bytes = part.size();
      write.under_way = true;
      note_start(peer.lanes[*index]);
      ++rail.num_writes;
      rail.num_bytes += part.size();
      ++post.next_write;
      post.offset += part.size();
      post.source = post.source.subspan(part.size());
      peer.next_lane = (*index + 1) % static_cast<std::uint32_t>(peer.lanes.size());
      return started;
    }
    if (started == FabricStart::kAgain) {
      result = started;
      refused_ = true;
    } else {
      refusal_ = rail.endpoint->error();
      note_lane(peer, *index, &refusal_);
    }
  }
  operations_.give_back(write);
  return result;
}

FabricStart FabricTransport::start_message(FabricMessage& message, FabricPeer& peer) {
  FabricStart result = FabricStart::kNo;
  std::uint32_t tried = 0;
  while (const std::optional<std::uint32_t> lane = choose_lane(peer, tried, false)) {
    tried |= 1U << *lane;
    const FabricStart started = start_on(message, peer, *lane);
    if (started == FabricStart::kYes) return started;
    if (started == FabricStart::kAgain) {
      result = started;
      refused_ = true;
    } else {
      note_lane(peer, *lane, &refusal_);
    }
  }
  return result;
}

FabricStart FabricTransport::start_on(FabricMessage& message, FabricPeer& peer, std::uint32_t index) {
  const FabricLane& lane = peer.lanes[index];
  FabricEndpoint& endpoint = *rails_[lane.rail].endpoint;
  message.peer = &peer;
  message.lane = index;
  message.rail = lane.rail;
  const FabricStart started = endpoint.send(lane.address, message.buffer.first(message.size_bytes),
                                            buffers_->registrations[lane.rail]->mem_desc, &message);
  message.under_way = started == FabricStart::kYes;
  if (message.under_way) note_start(peer.lanes[index]);
  if (started == FabricStart::kNo) refusal_ = endpoint.error();
  return started;
}

bool FabricTransport::goes_on(const FabricOperation& message) const {
  // It may come twice then, as any message may.
  if (message.num_tries + 1 >= message.peer->lanes.size()) return false;
  if (message.frame == FabricKind::kClosed || message.frame == FabricKind::kQuiet) return true;
  const auto session = sessions_.find(message.session);
  if (session == sessions_.end() || session->second.lost) return false;
  if (message.post == 0) return true;
  const FabricPost& post = posts_.at(message.post);
  return !post.failed && !post.orphaned;
}

void FabricTransport::resend() {
  for (std::size_t left = resends_.size(); left > 0; --left) {
    FabricMessage& message = *resends_.front();
    resends_.pop_front();
    const bool goes = goes_on(message);
    const FabricStart started = goes ? start_message(message, *message.peer) : FabricStart::kNo;
    if (started == FabricStart::kYes) {
      ++message.num_tries;
    } else if (started == FabricStart::kAgain) {
      resends_.push_back(&message);
    } else {
      lose(message.session, "no rail takes a message: " + refusal_);
      end(message, true);
    }
  }
}

void FabricTransport::take_out(std::uint32_t index, const std::string& reason) {
  FabricRail& rail = rails_[index];
  rail.out = true;
  log(LogLevel::kError, "fabric rail " + rail.label + " is out: " + reason);
  wait_.drop(rail.endpoint->wait_fd());
  rail.endpoint->shut();
  for (auto& [incarnation, peer] : peers_) {
    for (FabricLane& lane : peer.lanes) {
      if (lane.rail == index) lane.state = State::kGone;
    }
  }
  const std::string text = "rail " + rail.label + " is out: " + reason;
  for (const auto& [id, session] : sessions_) {
    const auto uses = [&](const FabricLane& lane) { return lane.rail == index; };
    const bool is_hit =
        session.peer == nullptr || std::any_of(session.peer->lanes.begin(), session.peer->lanes.end(), uses);
    if (is_hit) lose(id, text);
  }
  for (FabricOperation* operation : operations_.under_way(index)) on_ended(*operation, &text);
}

}  // namespace kvpush
