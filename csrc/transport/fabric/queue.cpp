// What the completion queue tells: arrivals, ended operations, errors. And what is watched beside it.
#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "transport/fabric/transport_impl.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kEntriesPerRead = 64;
constexpr int kReadsPerPoll = 16;
// Dropping an address closes the connection, and the peer may not have closed its last session yet.
constexpr TimeUs kLingerUs = 60'000'000;

}  // namespace

void FabricTransport::read_queue(TransportSink& sink, std::uint32_t rail) {
  FabricEndpoint& endpoint = *rails_[rail].endpoint;
  std::array<FiCqDataEntry, kEntriesPerRead> entries{};
  for (int i = 0; i < kReadsPerPoll && !rails_[rail].out; ++i) {
    const std::ptrdiff_t count = endpoint.read(entries);
    if (count == -kFiAvail) {
      FiCqErrEntry error;
      std::string text;
      if (!endpoint.read_error(error, text)) return;
      on_error(rail, error, text);
      continue;
    }
    if (count < 0 && count != -kFiAgain) take_out(rail, endpoint.describe(count));
    if (count <= 0) return;
    for (std::ptrdiff_t j = 0; j < count; ++j) on_entry(sink, entries[static_cast<std::size_t>(j)]);
  }
}

void FabricTransport::on_entry(TransportSink& sink, const FiCqDataEntry& entry) {
  // Messages carry no immediate data: it always is a write's, and its context is nobody's.
  if ((entry.flags & kFiRemoteCqData) != 0) {
    on_immediate(sink, static_cast<std::uint32_t>(entry.data));
    return;
  }
  auto* const operation = static_cast<FabricOperation*>(entry.op_context);
  if (operation == nullptr) return;
  if (operation->kind == FabricOperationKind::kReceive) {
    on_received(sink, ByteView(operation->buffer).first(std::min(entry.len, operation->buffer.size())));
    rails_[operation->rail].idle_receives.push_back(operation);
  } else {
    on_ended(*operation, nullptr);
  }
}

void FabricTransport::on_error(std::uint32_t rail, const FiCqErrEntry& entry, const std::string& text) {
  ++counters_->failed_operations;
  if (!operations_.owns(entry.op_context)) {
    // Of the queue itself, or of a peer's operation: the peer hears of that one too.
    if (entry.err == kFiOverrun) take_out(rail, text);
    return;
  }
  auto* const operation = static_cast<FabricOperation*>(entry.op_context);
  if (operation->kind == FabricOperationKind::kReceive) {
    rails_[rail].idle_receives.push_back(operation);
  } else {
    on_ended(*operation, &text);
  }
}

void FabricTransport::on_ended(FabricOperation& operation, const std::string* error) {
  const bool is_message = operation.kind == FabricOperationKind::kSend;
  FabricRail& rail = rails_[operation.rail];
  operation.under_way = false;
  if (!is_message) {
    --rail.num_writes;
    rail.num_bytes -= operation.size_bytes;
  }
  FabricLane& lane = operation.peer->lanes[operation.lane];
  --lane.num_operations;
  lane.moved_at = monotonic_us();
  note_lane(*operation.peer, operation.lane, error);
  if (is_message && operation.frame == FabricKind::kTrial) {
    lane.on_trial = false;
  } else if (error != nullptr) {
    if (is_message && goes_on(operation)) {
      resends_.push_back(&operation);
      return;
    }
    lose(operation.session, "libfabric " + std::string(is_message ? "message" : "write") + " over " +
                                rail.label + ": " + *error);
  }
  end(operation, error != nullptr);
}

void FabricTransport::end(FabricOperation& operation, bool failed) {
  const PostId id = std::exchange(operation.post, 0);
  if (operation.kind == FabricOperationKind::kSend) release(*operation.peer);
  operations_.give_back(operation);
  const auto found = posts_.find(id);
  if (found == posts_.end()) return;
  --found->second.num_started;
  if (failed) {
    found->second.failed = true;
    stop(found->second);
  }
  finish_if_over(id);
}

void FabricTransport::on_immediate(TransportSink& sink, std::uint32_t immediate) {
  const auto known = by_index_.find(static_cast<std::uint16_t>(immediate >> 16U));
  const auto open = known != by_index_.end() ? sessions_.find(known->second) : sessions_.end();
  if (open == sessions_.end() || open->second.lost ||
      !open->second.arrivals.add_write(static_cast<std::uint16_t>(immediate))) {
    ++counters_->dropped_immediates;
    return;
  }
  deliver_boxes(sink, SessionId(open->first));
}

void FabricTransport::on_received(TransportSink& sink, ByteView bytes) {
  const std::optional<FabricFrame> frame = decode_fabric_frame(bytes);
  if (!frame) {
    ++counters_->dropped_messages;
    return;
  }
  if (frame->kind == FabricKind::kTrial) return;
  if (frame->kind == FabricKind::kClosed || frame->kind == FabricKind::kQuiet) {
    on_closed(frame->session, frame->kind);
    return;
  }
  const auto found = sessions_.find(frame->session);
  // A notice to the side without a landing is as foreign as one of no session.
  if (found == sessions_.end() || found->second.lost || found->second.peer == nullptr ||
      (frame->kind == FabricKind::kNotice && !found->second.landing)) {
    ++counters_->dropped_messages;
    return;
  }
  if (!std::exchange(found->second.heard, true)) try_lanes(*found->second.peer);
  if (frame->kind == FabricKind::kMessage) {
    sink.on_message(frame->session, frame->payload);
  } else {
    on_notice_frame(sink, frame->session, *frame);
  }
}

void FabricTransport::on_notice_frame(TransportSink& sink, const SessionId& id, const FabricFrame& frame) {
  if (frame.num_writes == 0) {
    sink.on_notice(id, frame.payload);
    return;
  }
  FabricArrivals& arrivals = sessions_.at(id).arrivals;
  if (!arrivals.add_notice(frame.first_write, frame.num_writes, frame.payload)) {
    ++counters_->dropped_messages;
    if (arrivals.is_broken()) lose(id, "the peer's notice names writes that cannot be");
    return;
  }
  deliver_boxes(sink, id);
}

void FabricTransport::deliver_boxes(TransportSink& sink, const SessionId& id) {
  // Looked up anew each time: the sink may close the session.
  for (auto found = sessions_.find(id); found != sessions_.end(); found = sessions_.find(id)) {
    const std::optional<Bytes> notice = found->second.arrivals.take();
    if (!notice) return;
    sink.on_notice(id, *notice);
  }
}

void FabricTransport::on_closed(const SessionId& session, FabricKind kind) {
  const bool quiet = kind == FabricKind::kQuiet;
  if (const auto closed = closed_.find(session); closed != closed_.end()) {
    closed->second.quiet |= quiet;
    return;
  }
  const auto open = sessions_.find(session);
  if (open == sessions_.end()) return;
  open->second.peer_quiet |= quiet;
  if (open->second.peer == nullptr) {
    open->second.closed_early = true;
  } else {
    lose(session, "the peer closed the session");
  }
}

void FabricTransport::post_receives() {
  for (FabricRail& rail : rails_) {
    while (!rail.out && !rail.idle_receives.empty()) {
      FabricOperation& receive = *rail.idle_receives.back();
      void* const descriptor = buffers_->registrations[receive.rail]->mem_desc;
      if (rail.endpoint->receive(receive.buffer, descriptor, &receive) != FabricStart::kYes) break;
      rail.idle_receives.pop_back();
    }
  }
}

void FabricTransport::find_dead_peers() {
  for (const auto& [id, session] : sessions_) {
    if (session.lost || session.peer == nullptr || !proven_dead(session.process, process_)) continue;
    lose(id, "process " + std::to_string(session.process.pid) + " of the peer is gone");
  }
  std::erase_if(draining_, [&](auto& entry) {
    if (!proven_dead(entry.second.process, process_)) return false;
    for (auto& [id, post] : posts_) {
      if (post.session != entry.first || std::exchange(post.settled, true)) continue;
      settled_.push_back(post.ticket);
    }
    release(*entry.second.peer);
    return true;
  });
}

void FabricTransport::sweep_peers(TimeUs now) {
  for (auto it = peers_.begin(); it != peers_.end();) {
    FabricPeer& peer = it->second;
    const bool over = peer.num_users == 0 && now - peer.idle_since >= kLingerUs;
    if (peer.num_users != 0) {
      find_stalled_lanes(peer, now);
      try_lanes(peer);
    }
    for (const FabricLane& lane : peer.lanes) {
      const bool is_known = lane.address != kFiAddrUnspec && !rails_[lane.rail].out;
      if (over && is_known) rails_[lane.rail].endpoint->remove(lane.address);
    }
    it = over ? peers_.erase(it) : std::next(it);
  }
}

}  // namespace kvpush
