#include "transport/fault/fault_transport.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/fault/fault_dice.hpp"

namespace kvpush {
namespace {

using fault::Dice;
using fault::Stream;

enum class ArrivalKind : std::uint8_t { kMessage, kNotice };

struct Held {
  std::uint64_t due_poll = 0;
  SessionId session;
  ArrivalKind kind = ArrivalKind::kMessage;
  Bytes bytes;
};

class FaultTransport final : public Transport, private TransportSink {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, const FaultPolicy& policy)
      : inner_(std::move(inner)), policy_(policy), dice_(policy.seed) {}

  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] Capabilities capabilities() const override { return inner_->capabilities(); }
  Result<Bytes> open_landing(const SessionId& session, std::size_t slot_bytes,
                             std::uint32_t num_slots) override {
    return inner_->open_landing(session, slot_bytes, num_slots);
  }
  [[nodiscard]] Region landing(const SessionId& session) override { return inner_->landing(session); }
  Result<Bytes> accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                       std::uint32_t num_slots) override {
    return inner_->accept(session, description, slot_bytes, num_slots);
  }
  Status connect(const SessionId& session, ByteView description) override {
    return inner_->connect(session, description);
  }
  [[nodiscard]] Region slot_memory(const SessionId& session, std::uint32_t slot) override {
    return inner_->slot_memory(session, slot);
  }
  Result<Region> allocate_staging(std::size_t size_bytes) override {
    return inner_->allocate_staging(size_bytes);
  }
  void release_staging(Region region) override { inner_->release_staging(region); }
  Status clear_staging(Region region) override { return inner_->clear_staging(region); }
  [[nodiscard]] int wait_fd() const override { return inner_->wait_fd(); }
  [[nodiscard]] bool landing_quiet(const SessionId& session) override {
    return inner_->landing_quiet(session);
  }
  bool release_landing(const SessionId& session) override { return inner_->release_landing(session); }

  Sent post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override {
    if (loses(session)) return Sent::kLost;
    if (answers_again(Stream::kPostAgain, policy_.post_again)) return Sent::kAgain;
    if (num_posts_ + 1 == policy_.fail_post_before) {
      ++num_posts_;
      failed_.push_back(ticket);
      return Sent::kYes;
    }
    const Sent sent = inner_->post(session, ticket, source, slot, notice);
    if (sent == Sent::kYes && ++num_posts_ == policy_.fail_post_after) unknown_.insert(ticket);
    return sent;
  }

  Sent send(const SessionId& session, ByteView message) override {
    if (loses(session)) return Sent::kLost;
    if (answers_again(Stream::kSendAgain, policy_.send_again)) return Sent::kAgain;
    return inner_->send(session, message);
  }

  void poll(TransportSink& sink) override {
    ++num_polls_;
    must_poll_ = false;
    sink_ = &sink;
    for (const TicketId ticket : std::exchange(failed_, {})) sink.on_completed(ticket, Fate::kFailed);
    inner_->poll(*this);
    release_due();
    for (const SessionId& session : std::exchange(losing_, {})) {
      if (lost_.contains(session)) report_lost(session, "lost by the fault policy");
    }
    sink_ = nullptr;
  }

  [[nodiscard]] bool arm_wait() override {
    return inner_->arm_wait() || must_poll_ || !held_.empty() || !failed_.empty() || !losing_.empty();
  }

  void close_session(const SessionId& session) override {
    forget(session);
    lost_.erase(session);
    inner_->close_session(session);
  }

 private:
  void on_message(const SessionId& session, ByteView message) override {
    arrive(session, ArrivalKind::kMessage, message, policy_.messages, Stream::kMessage);
  }
  void on_notice(const SessionId& session, ByteView notice) override {
    arrive(session, ArrivalKind::kNotice, notice, policy_.notices, Stream::kNotice);
  }
  void on_completed(TicketId ticket, Fate fate) override {
    sink_->on_completed(ticket, unknown_.erase(ticket) != 0 ? Fate::kUnknown : fate);
  }
  void on_settled(TicketId ticket) override { sink_->on_settled(ticket); }
  void on_lost(const SessionId& session, const std::string& reason) override {
    std::erase(losing_, session);
    if (const auto found = lost_.find(session); found != lost_.end() && found->second) return;
    report_lost(session, reason);
  }

  void report_lost(const SessionId& session, const std::string& reason) {
    forget(session);
    lost_[session] = true;
    sink_->on_lost(session, reason);
  }

  void arrive(const SessionId& session, ArrivalKind kind, ByteView bytes, const ArrivalFaults& faults,
              Stream stream) {
    if (lost_.contains(session)) return;
    Dice::Roll roll = dice_.roll(stream);
    if (roll.hits(faults.drop)) return;
    if (roll.hits(faults.duplicate)) {
      hold(session, kind, bytes, roll);
    } else if (roll.hits(faults.delay)) {
      hold(session, kind, bytes, roll);
      return;
    } else if (roll.hits(faults.corrupt) && !bytes.empty()) {
      Bytes damaged(bytes.begin(), bytes.end());
      const std::uint64_t bit = roll.below(damaged.size() * 8);
      damaged[bit / 8] ^= std::byte{1} << (bit % 8);
      deliver(session, kind, damaged);
      return;
    } else if (roll.hits(faults.truncate) && !bytes.empty()) {
      deliver(session, kind, bytes.first(roll.below(bytes.size())));
      return;
    }
    deliver(session, kind, bytes);
  }

  void hold(const SessionId& session, ArrivalKind kind, ByteView bytes, Dice::Roll& roll) {
    const std::uint64_t polls = 1 + roll.below(std::max<std::uint32_t>(policy_.max_delay_polls, 1));
    held_.push_back({num_polls_ + polls, session, kind, Bytes(bytes.begin(), bytes.end())});
  }

  void release_due() {
    std::vector<Held> due;
    for (Held& held : held_) {
      if (held.due_poll <= num_polls_) due.push_back(std::move(held));
    }
    std::erase_if(held_, [this](const Held& held) { return held.due_poll <= num_polls_; });
    for (const Held& held : due) {
      // A delivery before it may have closed the session.
      if (!closed_in_poll_.contains(held.session)) deliver(held.session, held.kind, held.bytes);
    }
    closed_in_poll_.clear();
  }

  void deliver(const SessionId& session, ArrivalKind kind, ByteView bytes) {
    if (kind == ArrivalKind::kMessage) {
      sink_->on_message(session, bytes);
    } else {
      sink_->on_notice(session, bytes);
    }
  }

  [[nodiscard]] bool answers_again(Stream stream, double rate) {
    if (!dice_.roll(stream).hits(rate)) return false;
    must_poll_ = true;
    return true;
  }

  [[nodiscard]] bool loses(const SessionId& session) {
    if (lost_.contains(session)) return true;
    if (++num_sends_ != policy_.lose_at_send) return false;
    lost_[session] = false;
    losing_.push_back(session);
    return true;
  }

  void forget(const SessionId& session) {
    std::erase_if(held_, [&](const Held& held) { return held.session == session; });
    std::erase(losing_, session);
    if (sink_ != nullptr) closed_in_poll_.insert(session);
  }

  std::unique_ptr<Transport> inner_;
  const FaultPolicy policy_;
  Dice dice_;
  TransportSink* sink_ = nullptr;  // during poll()
  std::uint64_t num_polls_ = 0;
  std::uint64_t num_posts_ = 0;
  std::uint64_t num_sends_ = 0;
  bool must_poll_ = false;  // a kAgain of ours has no wake-up
  std::vector<Held> held_;
  std::vector<TicketId> failed_;
  std::unordered_set<TicketId> unknown_;
  std::unordered_map<SessionId, bool> lost_;  // whether on_lost was delivered
  std::vector<SessionId> losing_;
  std::unordered_set<SessionId> closed_in_poll_;
};

}  // namespace

std::unique_ptr<Transport> make_fault_transport(std::unique_ptr<Transport> inner, const FaultPolicy& policy) {
  return std::make_unique<FaultTransport>(std::move(inner), policy);
}

}  // namespace kvpush
