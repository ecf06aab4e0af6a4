// The life of a session: its ends, wrong beginnings, and waking up for it.
#include <poll.h>

#include "conformance.hpp"

namespace kvpush::conformance {
namespace {

constexpr std::size_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kNumSlots = 4;

}  // namespace

void close_with_outstanding_posts(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  TicketId num_posted = 0;
  for (std::uint32_t slot = 0; slot < kNumSlots; ++slot) {
    const Note note{slot, kSlotBytes, slot};
    if (p.post(session, num_posted + 1, slot, pattern(slot, kSlotBytes), note.encode()) == Sent::kYes)
      ++num_posted;
  }
  p->close_session(session);
  CHECK(send_pumping(p, d, session, numbered(1, 8)) == Sent::kLost);
  CHECK(post_pumping(p, d, session, 1'000, 0, pattern(0, 8), numbered(1, 8)) == Sent::kLost);
  CHECK(p->slot_memory(session, 0).data == nullptr);
  CHECK(pump_until({&d, &p}, [&] { return p.fates.size() == num_posted; }));
  d->close_session(session);
  settle({&d, &p});
  CHECK_EQ(p.fates.size(), num_posted);
  for (const auto& [ticket, fates] : p.fates) CHECK_EQ(fates.size(), 1);
  CHECK(p.losses.empty());
  if (subject.proves_quiet) CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(session); }));
  d->release_landing(session);
}

void closed_by_landing(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  const Bytes last = numbered(7, 300);
  CHECK(send_pumping(d, p, session, last) == Sent::kYes);
  d->close_session(session);
  d->close_session(session);
  CHECK(send_pumping(d, p, session, last) == Sent::kLost);
  // The memory stays until it is released.
  const Region landing = d->landing(session);
  if (CHECK(landing.data != nullptr)) landing.data[landing.size_bytes - 1] = std::byte{1};
  if (subject.detects_close) {
    CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(session); }));
    CHECK(send_pumping(p, d, session, last) == Sent::kLost);
    CHECK(p.messages[session].size() <= 1);
    settle({&d, &p});
    CHECK_EQ(p.losses[session].size(), 1);
    // P may still be writing: it has not closed.
    if (subject.proves_quiet) CHECK(!d->landing_quiet(session));
    if (const Region slot = p->slot_memory(session, 0); slot.data != nullptr) slot.data[0] = std::byte{1};
  }
  p->close_session(session);
  if (subject.proves_quiet) CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(session); }));
  const bool released = d->release_landing(session);
  if (subject.proves_quiet) CHECK(released);
  CHECK_EQ(d->landing(session).data == nullptr, released);
  CHECK(d.losses.empty());
}

void closed_by_source(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  std::size_t num_verified = 0;
  verify_at_notice(d, kSlotBytes, num_verified);
  for (TicketId ticket = 1; ticket <= kNumSlots; ++ticket) {
    CHECK(post_note(p, d, session, ticket, {ticket, 5'000, static_cast<std::uint32_t>(ticket - 1)}) ==
          Sent::kYes);
  }
  CHECK(pump_until({&d, &p}, [&] { return p.fates.size() == kNumSlots && num_verified == kNumSlots; }));
  p->close_session(session);
  if (subject.detects_close) {
    CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(session); }));
    CHECK(send_pumping(d, p, session, numbered(1, 8)) == Sent::kLost);
    settle({&d, &p});
    CHECK_EQ(d.losses[session].size(), 1);
  }
  d->close_session(session);
  if (subject.proves_quiet) CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(session); }));
  d->release_landing(session);
  // Both engines are as good as new.
  const SessionId next = new_session();
  if (establish(d, p, next, kSlotBytes, kNumSlots)) end_session(subject, d, p, next);
}

void closed_inside_poll(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  const SessionId other = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots) || !establish(d, p, other, kSlotBytes, kNumSlots))
    return;
  std::size_t num_notices = 0;
  d.notice_hook = [&](const SessionId& which, ByteView) {
    if (which != session) return;
    CHECK_EQ(++num_notices, 1);
    d->close_session(session);
    d->release_landing(session);
  };
  for (TicketId ticket = 1; ticket <= kNumSlots; ++ticket) {
    CHECK(post_note(p, d, other, 100 + ticket, {ticket, 100, 0}) == Sent::kYes);
    const Sent sent = post_note(p, d, session, ticket, {ticket, 100, 0});
    CHECK(sent == Sent::kYes || num_notices == 1);
  }
  CHECK(pump_until({&d, &p}, [&] { return num_notices == 1 && d.notices[other].size() == kNumSlots; }));
  settle({&d, &p});
  CHECK_EQ(num_notices, 1);
  CHECK(d.losses.empty());
  p->close_session(session);
  end_session(subject, d, p, other);
}

void never_connected(const Subject& subject) {
  End d(subject);
  End p(subject);
  if (!d.ok() || !p.ok()) return;
  const SessionId session = new_session();
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return;
  CHECK(d->send(session, numbered(1, 8)) != Sent::kYes);
  d->close_session(session);
  CHECK(d->landing_quiet(session));
  d->release_landing(session);
  // Accepted, but D never comes; then D comes too late.
  const SessionId late = new_session();
  Result<Bytes> late_offer = d->open_landing(late, kSlotBytes, kNumSlots);
  if (!CHECK(late_offer.ok())) return;
  Result<Bytes> answer = p->accept(late, late_offer.value(), kSlotBytes, kNumSlots);
  if (!CHECK(answer.ok())) return;
  CHECK(p->send(late, numbered(1, 8)) != Sent::kYes);
  p->close_session(late);
  if (d->connect(late, answer.value()).ok() && subject.detects_close) {
    CHECK(pump_until({&d, &p}, [&] { return d.losses.contains(late); }));
  }
  d->close_session(late);
  if (subject.proves_quiet) CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(late); }));
  d->release_landing(late);
  settle({&d, &p});
}

void wrong_descriptions(const Subject& subject) {
  End d(subject);
  End p(subject);
  if (!d.ok() || !p.ok()) return;
  const SessionId session = new_session();
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return;
  const Bytes& good = offer.value();
  for (std::size_t size = 0; size < good.size(); size += size < 64 ? 1 : good.size() / 16) {
    CHECK(!p->accept(session, ByteView(good).first(size), kSlotBytes, kNumSlots).ok());
  }
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CHECK(!p->accept(session, pattern(seed, 1 + seed * 7), kSlotBytes, kNumSlots).ok());
    CHECK(!d->connect(session, pattern(seed, 1 + seed * 7)).ok());
    CHECK(!p->accept(session, pattern(seed, good.size()), kSlotBytes, kNumSlots).ok());
  }
  const Result<Bytes> mismatch = p->accept(session, good, kSlotBytes * 2, kNumSlots);
  CHECK(!mismatch.ok());
  CHECK(mismatch.status().code() == Code::kHandshake);
  CHECK(mismatch.status().message().find(std::to_string(kSlotBytes)) != std::string::npos);
  CHECK(mismatch.status().message().find(std::to_string(kSlotBytes * 2)) != std::string::npos);
  // None of it left a trace.
  Result<Bytes> answer = p->accept(session, good, kSlotBytes, kNumSlots);
  if (!CHECK(answer.ok())) return;
  CHECK(!d->connect(session, ByteView(answer.value()).first(answer.value().size() - 1)).ok());
  CHECK(d->connect(session, answer.value()).ok());
  CHECK(send_pumping(d, p, session, numbered(3, 30)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.messages[session].size() == 1; }));
  end_session(subject, d, p, session);
}

void unknown_sessions(const Subject& subject) {
  End end(subject);
  if (!end.ok()) return;
  const SessionId nobody = new_session();
  CHECK(send_pumping(end, end, nobody, numbered(1, 8)) == Sent::kLost);
  CHECK(end->landing(nobody).data == nullptr);
  CHECK(end->slot_memory(nobody, 0).data == nullptr);
  CHECK(!end->connect(nobody, numbered(1, 8)).ok());
  end->close_session(nobody);
  end->release_landing(nobody);
  end.poll();
  CHECK(end.losses.empty() && end.fates.empty());
}

void wake_up(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  if (!d->capabilities().can_wait) SKIP("the transport cannot wait");
  const auto readable = [](End& end, int timeout_ms) {
    pollfd entry{end->wait_fd(), POLLIN, 0};
    return ::poll(&entry, 1, timeout_ms) > 0;
  };
  const auto go_idle = [](End& end) {
    const TimeUs deadline = monotonic_us() + 10'000'000;
    do {
      end.poll();
    } while (end->arm_wait() && monotonic_us() < deadline);
  };
  for (auto [from, to] : {std::pair{&d, &p}, std::pair{&p, &d}}) {
    for (int i = 0; i < 100; ++i) {
      settle({&d, &p});
      go_idle(*to);
      CHECK(!readable(*to, 0));
      while ((*from)->send(session, numbered(1, 8)) == Sent::kAgain) from->poll();
      CHECK(readable(*to, 10'000));
      const std::size_t before = to->messages[session].size();
      CHECK(pump_until({to}, [&, to = to] { return to->messages[session].size() > before; }));
      // Sent before arming: arm_wait() itself must tell.
      while ((*from)->send(session, numbered(1, 8)) == Sent::kAgain) from->poll();
      CHECK((*to)->arm_wait() || readable(*to, 10'000));
    }
  }
  // Room in a full ring is an arrival too.
  if (subject.pushes_back) {
    settle({&d, &p});
    for (int misses = 0; misses < 100;)
      misses = d->send(session, numbered(1, 200)) == Sent::kAgain ? misses + 1 : 0;
    while (d->arm_wait()) {
      d.poll();
      (void)d->send(session, numbered(1, 200));
    }
    CHECK(!readable(d, 0));
    // Over a network what D has sent may arrive at P one after the other.
    CHECK(pump_until({&p}, [&] { return readable(d, 0); }));
    d.poll();
    CHECK(send_pumping(d, p, session, numbered(1, 200)) == Sent::kYes);
  }
  settle({&d, &p});
  go_idle(d);
  p->close_session(session);
  if (subject.detects_close) CHECK(readable(d, 10'000));
  end_session(subject, d, p, session);
}

}  // namespace kvpush::conformance
