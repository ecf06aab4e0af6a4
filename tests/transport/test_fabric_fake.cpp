// The libfabric transport over a fake of it (fake_fabric.hpp): conformance where nothing is ordered and
// everything is refused at times, and errors.
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "conformance.hpp"
#include "fake_fabric.hpp"
#include "transport/fabric/fabric_transport.hpp"

namespace kvpush {
namespace {

using conformance::End;
using conformance::numbered;
using conformance::pattern;
using conformance::pump_until;

/// `num_rails`: 0 for all NICs.
conformance::Subject over(const std::string& label, const fake_fabric::Policy& policy, int num_rails = 0) {
  conformance::Subject subject;
  subject.label = label;
  subject.make = [policy, num_rails](const Incarnation& self) -> std::unique_ptr<Transport> {
    FabricOptions options;
    options.incarnation = self;
    options.max_write_bytes = policy.max_write_bytes;
    options.min_stripe_bytes = 1000;
    options.try_again_us = 0;
    for (int i = 0; i < (num_rails == 0 ? policy.num_nics : num_rails); ++i) {
      options.rails.push_back("nic" + std::to_string(i));
    }
    auto made = make_fabric_transport(fake_fabric::network(policy), options);
    return made.ok() ? std::move(made).value() : nullptr;
  };
  subject.proves_quiet = policy.delivers;
  return subject;
}

// All within this process: the fake has no other.
#define KVPUSH_FAKE_CONFORMANCE(subject)                         \
  KVPUSH_CONFORMANCE_TEST(subject, set_up)                       \
  KVPUSH_CONFORMANCE_TEST(subject, message_sizes)                \
  KVPUSH_CONFORMANCE_TEST(subject, post_sizes)                   \
  KVPUSH_CONFORMANCE_TEST(subject, one_completion)               \
  KVPUSH_CONFORMANCE_TEST(subject, message_back_pressure)        \
  KVPUSH_CONFORMANCE_TEST(subject, notice_back_pressure)         \
  KVPUSH_CONFORMANCE_TEST(subject, many_sessions)                \
  KVPUSH_CONFORMANCE_TEST(subject, many_peers)                   \
  KVPUSH_CONFORMANCE_TEST(subject, close_with_outstanding_posts) \
  KVPUSH_CONFORMANCE_TEST(subject, closed_by_landing)            \
  KVPUSH_CONFORMANCE_TEST(subject, closed_by_source)             \
  KVPUSH_CONFORMANCE_TEST(subject, closed_inside_poll)           \
  KVPUSH_CONFORMANCE_TEST(subject, never_connected)              \
  KVPUSH_CONFORMANCE_TEST(subject, wrong_descriptions)           \
  KVPUSH_CONFORMANCE_TEST(subject, unknown_sessions)             \
  KVPUSH_CONFORMANCE_TEST(subject, thread_source)

conformance::Subject plain() {
  return over("plain", {});
}
/// As EFA: no order, keys and addresses of the provider's, small writes.
conformance::Subject unordered() {
  return over("unordered", {.max_write_bytes = 3000, .by_address = true, .shuffles = true});
}
/// Every call refused at times, entries one by one, immediates repeated, few receives.
conformance::Subject grudging() {
  return over("grudging", {.seed = 7,
                           .max_write_bytes = 3000,
                           .max_receives = 3,
                           .shuffles = true,
                           .again = 100,
                           .repeats = 60,
                           .short_reads = 128});
}
/// Without delivery-complete operations nothing proves that a landing is quiet.
conformance::Subject vague() {
  return over("vague", {.delivers = false});
}
/// Four rails, one far behind the others.
conformance::Subject striped() {
  return over("striped", {.seed = 3,
                          .max_write_bytes = 3000,
                          .by_address = true,
                          .shuffles = true,
                          .repeats = 60,
                          .num_nics = 4,
                          .slow_nic = 2});
}
/// The first of two rails never takes anything.
conformance::Subject half_stubborn() {
  return over("half_stubborn", {.shuffles = true, .num_nics = 2, .stubborn_nic = 0});
}
KVPUSH_FAKE_CONFORMANCE(striped)
KVPUSH_FAKE_CONFORMANCE(half_stubborn)
KVPUSH_FAKE_CONFORMANCE(plain)
KVPUSH_FAKE_CONFORMANCE(unordered)
KVPUSH_FAKE_CONFORMANCE(grudging)
KVPUSH_FAKE_CONFORMANCE(vague)

TEST(a_write_that_fails_ends_its_session_and_no_other) {
  const conformance::Subject subject = over("x", {});
  End d(subject);
  End p(subject);
  const SessionId bad = conformance::new_session();
  const SessionId good = conformance::new_session();
  if (!conformance::establish(d, p, bad, 4096, 4) || !conformance::establish(d, p, good, 4096, 4)) return;
  fake_fabric::fail_writes(1);
  CHECK(p.post(bad, 1, 0, pattern(1, 100), numbered(1, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(bad) && p.fates.contains(1); }));
  CHECK_EQ(p.fates[1], std::vector<Fate>{Fate::kUnknown});
  CHECK(d.notices[bad].empty());
  CHECK(p.post(bad, 2, 1, pattern(1, 100), numbered(1, 8)) == Sent::kLost);
  CHECK(p.post(good, 3, 0, pattern(1, 100), numbered(3, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return d.notices[good].size() == 1 && p.fates.contains(3); }));
  CHECK_EQ(p.fates[3], std::vector<Fate>{Fate::kCompleted});
  // What became of the write that failed is not known: the landing does not count as quiet.
  p->close_session(bad);
  CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(bad); }));
  d->close_session(bad);
  conformance::settle({&d, &p});
  CHECK(!d->landing_quiet(bad));
  end_session(subject, d, p, good);
}

TEST(a_part_that_fails_stops_its_box) {
  const conformance::Subject subject = over("x", {.max_write_bytes = 1000});
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, 4096, 4)) return;
  fake_fabric::fail_writes(2);
  CHECK(p.post(session, 1, 0, pattern(1, 4000), numbered(1, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(session) && p.fates.contains(1); }));
  conformance::settle({&d, &p});
  CHECK_EQ(p.fates[1], std::vector<Fate>{Fate::kUnknown});
  CHECK(d.notices[session].empty());
}

TEST(a_queue_that_overran_ends_all_sessions) {
  const conformance::Subject subject = over("x", {});
  End d(subject);
  End p(subject);
  const SessionId one = conformance::new_session();
  const SessionId two = conformance::new_session();
  if (!conformance::establish(d, p, one, 4096, 4) || !conformance::establish(d, p, two, 4096, 4)) return;
  fake_fabric::overrun();
  CHECK(pump_until({&d, &p}, [&] { return d.losses.size() == 2 && p.losses.size() == 2; }));
  for (const SessionId& session : {one, two}) {
    d->close_session(session);
    p->close_session(session);
  }
}

TEST(a_peer_that_is_gone_ends_its_posts) {
  const conformance::Subject subject = over("x", {});
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, 4096, 4)) return;
  conformance::settle({&d, &p});  // or D would poll for its last words
  for (TicketId ticket = 1; ticket <= 4; ++ticket) {
    CHECK(p.post(session, ticket, 0, pattern(1, 100), numbered(ticket, 8)) == Sent::kYes);
  }
  d.destroy();
  CHECK(pump_until({&p}, [&] { return p.fates.size() == 4 && p.losses.contains(session); }));
  for (const auto& [ticket, fates] : p.fates) CHECK_EQ(fates, std::vector<Fate>{Fate::kUnknown});
}

TEST(a_provider_of_short_messages_is_refused) {
  const auto made = make_fabric_transport(fake_fabric::network({.max_message_bytes = 8192}), {});
  CHECK(made.status().code() == Code::kUnsupported);
  CHECK(made.status().message().find("8192") != std::string::npos);
}

TEST(everything_is_closed) {
  const std::size_t before = fake_fabric::num_open();
  {
    const conformance::Subject subject = over("x", {.delivers = false});
    End d(subject);
    End p(subject);
    const SessionId session = conformance::new_session();
    const SessionId closed = conformance::new_session();
    if (!conformance::establish(d, p, session, 4096, 4) || !conformance::establish(d, p, closed, 4096, 4))
      return;
    CHECK(p.post(session, 1, 0, pattern(1, 100), numbered(1, 8)) == Sent::kYes);
    p->close_session(closed);
    d->close_session(closed);
    d->release_landing(closed);
    CHECK(fake_fabric::num_open() > before);
  }
  CHECK_EQ(fake_fabric::num_open(), before);
}

}  // namespace
}  // namespace kvpush
