// A network in memory, under the test's control: nothing moves but in poll(), and all luck comes from a seed.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace kvpush::fake {

class End;

/// What is shared by the two ends of all sessions.
struct Net {
  // What the network is.
  bool mapped = false;
  bool proves_quiet = true;        ///< a landing is quiet once P has closed; else never
  bool keeps_until_quiet = false;  ///< and is not released before
  bool tells_close = false;        ///< closing one end is noticed at the other
  std::string name = "fake";
  // What goes wrong. Rates in [0, 1].
  double drop = 0;
  double duplicate = 0;
  double delay = 0;
  double again = 0;
  bool reorder = false;
  std::function<bool(bool is_notice, ByteView)> lose;  ///< true: this message or notice never arrives
  std::function<Fate(TicketId)> fate;                  ///< of a post; completed by default
  // What was seen.
  std::uint64_t num_wild_writes = 0;  ///< into landings that were released

  std::mt19937_64 random{1};
  std::uint64_t round = 0;

  bool hits(double rate) { return rate > 0 && std::uniform_real_distribution<>(0, 1)(random) < rate; }

  struct Shared {
    End* d = nullptr;
    End* p = nullptr;
    Bytes landing;
    std::size_t slot_bytes = 0;
    bool d_open = true;
    bool p_open = false;
    bool connected = false;
    bool released = false;
  };
  std::map<SessionId, Shared> sessions;
};

/// One engine's end.
class End final : public Transport {
 public:
  explicit End(Net& net) : net_(net) {}

  std::string_view name() const override { return net_.name; }
  Capabilities capabilities() const override { return {net_.mapped, false, 1U << 16U}; }

  Result<Bytes> open_landing(const SessionId& id, std::size_t slot_bytes, std::uint32_t num_slots) override {
    Net::Shared& session = net_.sessions[id];
    session.d = this;
    session.slot_bytes = slot_bytes;
    session.landing.resize(slot_bytes * num_slots);
    return Bytes(1);
  }
  Region landing(const SessionId& id) override {
    Bytes& bytes = net_.sessions.at(id).landing;
    return {bytes.data(), bytes.size()};
  }
  Result<Bytes> accept(const SessionId& id, ByteView, std::size_t, std::uint32_t) override {
    const auto found = net_.sessions.find(id);
    if (found == net_.sessions.end() || found->second.released)
      return Status(Code::kTransport, "no such landing");
    found->second.p = this;
    found->second.p_open = true;
    return Bytes(2);
  }
  Status connect(const SessionId& id, ByteView) override {
    if (fail_connect) return {Code::kTransport, "no route"};
    net_.sessions.at(id).connected = true;
    return {};
  }
  Region slot_memory(const SessionId& id, std::uint32_t slot) override {
    Net::Shared& session = net_.sessions.at(id);
    if (!session.connected) return {};
    return {session.landing.data() + slot * session.slot_bytes, session.slot_bytes};
  }
  Result<Region> allocate_staging(std::size_t size_bytes) override {
    if (num_staging == max_staging) return Status(Code::kExhausted, "no staging memory");
    ++num_staging;
    staging_.push_back(std::make_unique<Bytes>(size_bytes));
    return Region{staging_.back()->data(), size_bytes};
  }
  void release_staging(Region) override { --num_staging; }
  Status clear_staging(Region region) override {
    if (clear_fails) return {Code::kTransport, "the device failed"};
    return Transport::clear_staging(region);
  }

  Sent post(const SessionId& id, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override {
    if (net_.hits(net_.again)) return Sent::kAgain;
    posts_.push_back({id, ticket, source, slot, Bytes(notice.begin(), notice.end())});
    return Sent::kYes;
  }
  Sent send(const SessionId& id, ByteView message) override {
    if (net_.hits(net_.again)) return Sent::kAgain;
    deliver(id, false, message);
    return Sent::kYes;
  }

  void poll(TransportSink& sink) override {
    // What came in before this round; the sink may send meanwhile.
    for (const Post& post : std::exchange(posts_, {})) carry_out(post, sink);
    std::vector<Packet> due;
    std::vector<Packet> later;
    for (Packet& packet : std::exchange(inbox_, {}))
      (packet.due <= net_.round ? due : later).push_back(std::move(packet));
    inbox_.insert(inbox_.begin(), std::make_move_iterator(later.begin()),
                  std::make_move_iterator(later.end()));
    if (net_.reorder) std::shuffle(due.begin(), due.end(), net_.random);
    for (const Packet& packet : due) {
      if (packet.is_notice) {
        sink.on_notice(packet.session, packet.bytes);
      } else {
        sink.on_message(packet.session, packet.bytes);
      }
    }
    for (const SessionId& id : std::exchange(losses_, {})) sink.on_lost(id, "the other end closed");
    for (const TicketId ticket : std::exchange(settled, {})) sink.on_settled(ticket);
  }
  int wait_fd() const override { return -1; }
  bool arm_wait() override { return false; }

  void close_session(const SessionId& id) override {
    Net::Shared& session = net_.sessions.at(id);
    const bool is_d = session.d == this;
    (is_d ? session.d_open : session.p_open) = false;
    End* const other = is_d ? session.p : session.d;
    if (net_.tells_close && other != nullptr) other->losses_.push_back(id);
  }
  bool landing_quiet(const SessionId& id) override {
    const Net::Shared& session = net_.sessions.at(id);
    return session.p == nullptr || (net_.proves_quiet && !session.p_open && !has_posts(session));
  }
  bool release_landing(const SessionId& id) override {
    if (net_.keeps_until_quiet && !landing_quiet(id)) return false;
    Net::Shared& session = net_.sessions.at(id);
    session.released = true;
    session.landing = {};
    return true;
  }

  bool fail_connect = false;
  std::vector<TicketId> settled;  ///< told by the next poll
  std::size_t num_staging = 0;
  std::size_t max_staging = SIZE_MAX;
  bool clear_fails = false;

 private:
  struct Packet {
    SessionId session;
    bool is_notice = false;
    Bytes bytes;
    std::uint64_t due = 0;
  };
  struct Post {
    SessionId session;
    TicketId ticket = 0;
    ByteView source;
    std::uint32_t slot = 0;
    Bytes notice;
  };

  [[nodiscard]] static bool has_posts(const Net::Shared& session) {
    return std::any_of(session.p->posts_.begin(), session.p->posts_.end(), [&](const Post& post) {
      return &session.p->net_.sessions.at(post.session) == &session;
    });
  }

  void deliver(const SessionId& id, bool is_notice, ByteView bytes) {
    Net::Shared& session = net_.sessions.at(id);
    End* const to = session.d == this ? session.p : session.d;
    if (to == nullptr || (net_.lose && net_.lose(is_notice, bytes)) || net_.hits(net_.drop)) return;
    for (int copies = net_.hits(net_.duplicate) ? 2 : 1; copies > 0; --copies) {
      const std::uint64_t wait = net_.hits(net_.delay) ? 1 + net_.random() % 8 : 0;
      to->inbox_.push_back({id, is_notice, Bytes(bytes.begin(), bytes.end()), net_.round + wait});
    }
  }

  void carry_out(const Post& post, TransportSink& sink) {
    Net::Shared& session = net_.sessions.at(post.session);
    Fate fate = net_.fate ? net_.fate(post.ticket) : Fate::kCompleted;
    if (!session.p_open) fate = net_.proves_quiet ? Fate::kFailed : Fate::kUnknown;
    if (fate != Fate::kFailed) {
      if (session.released) ++net_.num_wild_writes;
      if (!session.released && !post.source.empty()) {
        std::copy(post.source.begin(), post.source.end(),
                  session.landing.begin() + static_cast<std::ptrdiff_t>(post.slot * session.slot_bytes));
      }
    }
    if (fate == Fate::kCompleted) deliver(post.session, true, post.notice);
    sink.on_completed(post.ticket, fate);
  }

  Net& net_;
  std::vector<Packet> inbox_;
  std::vector<Post> posts_;
  std::vector<SessionId> losses_;
  std::vector<std::unique_ptr<Bytes>> staging_;
};

}  // namespace kvpush::fake
