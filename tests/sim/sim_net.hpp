// A network in memory with a clock, and everything that can go wrong on it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dice.hpp"
#include "sim_lies.hpp"
#include "transport/transport.hpp"

namespace kvpush::sim {

class SimEnd;

/// Rates per message or post.
struct Faults {
  double drop = 0;
  double duplicate = 0;
  double delay = 0;
  double truncate = 0;
  double corrupt = 0;       ///< a message or notice
  double corrupt_data = 0;  ///< what a post wrote
  double stray = 0;         ///< an old message of an earlier incarnation comes again, in this session
  double post_fails = 0;
  double post_unknown = 0;
  double again = 0;
  double lie = 0;  ///< a message or notice says what is not so
  TimeUs max_delay_us = 2000;
};

struct Packet {
  TimeUs due = 0;
  std::uint64_t order = 0;
  SessionId session;
  bool is_notice = false;
  bool to_d = false;
  Bytes bytes;
};

/// The wires. Holds what the two ends of each session must not do, and reports it as a Violation.
class SimNet {
 public:
  /// How a post will go.
  enum class Plan : std::uint8_t { kFine, kFails, kUnknownLanded, kUnknownLate };

  struct Session {
    SimEnd* d = nullptr;
    SimEnd* p = nullptr;
    bool d_open = true;
    bool p_open = false;
    bool d_dead = false;
    bool p_dead = false;
    bool connected = false;
    bool released = false;
    bool p_heard = false;  ///< a message of D has arrived
    bool unknown = false;  ///< the fate of a post was told as unknown
    bool lied = false;
    bool must_end = false;  ///< a lie was told that ends a session
    Liar liar;
    Bytes landing;
    std::size_t slot_bytes = 0;
  };
  struct Write {
    TimeUs due = 0;
    SessionId session;
    SimEnd* from = nullptr;  ///< nullptr: its engine has died
    TicketId ticket = 0;
    ByteView source;
    Bytes snapshot;
    std::uint32_t slot = 0;
    Bytes notice;
    Plan plan = Plan::kFine;
    bool landed = false;
    bool decided = false;
    Fate fate = Fate::kCompleted;
    TimeUs told_at = 0;
    bool told = false;

    [[nodiscard]] bool over() const { return (told || from == nullptr) && (landed || plan == Plan::kFails); }
  };

  Dice dice;
  Faults faults;
  bool mapped = false;
  bool revokes = true;      ///< closing P's end takes back what has not landed
  bool tells_close = true;  ///< one end learns that the other closed or died
  bool reorder = false;
  bool trouble = true;  ///< faults happen
  TimeUs now = 1'000'000;
  /// Set for exploration: packets wait in `held` until somebody hands them out.
  bool hold = false;
  std::vector<Packet> held;

  std::map<SessionId, Session> sessions;
  std::uint64_t num_damaged = 0;  ///< messages or notices
  std::uint64_t num_data_damaged = 0;
  std::uint64_t num_lies = 0;
  std::map<std::string_view, std::uint64_t> num_faults;  ///< by kind
  std::uint64_t hash = 14695981039346656037U;            ///< of everything that was sent

  /// Carries out what is due.
  void advance(TimeUs to);
  /// The engine at this end is gone; what it posted may still land.
  void died(SimEnd& end);
  void count(std::string_view fault) { ++num_faults[fault]; }
  [[nodiscard]] bool lied(const SessionId& id) const { return sessions.at(id).lied; }
  /// The bytes of every session that were not to be touched any more are as they were.
  void check_released() const;
  /// P's view of a mapped slot must be of an open session.
  void check_mapped(const SimEnd& end, const std::byte* slot) const;
  /// D copies out of one slot of a session of its own.
  void check_slot(const SimEnd& end, const std::byte* from, std::size_t size) const;
  [[nodiscard]] bool writes_pending(const SessionId& id) const;
  [[nodiscard]] TimeUs next_due() const;
  void mix(std::uint64_t value) { hash = (hash ^ value) * 1099511628211U; }
  /// Puts a packet on its way to the other end.
  void deliver(const SessionId& id, const SimEnd& from, bool is_notice, ByteView bytes);
  void hand_out(const Packet& packet);

 private:
  friend class SimEnd;
  /// Counts a fault of this kind if luck wants it.
  bool hits(double rate, std::string_view fault);
  void land(Write& write);
  void decide(Write& write, Fate fate);

  std::vector<Write> writes_;
  std::vector<std::pair<SessionId, Bytes>> old_messages_;
  std::vector<std::unique_ptr<Bytes>> staging_;
  std::uint64_t next_order_ = 0;
};

/// One engine's end.
class SimEnd final : public Transport {
 public:
  explicit SimEnd(SimNet& net) : net_(net) {}

  std::string_view name() const override { return "sim"; }
  Capabilities capabilities() const override { return {net_.mapped, false, 1U << 16U}; }
  Result<Bytes> open_landing(const SessionId& id, std::size_t slot_bytes, std::uint32_t num_slots) override;
  Region landing(const SessionId& id) override;
  Result<Bytes> accept(const SessionId& id, ByteView, std::size_t, std::uint32_t) override;
  Status connect(const SessionId& id, ByteView) override;
  Region slot_memory(const SessionId& id, std::uint32_t slot) override;
  Result<Region> allocate_staging(std::size_t size_bytes) override;
  void release_staging(Region) override { --num_staging; }
  Sent post(const SessionId& id, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override;
  Sent send(const SessionId& id, ByteView message) override;
  void poll(TransportSink& sink) override;
  int wait_fd() const override { return -1; }
  bool arm_wait() override { return false; }
  void close_session(const SessionId& id) override;
  bool landing_quiet(const SessionId& id) override;
  bool release_landing(const SessionId& id) override;

  std::size_t num_staging = 0;
  std::size_t num_unknown = 0;  ///< posts whose lease must never be used again
  TimeUs blocked_until = 0;     ///< sends and posts are refused
  std::vector<std::pair<TimeUs, SessionId>> losses;

 private:
  friend class SimNet;
  [[nodiscard]] bool refuses();

  SimNet& net_;
  std::vector<Packet> inbox_;
};

}  // namespace kvpush::sim
