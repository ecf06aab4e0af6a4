// One engine without its thread: the state machines, transports, a packer and the sessions between them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "cache/cache.hpp"
#include "engine/carrier.hpp"
#include "engine/choice.hpp"
#include "engine/gate.hpp"
#include "engine/handshake.hpp"
#include "engine/stats.hpp"
#include "pack/packer.hpp"
#include "protocol/actions.hpp"
#include "protocol/link.hpp"
#include "protocol/receiver.hpp"
#include "protocol/sender.hpp"
#include "transport/transport.hpp"

namespace kvpush {

struct CoreConfig {
  std::size_t slot_bytes = 0;  ///< 0: 1 MiB, or the cache's largest unit if that is more
  std::uint32_t num_slots = 8;
  std::size_t landing_bytes = std::size_t{256} << 20U;
  std::size_t num_leases = 16;
  std::size_t max_quarantined_bytes = std::size_t{1} << 30U;
  std::size_t max_sessions = 1024;
  std::size_t max_claims = 65536;          ///< P: of one session
  std::uint64_t min_link_bytes_per_s = 0;  ///< P: warns of a session's path below this; 0: does not measure
  protocol::Timeouts timeouts;
};

/// Everything that the progress thread does, one turn at a time; time comes in, nothing blocks. Tests
/// drive it over a simulated network and clock. Progress thread only.
class Core final : private TransportSink {
 public:
  /// InvalidArgument when slot and cache do not fit.
  static Status check(const Cache& cache, const CoreConfig& config);
  /// `transport` is what offers use that name none.
  Core(const Cache& cache, const CoreConfig& config, Transport& transport, Packer& packer,
       const Incarnation& incarnation, TimeUs now, std::function<Uuid()> new_id = random_uuid);

  /// One more, with a name of its own.
  void add(Transport& transport);
  [[nodiscard]] const std::deque<Carrier>& carriers() const { return carriers_; }

  // --- set-up of sessions
  /// What an offer is for: a peer that said hello, and how it is reached.
  struct Choice {
    std::string transport;  ///< empty: the first
    Incarnation peer;       ///< under whose name the path's rate is remembered; none: it is not
    bool tells_rate = false;
  };
  /// D: opens a landing for one peer. Exhausted when the budget is spent and no session is idle.
  Result<Bytes> offer(TimeUs now, const Choice& choice);
  Result<Bytes> offer(TimeUs now) { return offer(now, Choice{}); }
  Rates& rates() { return rates_; }
  /// P: the same offer gets the same answer.
  Result<Bytes> answer(ByteView offer, TimeUs now);
  /// D: a late or foreign answer is a Handshake error.
  Result<SessionId> establish(ByteView answer, TimeUs now);
  /// D: takes back an offer that nobody will answer: its landing is free at once. Handshake if it is not this
  /// engine's; an offer that was established or has expired is left as it is.
  Status withdraw(ByteView offer, TimeUs now);
  struct Link {
    std::string transport;
    std::uint64_t bytes_per_s = 0;  ///< as P measured it; 0: it did not, or not yet
    bool is_measuring = false;
  };
  /// Of an open session. PeerLost when it is not open.
  [[nodiscard]] Result<Link> link(const SessionId& session) const;
  /// Says BYE and ends the session; its transfers fail. PeerLost when it is not open.
  Status disconnect(const SessionId& session, TimeUs now);

  // --- the two halves; their actions go to actions() and are carried out by the next turn
  protocol::Sender& sender() { return sender_; }
  protocol::Receiver& receiver() { return receiver_; }
  /// In front of both: their calls that a fence may hold back.
  Gate& gate() { return gate_; }
  protocol::Actions& actions() { return actions_; }

  /// Does all that can be done now. Returns whether it did anything.
  bool turn(TimeUs now);
  /// When turn() must run again even if nothing arrives.
  [[nodiscard]] TimeUs next_deadline() const;
  /// Events in the order in which they happened; each is handed out once.
  std::vector<protocol::Event> take_events() { return std::exchange(events_, {}); }

  /// When a box last came, went or was copied: the time of that turn.
  [[nodiscard]] TimeUs moved_at() const { return moved_at_; }
  /// A post, pack or unpack is under way, or a box came within the last 2 ms: look again at once.
  [[nodiscard]] bool busy(TimeUs now) const;
  /// A push, claim or receive is open, or a call waits for its fence.
  [[nodiscard]] bool open() const;
  /// A call waits for its fence: no descriptor tells of it.
  [[nodiscard]] bool fenced() const { return !gate_.empty(); }
  /// The packer has a job of whose end no descriptor tells.
  [[nodiscard]] bool copies_unseen() const;
  /// Nothing of this engine runs or is owed by the transport.
  [[nodiscard]] bool quiet() const { return work_.empty(); }

  /// Ends every session with BYE; pushes and receives fail.
  void shut_down(TimeUs now);
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] const CoreConfig& config() const { return config_; }

 private:
  /// The first connects what lies below the transport, two are timed, and the last tells D what they found.
  static constexpr std::uint32_t kNumProbes = 4;

  enum class Role : std::uint8_t { kReceives, kPushes };
  enum class State : std::uint8_t { kOffered, kOpen, kClosed };

  struct Post {
    TicketId ticket = 0;
    std::uint32_t slot = 0;
    ByteView source;
    Bytes notice;
  };
  struct Session {
    Session(Role our_role, State first_state, const Incarnation& other, Carrier& its_carrier,
            protocol::Link its_link, TimeUs now)
        : role(our_role),
          state(first_state),
          carrier(&its_carrier),
          peer(other),
          link(std::move(its_link)),
          opened_at(now),
          active_at(now) {}

    Role role;
    State state;
    Carrier* carrier;
    Incarnation peer;
    protocol::Link link;
    std::uint32_t num_slots = 0;
    std::size_t slot_bytes = 0;
    std::deque<std::uint32_t> free_slots;     ///< P: credits
    std::vector<std::uint32_t> owed_credits;  ///< D: not yet told
    std::deque<Bytes> backlog;
    std::size_t backlog_bytes = 0;
    std::deque<Post> waiting_posts;
    Bytes answer;        ///< P: what the offer got
    bool heard = false;  ///< P: D has established
    Region probe_lease;  ///< P: zeros to measure the link with, between the posts
    std::uint32_t probes_left = 0;
    TimeUs best_probe_us = kNever;
    Incarnation rated_as;           ///< D: Choice::peer
    bool awaits_rate = false;       ///< the measurement is under way
    std::uint64_t bytes_per_s = 0;  ///< what it found
    std::uint32_t local_work = 0;   ///< packs and unpacks under way
    std::uint32_t posts = 0;
    bool unknown_fate = false;  ///< P: a post may still write
    TimeUs opened_at;
    TimeUs active_at;
    FailCode ended = FailCode::kNone;
    std::string reason;
    bool lost_reported = false;
    bool transport_closed = false;
  };
  /// A pack, then a post; an unpack; or the post of a probe. Keyed by ticket.
  struct Work {
    enum class Kind : std::uint8_t { kPack, kPost, kUnpack, kProbe } kind;
    SessionId session;
    protocol::BoxTask task;
    protocol::Unpack unpack;
    std::uint32_t slot = 0;
    Region lease;
    TimeUs started_at = 0;
    Carrier* carrier = nullptr;  ///< whose the lease is
  };

  void on_message(const SessionId& session, ByteView message) override;
  void on_notice(const SessionId& session, ByteView notice) override;
  void on_completed(TicketId ticket, Fate fate) override;
  void on_lost(const SessionId& session, const std::string& reason) override;
  void on_settled(TicketId ticket) override {
    for (Carrier& carrier : carriers_) carrier.leases.settle(ticket);
  }

  [[nodiscard]] protocol::Link link_to(const Incarnation& peer, TimeUs now) const {
    return {incarnation_, peer, config_.timeouts.peer_us, now};
  }
  void carry_out();
  void close(const SessionId& id, FailCode code, std::string reason);
  void say_bye(const SessionId& id, Session& session);
  void retire();
  void start_unpack(protocol::Unpack unpack);
  void finish_packs();
  void packed(Work work, TicketId ticket, const PackDone& done);
  void schedule();
  bool start_pack(const SessionId& id, Session& session);
  void post(const SessionId& id, Session& session, Post post);
  [[nodiscard]] bool measures(const Session& session) const {
    return config_.min_link_bytes_per_s != 0 && !session.carrier->capabilities.mapped_slots;
  }
  void probe(const SessionId& id, Session& session);
  void probed(const SessionId& id, Session& session, const Work& work);
  void measured(const SessionId& id, Session& session, std::uint64_t bytes_per_s);
  [[nodiscard]] std::size_t probe_bytes(const Session& session) const;
  void say_path(const SessionId& id, const Session& session) const;
  void enqueue(const SessionId& id, Session& session, Bytes message);
  void flush();
  void keep_time();
  [[nodiscard]] Carrier* find_carrier(std::string_view name);
  [[nodiscard]] std::size_t landing_bytes_in(State state) const;
  [[nodiscard]] std::size_t quarantined_bytes() const;
  Status make_room(std::size_t bytes, TimeUs now);
  Status make_room_for(const Incarnation& peer);

  const Cache& cache_;
  CoreConfig config_;
  std::map<std::string, std::string> identity_;
  Packer& packer_;
  Incarnation incarnation_;
  std::function<Uuid()> new_id_;  ///< names sessions; a simulation must be able to name them again
  std::deque<Carrier> carriers_;  ///< the first is for offers that name none
  Rates rates_;
  protocol::Sender sender_;
  protocol::Receiver receiver_;
  Gate gate_;
  protocol::Actions actions_;
  std::vector<protocol::Event> events_;
  std::map<SessionId, Session> sessions_;
  std::map<Incarnation, std::deque<SessionId>>
      quiet_;  ///< P: sessions of this peer that ended with all posts known
  std::map<TicketId, Work> work_;
  TicketId next_ticket_ = 1;
  SessionId next_session_;  ///< whose turn it is to pack
  TimeUs now_;
  TimeUs last_turn_;
  TimeUs moved_at_;
  bool progressed_ = false;
  Stats stats_;
  std::vector<PackDone> done_;
};

}  // namespace kvpush
