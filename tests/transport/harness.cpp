#include "harness.hpp"

#include <poll.h>

#include <cstring>
#include <thread>

#include "check.hpp"

namespace kvpush::conformance {
namespace {

constexpr TimeUs kDeadlineUs = 10'000'000;

}  // namespace

End::End(const Subject& subject) : transport_(subject.make(Incarnation{random_uuid()})) {
  CHECK(ok());
}

bool End::wait() {
  const bool progressed = num_seen_ != num_seen_at_wait_;
  num_seen_at_wait_ = num_seen_;
  if (progressed) return true;
  if (transport_->capabilities().can_wait) {
    if (transport_->arm_wait()) return true;
    pollfd entry{transport_->wait_fd(), POLLIN, 0};
    return ::poll(&entry, 1, static_cast<int>(kDeadlineUs / 1000)) > 0;
  }
  std::this_thread::yield();
  return true;
}

Sent End::post(const SessionId& session, TicketId ticket, std::uint32_t slot, ByteView data,
               ByteView notice) {
  if (transport_->capabilities().mapped_slots) {
    const Region memory = transport_->slot_memory(session, slot);
    if (memory.data == nullptr) return transport_->post(session, ticket, {}, slot, notice);
    if (!CHECK(data.size() <= memory.size_bytes)) return Sent::kLost;
    if (!data.empty()) std::memcpy(memory.data, data.data(), data.size());
    return transport_->post(session, ticket, {}, slot, notice);
  }
  if (!staging_.contains(ticket)) {
    Result<Region> region = transport_->allocate_staging(data.size());
    if (!CHECK(region.ok())) return Sent::kLost;
    if (!data.empty()) std::memcpy(region.value().data, data.data(), data.size());
    staging_[ticket] = region.value();
  }
  return transport_->post(session, ticket, ByteView(staging_[ticket].data, data.size()), slot, notice);
}

void End::on_message(const SessionId& session, ByteView message) {
  ++num_seen_;
  messages[session].emplace_back(message.begin(), message.end());
}

void End::on_notice(const SessionId& session, ByteView notice) {
  ++num_seen_;
  notices[session].emplace_back(notice.begin(), notice.end());
  if (notice_hook) notice_hook(session, notice);
}

void End::on_completed(TicketId ticket, Fate fate) {
  ++num_seen_;
  fates[ticket].push_back(fate);
  // Of unknown fate: kept until it has settled, as an engine would.
  if (fate != Fate::kUnknown) release_staging_of(ticket);
}

void End::on_settled(TicketId ticket) {
  CHECK_EQ(fates[ticket], std::vector<Fate>{Fate::kUnknown});
  release_staging_of(ticket);
}

void End::release_staging_of(TicketId ticket) {
  const auto found = staging_.find(ticket);
  if (found == staging_.end()) return;
  transport_->release_staging(found->second);
  staging_.erase(found);
}

void End::on_lost(const SessionId& session, const std::string& reason) {
  ++num_seen_;
  losses[session].push_back(reason);
}

SessionId new_session() {
  return SessionId{random_uuid()};
}

Bytes pattern(std::uint64_t seed, std::size_t size_bytes) {
  Bytes bytes(size_bytes);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (std::byte& byte : bytes) {
    state = state * 0xd1342543de82ef95U + 1;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

Bytes numbered(std::uint64_t seed, std::size_t size_bytes) {
  Bytes bytes = pattern(seed, size_bytes);
  if (bytes.size() >= sizeof(seed)) std::memcpy(bytes.data(), &seed, sizeof(seed));
  return bytes;
}

bool pump_until(std::initializer_list<End*> ends, const std::function<bool()>& condition) {
  const TimeUs deadline = monotonic_us() + kDeadlineUs;
  while (!condition()) {
    if (monotonic_us() > deadline) return false;
    for (End* end : ends) end->poll();
    std::this_thread::yield();
  }
  return true;
}

void settle(std::initializer_list<End*> ends) {
  for (int i = 0; i < 50; ++i) {
    for (End* end : ends) end->poll();
  }
}

namespace {

Sent repeat(End& from, End& to, const std::function<Sent()>& attempt) {
  const TimeUs deadline = monotonic_us() + kDeadlineUs;
  while (true) {
    const Sent sent = attempt();
    if (sent != Sent::kAgain || monotonic_us() > deadline) return sent;
    from.poll();
    to.poll();
  }
}

}  // namespace

Sent send_pumping(End& from, End& to, const SessionId& session, ByteView message) {
  return repeat(from, to, [&] { return from->send(session, message); });
}

Sent post_pumping(End& from, End& to, const SessionId& session, TicketId ticket, std::uint32_t slot,
                  ByteView data, ByteView notice) {
  return repeat(from, to, [&] { return from.post(session, ticket, slot, data, notice); });
}

bool establish(End& d, End& p, const SessionId& session, std::size_t slot_bytes, std::uint32_t num_slots) {
  if (!d.ok() || !p.ok()) return false;
  Result<Bytes> offer = d->open_landing(session, slot_bytes, num_slots);
  if (!CHECK(offer.ok())) return false;
  Result<Bytes> answer = p->accept(session, offer.value(), slot_bytes, num_slots);
  if (!CHECK(answer.ok())) return false;
  if (!CHECK(d->connect(session, answer.value()).ok())) return false;
  if (!CHECK(send_pumping(d, p, session, numbered(1, 5)) == Sent::kYes)) return false;
  const bool arrived = pump_until({&d, &p}, [&] { return !p.messages[session].empty(); });
  if (!CHECK(arrived)) return false;
  p.messages[session].clear();
  return true;
}

Bytes Note::encode() const {
  ByteWriter out;
  out.put(seed);
  out.put(size_bytes);
  out.put(slot);
  return std::move(out).take();
}

Note Note::decode(ByteView bytes) {
  ByteReader in(bytes);
  Note note;
  note.seed = in.get<std::uint64_t>();
  note.size_bytes = in.get<std::uint64_t>();
  note.slot = in.get<std::uint32_t>();
  CHECK(in.done());
  return note;
}

Sent post_note(End& p, End& d, const SessionId& session, TicketId ticket, const Note& note) {
  return post_pumping(p, d, session, ticket, note.slot, pattern(note.seed, note.size_bytes), note.encode());
}

void verify_at_notice(End& d, std::size_t slot_bytes, std::size_t& num_verified) {
  d.notice_hook = [&d, slot_bytes, &num_verified](const SessionId& session, ByteView bytes) {
    const Note note = Note::decode(bytes);
    const Bytes expected = pattern(note.seed, note.size_bytes);
    const Region landing = d->landing(session);
    const std::size_t at = note.slot * slot_bytes;
    if (CHECK(landing.data != nullptr && at + expected.size() <= landing.size_bytes) &&
        CHECK(std::memcmp(landing.data + at, expected.data(), expected.size()) == 0)) {
      ++num_verified;
    }
  };
}

void end_session(const Subject& subject, End& d, End& p, const SessionId& session) {
  d->close_session(session);
  p->close_session(session);
  if (subject.proves_quiet) CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(session); }));
  d->release_landing(session);
}

}  // namespace kvpush::conformance
