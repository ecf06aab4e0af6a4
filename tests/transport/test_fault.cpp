// The fault decorator: invisible without a policy, still a conforming transport when it only delays and
// refuses, and broken exactly as asked otherwise.
#include "conformance.hpp"
#include "transport/fault/fault_transport.hpp"
#include "transport/shm/shm_transport.hpp"

namespace {

using namespace kvpush;
using conformance::End;
using conformance::establish;
using conformance::new_session;
using conformance::numbered;
using conformance::post_pumping;
using conformance::pump_until;
using conformance::send_pumping;
using conformance::settle;

constexpr std::size_t kSlotBytes = 4096;

conformance::Subject faulty(const std::string& label, const FaultPolicy& policy) {
  conformance::Subject subject;
  subject.label = label;
  subject.make = [policy](const Incarnation& self) -> std::unique_ptr<Transport> {
    auto made = make_shm_transport(self, 1'000'000);
    return made.ok() ? make_fault_transport(std::move(made).value(), policy) : nullptr;
  };
  return subject;
}

conformance::Subject plain() {
  return faulty("plain", {});
}
KVPUSH_TRANSPORT_CONFORMANCE(plain)

conformance::Subject rough() {
  FaultPolicy policy;
  policy.seed = 7;
  policy.messages.delay = 0.3;
  policy.notices.delay = 0.3;
  policy.send_again = 0.3;
  policy.post_again = 0.3;
  return faulty("rough", policy);
}
KVPUSH_TRANSPORT_CONFORMANCE(rough)

/// Two ends, D under `policy`, and what D saw of 2,000 messages and as many notices.
struct Arrivals {
  std::vector<Bytes> messages;
  std::vector<Bytes> notices;
};

constexpr std::uint64_t kMany = 2'000;

Arrivals arrivals_under(const FaultPolicy& policy) {
  End d(faulty("d", policy));
  End p(plain());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return {};
  for (std::uint64_t i = 0; i < kMany; ++i) {
    CHECK(send_pumping(p, d, session, numbered(i, 64)) == Sent::kYes);
    CHECK(post_pumping(p, d, session, i, 0, {}, numbered(i, 64)) == Sent::kYes);
    if (i % 10 == 0) d.poll();
  }
  settle({&p, &d});
  return {d.messages[session], d.notices[session]};
}

std::size_t num_damaged(const std::vector<Bytes>& list) {
  std::size_t count = 0;
  for (const Bytes& bytes : list) {
    ByteReader in(bytes);
    count += bytes != numbered(in.get<std::uint64_t>(), 64);
  }
  return count;
}

TEST(drops_at_the_rate) {
  FaultPolicy policy;
  policy.messages.drop = 0.25;
  const Arrivals seen = arrivals_under(policy);
  CHECK(seen.messages.size() > 1'400 && seen.messages.size() < 1'600);
  CHECK_EQ(seen.notices.size(), kMany);
  policy.messages.drop = 1;
  policy.notices.drop = 1;
  const Arrivals none = arrivals_under(policy);
  CHECK(none.messages.empty() && none.notices.empty());
}

TEST(duplicates_at_the_rate) {
  FaultPolicy policy;
  policy.notices.duplicate = 0.25;
  const Arrivals seen = arrivals_under(policy);
  CHECK_EQ(seen.messages.size(), kMany);
  CHECK(seen.notices.size() > 2'400 && seen.notices.size() < 2'600);
  CHECK_EQ(num_damaged(seen.notices), 0);
}

TEST(delays_reorder_and_lose_nothing) {
  FaultPolicy policy;
  policy.messages.delay = 0.5;
  const Arrivals seen = arrivals_under(policy);
  CHECK_EQ(seen.messages.size(), kMany);
  CHECK_EQ(num_damaged(seen.messages), 0);
  std::size_t num_out_of_order = 0;
  for (std::size_t i = 0; i < seen.messages.size(); ++i)
    num_out_of_order += seen.messages[i] != numbered(i, 64);
  CHECK(num_out_of_order > 500);
}

TEST(corrupts_and_truncates_at_the_rate) {
  FaultPolicy policy;
  policy.messages.corrupt = 0.25;
  policy.notices.truncate = 0.25;
  const Arrivals seen = arrivals_under(policy);
  CHECK_EQ(seen.messages.size(), kMany);
  CHECK(num_damaged(seen.messages) > 400 && num_damaged(seen.messages) < 600);
  std::size_t num_short = 0;
  for (const Bytes& notice : seen.notices) num_short += notice.size() < 64;
  CHECK(num_short > 400 && num_short < 600);
}

TEST(the_same_seed_repeats_and_another_does_not) {
  FaultPolicy policy;
  policy.messages = {.drop = 0.1, .duplicate = 0.1, .delay = 0.1, .corrupt = 0.1, .truncate = 0.1};
  policy.notices = policy.messages;
  const Arrivals first = arrivals_under(policy);
  const Arrivals second = arrivals_under(policy);
  CHECK(first.messages == second.messages);
  CHECK(first.notices == second.notices);
  policy.seed = 2;
  CHECK(arrivals_under(policy).messages != first.messages);
}

/// Ten posts by a P under `policy`; D's notices and the fates by ticket, 1 to 10.
struct Posts {
  std::size_t num_notices = 0;
  std::map<TicketId, std::vector<Fate>> fates;
};

Posts ten_posts(const FaultPolicy& policy) {
  End d(plain());
  End p(faulty("p", policy));
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return {};
  for (TicketId ticket = 1; ticket <= 10; ++ticket) {
    CHECK(post_pumping(p, d, session, ticket, 0, {}, numbered(ticket, 16)) == Sent::kYes);
  }
  CHECK(pump_until({&d, &p}, [&] { return p.fates.size() == 10; }));
  settle({&d, &p});
  return {d.notices[session].size(), p.fates};
}

TEST(fails_the_chosen_posts) {
  FaultPolicy policy;
  policy.fail_post_before = 3;
  policy.fail_post_after = 5;
  const Posts posts = ten_posts(policy);
  CHECK_EQ(posts.num_notices, 9);
  for (const auto& [ticket, fates] : posts.fates) {
    if (!CHECK_EQ(fates.size(), 1)) continue;
    CHECK_EQ(fates.front(), ticket == 3 ? Fate::kFailed : ticket == 5 ? Fate::kUnknown : Fate::kCompleted);
  }
}

TEST(loses_a_session_once_and_only_that) {
  FaultPolicy policy;
  policy.lose_at_send = 4;
  End d(plain());
  End p(faulty("p", policy));
  const SessionId lost = new_session();
  const SessionId kept = new_session();
  if (!establish(d, p, lost, kSlotBytes, 2) || !establish(d, p, kept, kSlotBytes, 2)) return;
  for (TicketId ticket = 1; ticket <= 3; ++ticket)
    CHECK(p.post(lost, ticket, 0, {}, numbered(1, 8)) == Sent::kYes);
  CHECK(p->send(lost, numbered(1, 8)) == Sent::kLost);
  CHECK(p->send(lost, numbered(1, 8)) == Sent::kLost);
  CHECK(p.losses.empty());
  CHECK(p->arm_wait());
  settle({&p, &d});
  CHECK_EQ(p.losses[lost].size(), 1);
  CHECK_EQ(p.fates.size(), 3);
  // A pack may still be running: the slot stays writable until the session is closed.
  CHECK(p->slot_memory(lost, 0).data != nullptr);
  CHECK(!d.losses.contains(lost));
  p->close_session(lost);
  settle({&p, &d});
  CHECK(d.losses.contains(lost));
  CHECK(p->send(kept, numbered(1, 8)) == Sent::kYes);
  settle({&p, &d});
  CHECK_EQ(d.messages[kept].size(), 1);
  CHECK_EQ(p.losses[lost].size(), 1);
}

}  // namespace
