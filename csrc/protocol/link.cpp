#include "protocol/link.hpp"

#include <algorithm>
#include <utility>

namespace kvpush::protocol {
namespace {

// A peer this far ahead of a missing message is not reordering, it has lost one.
constexpr std::size_t kMaxAhead = 65536;
constexpr TimeUs kPingsPerTimeout = 10;
constexpr TimeUs kTriesPerPing = 10;

}  // namespace

Link::Link(const Incarnation& self, const Incarnation& peer, TimeUs peer_timeout_us, TimeUs now)
    : self_(self), peer_(peer), peer_timeout_us_(peer_timeout_us), next_ping_(now), last_heard_(now) {}

Bytes Link::seal(Body body) {
  Envelope envelope;
  envelope.sender = self_;
  if (std::holds_alternative<Ping>(body)) {
    body = Ping{messages_sent_, boxes_completed_};
    envelope.seq = pings_sent_++;
  } else if (std::holds_alternative<BoxNotice>(body)) {
    envelope.seq = boxes_sent_++;
  } else {
    envelope.seq = messages_sent_++;
  }
  envelope.body = std::move(body);
  return encode(envelope);
}

Status Link::take_message(ByteView bytes, TimeUs now, std::vector<Body>& in_order) {
  Result<Envelope> decoded = decode(bytes);
  if (!decoded.ok()) return decoded.status();
  Envelope envelope = std::move(decoded).value();
  if (envelope.sender != peer_) return {};
  last_heard_ = now;

  if (const auto* ping = std::get_if<Ping>(&envelope.body)) {
    promised_messages_ = std::max(promised_messages_, ping->messages_sent);
    promised_boxes_ = std::max(promised_boxes_, ping->boxes_completed);
  } else if (std::holds_alternative<BoxNotice>(envelope.body)) {
    return {Code::kInvalidArgument, "BOX came as a message"};
  } else if (envelope.seq >= messages_in_order_) {
    messages_ahead_.try_emplace(envelope.seq, std::move(envelope.body));
    for (auto next = messages_ahead_.begin();
         next != messages_ahead_.end() && next->first == messages_in_order_;
         next = messages_ahead_.erase(next), ++messages_in_order_) {
      in_order.push_back(std::move(next->second));
    }
    if (messages_ahead_.size() > kMaxAhead) {
      return {Code::kInvalidArgument, "too many messages ahead of a missing one"};
    }
  }
  note_gap(now);
  return {};
}

Result<std::optional<BoxNotice>> Link::take_notice(ByteView bytes, TimeUs now) {
  Result<Envelope> decoded = decode(bytes);
  if (!decoded.ok()) return decoded.status();
  const Envelope& envelope = decoded.value();
  if (envelope.sender != peer_) return std::optional<BoxNotice>{};
  last_heard_ = now;
  const auto* box = std::get_if<BoxNotice>(&envelope.body);
  if (box == nullptr) {
    return Status(Code::kInvalidArgument, std::string(name_of(envelope.body)) + " came as a notice");
  }
  if (envelope.seq < boxes_in_order_ || !boxes_ahead_.insert(envelope.seq).second) {
    return std::optional<BoxNotice>{};
  }
  while (!boxes_ahead_.empty() && *boxes_ahead_.begin() == boxes_in_order_) {
    boxes_ahead_.erase(boxes_ahead_.begin());
    ++boxes_in_order_;
  }
  if (boxes_ahead_.size() > kMaxAhead) {
    return Status(Code::kInvalidArgument, "too many boxes ahead of a missing one");
  }
  note_gap(now);
  return std::optional<BoxNotice>(*box);
}

void Link::note_gap(TimeUs now) {
  if (gap_since_ != kNever && messages_in_order_ >= gap_messages_ && boxes_seen() >= gap_boxes_) {
    gap_since_ = kNever;
  }
  const bool open = messages_in_order_ < promised_messages_ || boxes_seen() < promised_boxes_;
  if (open && gap_since_ == kNever) {
    gap_messages_ = promised_messages_;
    gap_boxes_ = promised_boxes_;
    gap_since_ = now;
  }
}

bool Link::ping_due(TimeUs now) {
  if (now < next_ping_) return false;
  next_ping_ = now + peer_timeout_us_ / kPingsPerTimeout;
  return true;
}

void Link::ping_refused(TimeUs now) {
  next_ping_ = now + peer_timeout_us_ / (kPingsPerTimeout * kTriesPerPing);
}

std::optional<std::string> Link::check(TimeUs now) const {
  if (now - last_heard_ >= peer_timeout_us_) {
    return "peer silent for " + std::to_string((now - last_heard_) / 1000) + " ms";
  }
  if (gap_since_ != kNever && now - gap_since_ >= peer_timeout_us_) {
    return "lost on the way: peer sent " + std::to_string(promised_messages_) + " messages and " +
           std::to_string(promised_boxes_) + " boxes, " + std::to_string(messages_in_order_) + " and " +
           std::to_string(boxes_seen()) + " arrived";
  }
  return std::nullopt;
}

void Link::restart_clocks(TimeUs now) {
  last_heard_ = now;
  if (gap_since_ != kNever) gap_since_ = now;
}

TimeUs Link::next_deadline() const {
  const TimeUs gap = gap_since_ == kNever ? kNever : gap_since_ + peer_timeout_us_;
  return std::min({next_ping_, last_heard_ + peer_timeout_us_, gap});
}

}  // namespace kvpush::protocol
