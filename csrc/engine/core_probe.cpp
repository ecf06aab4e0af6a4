// How fast a session's path is, measured before its first box: a transport may have fallen back to a slow
// one.
#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "base/log.hpp"
#include "engine/core.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kMaxProbeBytes = std::size_t{1} << 20U;

std::string in_gb(double bytes_per_s) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f GB/s", bytes_per_s / 1e9);
  return text.data();
}

}  // namespace

std::size_t Core::probe_bytes(const Session& session) const {
  return std::min({session.slot_bytes, session.carrier->leases.lease_bytes(), kMaxProbeBytes});
}

void Core::probe(const SessionId& id, Session& session) {
  const bool under_way = session.posts != 0 || !session.waiting_posts.empty();
  if (session.probes_left == 0 || session.state != State::kOpen || under_way || session.free_slots.empty()) {
    return;
  }
  Carrier& carrier = *session.carrier;
  if (session.probe_lease.data == nullptr) {
    const auto taken = carrier.leases.take();
    if (!taken) return;
    // It may hold another peer's KV. The post is the next turn's, whose clock starts after this.
    const Status cleared = carrier.transport.clear_staging({taken->data, probe_bytes(session)});
    if (!cleared.ok()) {
      carrier.leases.give_back(*taken);
      session.probes_left = 0;
      session.awaits_rate = false;
      return log(LogLevel::kWarning, "session " + to_string(id) + " is not measured: " + cleared.message());
    }
    session.probe_lease = *taken;
    progressed_ = true;
    return;
  }
  const std::uint32_t slot = session.free_slots.front();
  session.free_slots.pop_front();
  const TicketId ticket = next_ticket_++;
  const bool tells = session.probes_left == 1;
  const ByteView zeros(session.probe_lease.data, tells ? 1 : probe_bytes(session));
  Bytes notice = session.link.seal(
      protocol::BoxNotice{protocol::kProbe, slot, {}, tells ? session.bytes_per_s : std::uint64_t{0}});
  work_.emplace(ticket,
                Work{Work::Kind::kProbe, id, {}, {}, slot, session.probe_lease, now_, session.carrier});
  session.probe_lease = {};
  post(id, session, Post{ticket, slot, zeros, std::move(notice)});
  progressed_ = true;
}

void Core::probed(const SessionId& id, Session& session, const Work& work) {
  // Of the timed ones the fastest counts: either side may have been held up by something else.
  const TimeUs spent = std::max(now_ - work.started_at, TimeUs{1});
  const bool timed = session.probes_left != kNumProbes && session.probes_left != 1;
  if (timed) session.best_probe_us = std::min(session.best_probe_us, spent);
  if (--session.probes_left == 1) {
    const double bytes_per_s =
        static_cast<double>(probe_bytes(session)) * 1e6 / static_cast<double>(session.best_probe_us);
    measured(id, session, std::max<std::uint64_t>(static_cast<std::uint64_t>(bytes_per_s), 1));
  }
  if (session.probes_left != 0 && !session.free_slots.empty()) {
    session.probe_lease = work.lease;
    return;
  }
  // Not kept while D keeps the slots: others have use for it.
  work.carrier->leases.give_back(work.lease);
}

void Core::measured(const SessionId& id, Session& session, std::uint64_t bytes_per_s) {
  session.bytes_per_s = stats_.link_bytes_per_s = bytes_per_s;
  session.awaits_rate = false;
  say_path(id, session);
  if (session.role == Role::kPushes) {
    if (bytes_per_s < config_.min_link_bytes_per_s) ++stats_.slow_links;
  } else if (session.rated_as != Incarnation{}) {
    rates_.note(session.rated_as, std::string(session.carrier->transport.name()), bytes_per_s);
  }
}

void Core::say_path(const SessionId& id, const Session& session) const {
  const bool pushes = session.role == Role::kPushes;
  std::string what = "session " + to_string(id) + (pushes ? " to engine " : " from engine ") +
                     to_string(session.peer) + " over " + std::string(session.carrier->transport.name()) +
                     ": ";
  if (session.bytes_per_s == 0) {
    what += session.carrier->capabilities.mapped_slots ? "shared memory" : "not measured";
    return log(LogLevel::kInfo, what);
  }
  what += in_gb(static_cast<double>(session.bytes_per_s));
  // P, which measures, warns; D's choice goes by the same number.
  if (!pushes || session.bytes_per_s >= config_.min_link_bytes_per_s) return log(LogLevel::kInfo, what);
  log(LogLevel::kWarning, what + ", below min_link_gb_per_s (" +
                              in_gb(static_cast<double>(config_.min_link_bytes_per_s)) +
                              "): is this the path you meant? docs/gotchas.md says how to look");
}

}  // namespace kvpush
