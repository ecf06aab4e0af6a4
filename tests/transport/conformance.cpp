// What a session carries: messages, posts, notices, back-pressure.
#include <algorithm>
#include <set>

#include "conformance.hpp"

namespace kvpush::conformance {
namespace {

constexpr std::size_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kNumSlots = 4;

bool same_set(std::vector<Bytes> a, std::vector<Bytes> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  return a == b;
}

std::vector<std::size_t> sizes_up_to(std::size_t max_bytes) {
  std::vector<std::size_t> sizes{1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 4095, 4096, 4097, 10'001};
  sizes.push_back(max_bytes / 2 + 1);
  sizes.push_back(max_bytes - 1);
  sizes.push_back(max_bytes);
  std::erase_if(sizes, [&](std::size_t size) { return size > max_bytes; });
  return sizes;
}

}  // namespace

void set_up(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  const Capabilities capabilities = d->capabilities();
  CHECK(capabilities.max_message_bytes >= 16 << 10);
  CHECK(!d->name().empty());
  CHECK_EQ(capabilities.can_wait, d->wait_fd() >= 0);
  CHECK_EQ(d->landing(session).size_bytes, kSlotBytes * kNumSlots);
  CHECK(d->landing(session).data != nullptr);
  for (std::uint32_t slot = 0; slot < kNumSlots; ++slot) {
    CHECK_EQ(p->slot_memory(session, slot).size_bytes, capabilities.mapped_slots ? kSlotBytes : 0);
  }
  CHECK(p->slot_memory(session, kNumSlots).data == nullptr);
  const Bytes reply = numbered(2, 100);
  CHECK(send_pumping(p, d, session, reply) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return !d.messages[session].empty(); }));
  settle({&d, &p});
  CHECK(d.messages[session] == std::vector<Bytes>{reply});
  CHECK(d.losses.empty() && p.losses.empty());
  // The same session twice is refused, and does not disturb the first.
  CHECK(!d->open_landing(session, kSlotBytes, kNumSlots).ok());
  CHECK(send_pumping(d, p, session, reply) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.messages[session].size() == 1; }));
  end_session(subject, d, p, session);
}

void message_sizes(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  std::vector<Bytes> to_p;
  std::vector<Bytes> to_d;
  std::uint64_t seed = 0;
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t size : sizes_up_to(d->capabilities().max_message_bytes)) {
      to_p.push_back(numbered(++seed, size));
      CHECK(send_pumping(d, p, session, to_p.back()) == Sent::kYes);
      to_d.push_back(numbered(++seed, size));
      CHECK(send_pumping(p, d, session, to_d.back()) == Sent::kYes);
    }
  }
  CHECK(pump_until({&d, &p}, [&] {
    return d.messages[session].size() >= to_d.size() && p.messages[session].size() >= to_p.size();
  }));
  settle({&d, &p});
  CHECK(same_set(p.messages[session], to_p));
  CHECK(same_set(d.messages[session], to_d));
  end_session(subject, d, p, session);
}

void post_sizes(const Subject& subject) {
  End d(subject);
  End p(subject);
  std::size_t num_verified = 0;
  TicketId ticket = 0;
  for (const std::size_t slot_bytes : {std::size_t{4096}, kSlotBytes, std::size_t{100'003}}) {
    const SessionId session = new_session();
    if (!establish(d, p, session, slot_bytes, kNumSlots)) return;
    verify_at_notice(d, slot_bytes, num_verified);
    std::uint32_t slot = 0;
    for (const std::size_t size : sizes_up_to(slot_bytes)) {
      ++ticket;
      const std::size_t before = num_verified;
      CHECK(post_note(p, d, session, ticket, {ticket, size, slot}) == Sent::kYes);
      CHECK(pump_until({&d, &p}, [&] { return num_verified > before && p.fates.contains(ticket); }));
      slot = (slot + 1) % kNumSlots;
    }
    end_session(subject, d, p, session);
  }
  CHECK_EQ(num_verified, ticket);
}

void one_completion(const Subject& subject) {
  End d(subject);
  End p(subject);
  constexpr std::uint32_t kMany = 64;
  const SessionId session = new_session();
  if (!establish(d, p, session, 4096, kMany)) return;
  std::size_t num_verified = 0;
  verify_at_notice(d, 4096, num_verified);
  TicketId ticket = 0;
  for (int round = 0; round < 4; ++round) {
    for (std::uint32_t slot = 0; slot < kMany; ++slot) {
      ++ticket;
      CHECK(post_note(p, d, session, ticket, {ticket, 4096, slot}) == Sent::kYes);
    }
    CHECK(pump_until({&d, &p}, [&] { return num_verified == ticket && p.fates.size() == ticket; }));
  }
  settle({&d, &p});
  for (const auto& [posted, fates] : p.fates) CHECK(fates == std::vector<Fate>{Fate::kCompleted});
  CHECK_EQ(d.notices[session].size(), ticket);
  CHECK(d.fates.empty());
  end_session(subject, d, p, session);
}

namespace {

void flood(const Subject& subject, End& from, End& to, const std::function<Sent(std::uint64_t)>& attempt,
           const std::function<std::size_t()>& num_arrived) {
  std::uint64_t num_sent = 0;
  while (num_sent < subject.num_floods) {
    const Sent sent = attempt(num_sent);
    if (sent == Sent::kAgain) break;
    if (!CHECK(sent == Sent::kYes)) return;
    ++num_sent;
  }
  CHECK_EQ(num_sent < subject.num_floods, subject.pushes_back);
  const std::uint64_t goal = num_sent + 500;
  CHECK(pump_until({&from, &to}, [&] {
    while (num_sent < goal && attempt(num_sent) == Sent::kYes) ++num_sent;
    return num_arrived() >= goal;
  }));
  settle({&from, &to});
  CHECK_EQ(num_arrived(), goal);
}

bool all_different(const std::vector<Bytes>& list) {
  return std::set<Bytes>(list.begin(), list.end()).size() == list.size();
}

}  // namespace

void message_back_pressure(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  for (auto [from, to] : {std::pair{&d, &p}, std::pair{&p, &d}}) {
    flood(
        subject, *from, *to, [&](std::uint64_t i) { return (*from)->send(session, numbered(i, 200)); },
        [&] { return to->messages[session].size(); });
    CHECK(all_different(to->messages[session]));
  }
  end_session(subject, d, p, session);
}

void notice_back_pressure(const Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, kNumSlots)) return;
  std::size_t num_posted = 0;
  flood(
      subject, p, d,
      [&](std::uint64_t i) {
        const Sent sent = p.post(session, i, 0, pattern(0, 64), numbered(i, 200));
        if (sent == Sent::kYes) ++num_posted;
        return sent;
      },
      [&] { return d.notices[session].size(); });
  CHECK(all_different(d.notices[session]));
  CHECK(pump_until({&d, &p}, [&] { return p.fates.size() == num_posted; }));
  for (const auto& [ticket, fates] : p.fates) CHECK_EQ(fates.size(), 1);
  end_session(subject, d, p, session);
}

void many_sessions(const Subject& subject) {
  End d(subject);
  End p(subject);
  std::vector<SessionId> sessions;
  for (int i = 0; i < 16; ++i) {
    sessions.push_back(new_session());
    if (!establish(d, p, sessions.back(), 8192, kNumSlots)) return;
  }
  std::size_t num_verified = 0;
  verify_at_notice(d, 8192, num_verified);
  TicketId ticket = 0;
  for (std::uint32_t slot = 0; slot < kNumSlots; ++slot) {
    for (const SessionId& session : sessions) {
      ++ticket;
      CHECK(post_note(p, d, session, ticket, {ticket, 8192, slot}) == Sent::kYes);
    }
  }
  CHECK(pump_until({&d, &p}, [&] { return num_verified == ticket && p.fates.size() == ticket; }));
  // Half of them end; the others go on.
  for (std::size_t i = 0; i < sessions.size(); i += 2) end_session(subject, d, p, sessions[i]);
  for (std::size_t i = 1; i < sessions.size(); i += 2) {
    ++ticket;
    CHECK(post_note(p, d, sessions[i], ticket, {ticket, 100, 1}) == Sent::kYes);
  }
  CHECK(pump_until({&d, &p}, [&] { return num_verified == ticket; }));
  for (const SessionId& session : sessions) CHECK_EQ(d.losses.contains(session), false);
  for (std::size_t i = 1; i < sessions.size(); i += 2) end_session(subject, d, p, sessions[i]);
}

void many_peers(const Subject& subject) {
  // One engine that is P to some and D to others, at once.
  End hub(subject);
  std::vector<std::unique_ptr<End>> peers;
  std::vector<SessionId> sessions;
  std::size_t num_verified = 0;
  verify_at_notice(hub, kSlotBytes, num_verified);
  for (std::size_t i = 0; i < 6; ++i) {
    peers.push_back(std::make_unique<End>(subject));
    sessions.push_back(new_session());
    End& peer = *peers.back();
    if (!establish(i % 2 == 0 ? hub : peer, i % 2 == 0 ? peer : hub, sessions[i], kSlotBytes, kNumSlots))
      return;
    if (i % 2 == 1) verify_at_notice(peer, kSlotBytes, num_verified);
  }
  TicketId ticket = 0;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    ++ticket;
    End& source = i % 2 == 0 ? *peers[i] : hub;
    End& landing = i % 2 == 0 ? hub : *peers[i];
    const Note note{ticket, kSlotBytes, static_cast<std::uint32_t>(i) % kNumSlots};
    CHECK(post_note(source, landing, sessions[i], ticket, note) == Sent::kYes);
  }
  CHECK(pump_until(
      {&hub, peers[0].get(), peers[1].get(), peers[2].get(), peers[3].get(), peers[4].get(), peers[5].get()},
      [&] { return num_verified == ticket; }));
  for (std::size_t i = 0; i < peers.size(); ++i) {
    end_session(subject, i % 2 == 0 ? hub : *peers[i], i % 2 == 0 ? *peers[i] : hub, sessions[i]);
  }
}

}  // namespace kvpush::conformance
