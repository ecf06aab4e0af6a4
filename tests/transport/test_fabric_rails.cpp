// Several rails of the libfabric transport, over a fake of it (fake_fabric.hpp): how boxes spread, and what a
// rail that fails takes with it. The conformance suite over four rails is in test_fabric_fake.cpp.
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
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
using fake_fabric::num_writes;

constexpr std::size_t kSlotBytes = 64 << 10;

FabricOptions options_of(int num_rails) {
  FabricOptions options;
  options.min_stripe_bytes = 4096;
  options.try_again_us = 0;
  for (int i = 0; i < num_rails; ++i) options.rails.push_back("nic" + std::to_string(i));
  return options;
}

conformance::Subject over(const fake_fabric::Policy& policy, const FabricOptions& options) {
  conformance::Subject subject;
  subject.label = "rails";
  subject.make = [policy, options](const Incarnation& self) -> std::unique_ptr<Transport> {
    FabricOptions own = options;
    own.incarnation = self;
    auto made = make_fabric_transport(fake_fabric::network(policy), own);
    if (!made.ok()) check::fail(__FILE__, __LINE__, made.status().message());
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}

conformance::Subject over(int num_nics) {
  return over({.num_nics = num_nics}, options_of(num_nics));
}

/// Waits until P knows which lanes work, by a first box.
bool first_box(End& d, End& p, const SessionId& session) {
  if (!CHECK(p.post(session, 1000, 0, pattern(1, 100), numbered(1000, 8)) != Sent::kLost)) return false;
  conformance::settle({&d, &p});
  if (p.fates.contains(1000)) return true;
  return CHECK(conformance::post_pumping(p, d, session, 1000, 0, pattern(1, 100), numbered(1000, 8)) ==
               Sent::kYes) &&
         CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1000); }));
}

TEST(a_large_box_goes_over_all_rails) {
  const conformance::Subject subject = over(4);
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 4) || !first_box(d, p, session)) return;
  std::vector<std::size_t> before;
  for (int nic = 0; nic < 4; ++nic) before.push_back(num_writes(nic));
  CHECK(p.post(session, 1, 1, pattern(5, kSlotBytes), numbered(1, 8)) == Sent::kYes);
  for (int nic = 0; nic < 4; ++nic) CHECK_EQ(num_writes(nic), before[static_cast<std::size_t>(nic)] + 1);
  CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1) && d.notices[session].size() == 2; }));
  const Region landing = d->landing(session);
  const Bytes expected = pattern(5, kSlotBytes);
  CHECK(std::memcmp(landing.data + kSlotBytes, expected.data(), expected.size()) == 0);
  conformance::end_session(subject, d, p, session);
}

TEST(small_boxes_take_the_rails_in_turn) {
  const conformance::Subject subject = over(4);
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 8) || !first_box(d, p, session)) return;
  std::vector<std::size_t> before;
  for (int nic = 0; nic < 4; ++nic) before.push_back(num_writes(nic));
  for (std::uint32_t i = 0; i < 8; ++i) {
    CHECK(p.post(session, i, i, pattern(i, 100), numbered(i, 8)) == Sent::kYes);
  }
  for (int nic = 0; nic < 4; ++nic) CHECK_EQ(num_writes(nic), before[static_cast<std::size_t>(nic)] + 2);
  CHECK(pump_until({&d, &p}, [&] { return d.notices[session].size() == 9; }));
}

TEST(a_small_box_takes_the_rail_with_the_least_under_way) {
  const conformance::Subject subject = over(2);
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 8) || !first_box(d, p, session)) return;
  CHECK(p.post(session, 1, 0, pattern(1, 4096), numbered(1, 8)) == Sent::kYes);
  const std::size_t before[] = {num_writes(0), num_writes(1)};
  for (std::uint32_t i = 2; i < 5; ++i) {
    CHECK(p.post(session, i, i, pattern(i, 100), numbered(i, 8)) == Sent::kYes);
  }
  // All three beside the large one.
  CHECK_EQ(std::max(num_writes(0) - before[0], num_writes(1) - before[1]), std::size_t{3});
}

TEST(unequal_numbers_of_rails_are_paired) {
  for (const auto& [num_p, num_d] : {std::pair{1, 3}, {3, 1}, {2, 4}, {3, 2}, {4, 4}}) {
    const fake_fabric::Policy policy{.shuffles = true, .num_nics = 4};
    const conformance::Subject subject = over(policy, options_of(num_d));
    End d(subject);
    End p(over(policy, options_of(num_p)));
    const SessionId session = conformance::new_session();
    if (!conformance::establish(d, p, session, kSlotBytes, 8) || !first_box(d, p, session)) return;
    std::size_t num_verified = 0;
    conformance::verify_at_notice(d, kSlotBytes, num_verified);
    for (std::uint32_t i = 0; i < 24; ++i) {
      const conformance::Note note{.seed = i, .size_bytes = i % 2 == 0 ? kSlotBytes : 1000, .slot = i % 8};
      CHECK(conformance::post_note(p, d, session, i, note) == Sent::kYes);
      CHECK(pump_until({&d, &p}, [&] { return num_verified == i + 1; }));
    }
    for (int nic = 0; nic < num_p; ++nic) CHECK(num_writes(nic) > 1);
    for (int nic = num_p; nic < 4; ++nic) CHECK_EQ(num_writes(nic), std::size_t{0});
    d.notice_hook = {};
    conformance::end_session(subject, d, p, session);
  }
}

TEST(a_rail_that_fails_ends_the_sessions_with_writes_on_it_and_no_other) {
  const conformance::Subject subject = over(4);
  End d(subject);
  End p(subject);
  const SessionId hit = conformance::new_session();
  const SessionId spared = conformance::new_session();
  if (!conformance::establish(d, p, hit, kSlotBytes, 4)) return;
  if (!conformance::establish(d, p, spared, kSlotBytes, 4) || !first_box(d, p, spared)) return;
  CHECK(p.post(hit, 1, 0, pattern(1, kSlotBytes), numbered(1, 8)) == Sent::kYes);
  fake_fabric::break_nic(1);
  CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(hit) && p.fates.contains(1); }));
  CHECK_EQ(p.fates[1], std::vector<Fate>{Fate::kUnknown});
  CHECK(p.losses[hit].front().find("nic1") != std::string::npos);
  // The others go on over three rails.
  const std::size_t before = num_writes(1);
  for (std::uint32_t i = 2; i < 10; ++i) {
    CHECK(conformance::post_pumping(p, d, spared, i, i % 4, pattern(i, kSlotBytes), numbered(i, 8)) ==
          Sent::kYes);
    CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(i); }));
    CHECK_EQ(p.fates[i], std::vector<Fate>{Fate::kCompleted});
  }
  CHECK(pump_until({&d, &p}, [&] { return d.notices[spared].size() == 9; }));
  CHECK_EQ(num_writes(1), before);
  CHECK(!p.losses.contains(spared));
  CHECK(!d.losses.contains(spared));
  // A write that failed may have landed or not: its landing is not quiet.
  p->close_session(hit);
  CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(hit); }));
  d->close_session(hit);
  conformance::settle({&d, &p});
  CHECK(!d->landing_quiet(hit));
  conformance::end_session(subject, d, p, spared);
}

TEST(a_rail_that_falls_silent_ends_what_waits_on_it_and_is_passed_over) {
  for (const int silent : {0, 1}) {
    FabricOptions options = options_of(2);
    options.stall_us = 500'000;
    options.try_again_us = 1'000'000'000;
    const conformance::Subject subject = over({.num_nics = 2}, options);
    End d(subject);
    End p(subject);
    const SessionId hit = conformance::new_session();
    if (!conformance::establish(d, p, hit, kSlotBytes, 4) || !first_box(d, p, hit)) return;
    fake_fabric::silence_nic(silent);
    CHECK(p.post(hit, 1, 0, pattern(1, kSlotBytes), numbered(1, 8)) == Sent::kYes);
    CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(hit); }));
    CHECK(p.losses[hit].front().find("nic" + std::to_string(silent)) != std::string::npos);
    // D's messages take the first rail, and D learns of it by itself.
    const Sent sent = conformance::send_pumping(d, p, hit, numbered(7, 8));
    CHECK(sent == Sent::kYes || silent == 0);
    CHECK(pump_until({&d}, [&] { return silent == 1 || d.losses.contains(hit); }));
    p->close_session(hit);
    CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1); }));
    CHECK_EQ(p.fates[1], std::vector<Fate>{Fate::kUnknown});
    d->close_session(hit);
    CHECK(!d->landing_quiet(hit));
    // A new session goes over the other rail alone: its messages too.
    const std::size_t before = num_writes(silent);
    const SessionId next = conformance::new_session();
    if (!conformance::establish(d, p, next, kSlotBytes, 4)) return;
    CHECK(conformance::post_pumping(p, d, next, 2, 1, pattern(2, kSlotBytes), numbered(2, 8)) == Sent::kYes);
    CHECK(pump_until({&d, &p}, [&] { return d.notices[next].size() == 1 && p.fates.contains(2); }));
    CHECK_EQ(num_writes(silent), before);
    fake_fabric::mend_nic(silent);
    conformance::end_session(subject, d, p, next);
  }
}

TEST(a_rail_that_is_mended_is_used_again) {
  const conformance::Subject subject = over(2);
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 4) || !first_box(d, p, session)) return;
  fake_fabric::break_nic(0);
  // The message fails on the first rail and goes on over the second, which then takes the boxes.
  CHECK(conformance::send_pumping(p, d, session, numbered(7, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return d.messages[session].size() == 1; }));
  const std::size_t before = num_writes(0);
  CHECK(conformance::post_pumping(p, d, session, 1, 1, pattern(1, kSlotBytes), numbered(1, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1) && d.notices[session].size() == 2; }));
  CHECK_EQ(num_writes(0), before);
  fake_fabric::mend_nic(0);
  TicketId ticket = 1;
  CHECK(pump_until({&d, &p}, [&] {
    if (!p.fates.contains(ticket)) return false;
    ++ticket;
    CHECK(conformance::post_pumping(p, d, session, ticket, 1, pattern(1, kSlotBytes), numbered(2, 8)) ==
          Sent::kYes);
    return num_writes(0) > before;
  }));
  CHECK(!p.losses.contains(session));
  CHECK(!d.losses.contains(session));
}

TEST(messages_under_way_on_a_rail_that_fails_arrive) {
  const conformance::Subject subject = over({.seed = 5, .again = 60, .num_nics = 3}, options_of(3));
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 4) || !first_box(d, p, session)) return;
  for (std::uint64_t i = 0; i < 20; ++i) {
    CHECK(conformance::send_pumping(p, d, session, numbered(i, 8)) == Sent::kYes);
    CHECK(conformance::send_pumping(d, p, session, numbered(i, 8)) == Sent::kYes);
    if (i == 5) fake_fabric::break_nic(0);
    if (i == 12) fake_fabric::break_nic(1);
  }
  const auto all_came = [](const std::vector<Bytes>& came) {
    std::set<Bytes> different(came.begin(), came.end());
    return different.size() >= 20;
  };
  CHECK(pump_until({&d, &p}, [&] { return all_came(d.messages[session]) && all_came(p.messages[session]); }));
  CHECK(!p.losses.contains(session));
  CHECK(!d.losses.contains(session));
}

TEST(a_rail_that_never_worked_harms_no_session) {
  const conformance::Subject subject = over(3);
  End d(subject);
  End p(subject);
  fake_fabric::break_nic(0);
  fake_fabric::break_nic(2);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, kSlotBytes, 4)) return;
  for (std::uint32_t i = 0; i < 8; ++i) {
    CHECK(conformance::post_pumping(p, d, session, i, i % 4, pattern(i, kSlotBytes), numbered(i, 8)) ==
          Sent::kYes);
    CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(i); }));
    CHECK_EQ(p.fates[i], std::vector<Fate>{Fate::kCompleted});
  }
  CHECK(pump_until({&d, &p}, [&] { return d.notices[session].size() == 8; }));
  CHECK_EQ(num_writes(0) + num_writes(2), std::size_t{0});
  conformance::end_session(subject, d, p, session);
}

TEST(a_rail_whose_queue_overran_is_out_for_good) {
  const conformance::Subject subject = over(2);
  End d(subject);
  End p(subject);
  const SessionId before = conformance::new_session();
  if (!conformance::establish(d, p, before, kSlotBytes, 4) || !first_box(d, p, before)) return;
  CHECK(p.post(before, 1, 0, pattern(1, kSlotBytes), numbered(1, 8)) == Sent::kYes);
  fake_fabric::overrun(0);
  // What arrived over it may be lost, so every session that uses it is.
  CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(before) && p.losses.contains(before); }));
  CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1); }));
  CHECK_EQ(p.fates[1], std::vector<Fate>{Fate::kUnknown});
  p->close_session(before);
  d->close_session(before);
  // The next ones go over the other rail.
  const std::size_t num_before = num_writes(0);
  const SessionId after = conformance::new_session();
  if (!conformance::establish(d, p, after, kSlotBytes, 4)) return;
  CHECK(conformance::post_pumping(p, d, after, 2, 0, pattern(2, kSlotBytes), numbered(2, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return d.notices[after].size() == 1 && p.fates.contains(2); }));
  CHECK_EQ(num_writes(0), num_before);
  fake_fabric::overrun(1);
  CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(after) && p.losses.contains(after); }));
  const auto opened = d->open_landing(conformance::new_session(), 4096, 4);
  CHECK(opened.status().code() == Code::kTransport);
  CHECK(opened.status().message().find("no rail is left") != std::string::npos);
}

TEST(narrow_numbers_over_rails_that_lag_and_repeat) {
  const fake_fabric::Policy policy{
      .seed = 11, .by_address = true, .shuffles = true, .repeats = 40, .num_nics = 4, .slow_nic = 3};
  const conformance::Subject subject = over(policy, options_of(4));
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  constexpr std::uint32_t kNumSlots = 32;
  constexpr std::size_t kBytes = 512;
  if (!conformance::establish(d, p, session, kBytes, kNumSlots)) return;
  // As credits do: a slot is written again once its box has been delivered.
  const auto source = p->allocate_staging(kNumSlots * kBytes);
  if (!CHECK(source.ok())) return;
  constexpr std::uint64_t kNumBoxes = (std::uint64_t{1} << 17U) + 99;
  std::vector<std::uint32_t> free_slots;
  for (std::uint32_t i = 0; i < kNumSlots; ++i) free_slots.push_back(i);
  std::uint64_t num_delivered = 0;
  d.notice_hook = [&](const SessionId&, ByteView notice) {
    const auto box = ByteReader(notice).get<std::uint64_t>();
    const auto slot = static_cast<std::uint32_t>(ByteReader(notice.subspan(8)).get<std::uint64_t>());
    std::uint64_t found = 0;
    std::memcpy(&found, d->landing(session).data + slot * kBytes, sizeof(found));
    CHECK_EQ(found, box);
    free_slots.push_back(slot);
    ++num_delivered;
    d.notices.clear();
  };
  std::uint64_t next = 0;
  CHECK(pump_until({&d, &p}, [&] {
    p.fates.clear();
    while (next < kNumBoxes && !free_slots.empty()) {
      const std::uint32_t slot = free_slots.back();
      std::byte* const at = source.value().data + slot * kBytes;
      std::memcpy(at, &next, sizeof(next));
      ByteWriter notice;
      notice.put(next);
      notice.put(std::uint64_t{slot});
      if (p->post(session, next, {at, kBytes}, slot, notice.bytes()) != Sent::kYes) break;
      free_slots.pop_back();
      ++next;
    }
    return num_delivered == kNumBoxes;
  }));
  CHECK_EQ(num_delivered, kNumBoxes);
}

TEST(landings_are_refused_when_the_queues_could_not_hold_their_writes) {
  FabricOptions options = options_of(2);
  options.queue_entries = 1024;  // a quarter is P's, 512 are messages'
  const conformance::Subject subject = over({.num_nics = 2}, options);
  End d(subject);
  const SessionId first = conformance::new_session();
  CHECK(d->open_landing(first, kSlotBytes, 64).ok());
  const auto refused = d->open_landing(conformance::new_session(), kSlotBytes, 65);
  CHECK(refused.status().code() == Code::kExhausted);
  CHECK(refused.status().message().find("65 slots needs 130 entries") != std::string::npos);
  CHECK(d->open_landing(conformance::new_session(), kSlotBytes, 64).ok());
  CHECK(!d->open_landing(conformance::new_session(), kSlotBytes, 1).ok());
  d->close_session(first);
  d->release_landing(first);
  CHECK(d->open_landing(conformance::new_session(), kSlotBytes, 64).ok());
}

TEST(a_source_of_smaller_writes_than_the_landing_has_room_for_is_refused) {
  FabricOptions small = options_of(1);
  small.max_write_bytes = 1000;
  End d(over({}, options_of(1)));
  End p(over({}, small));
  const SessionId session = conformance::new_session();
  const auto offer = d->open_landing(session, 4096, 4);
  if (!CHECK(offer.ok())) return;
  const auto refused = p->accept(session, offer.value(), 4096, 4);
  CHECK(refused.status().code() == Code::kHandshake);
  CHECK(refused.status().message().find("5 writes of 1000 bytes") != std::string::npos);
}

}  // namespace
}  // namespace kvpush
