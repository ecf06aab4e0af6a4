// The NIXL transport: what is its own. Needs KVPUSH_NIXL_LIBRARY, the path of libnixl_capi.so, for
// everything that opens an agent; those tests are skipped without it.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "conformance.hpp"
#include "transport/nixl/description.hpp"
#include "transport/nixl/nixl_transport.hpp"
#include "transport/process_identity.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kNumSlots = 4;
constexpr TimeUs kPatienceUs = 10'000'000;

NixlOptions options(const Incarnation& incarnation = Incarnation{random_uuid()}) {
  const char* path = std::getenv("KVPUSH_NIXL_LIBRARY");
  if (path == nullptr || *path == '\0') SKIP("KVPUSH_NIXL_LIBRARY is not set");
  NixlOptions result;
  result.incarnation = incarnation;
  result.library_path = path;
  result.counters = std::make_shared<NixlCounters>();
  return result;
}

ByteView text(std::string_view value) {
  return std::as_bytes(std::span(value.data(), value.size()));
}

struct Log : TransportSink {
  std::map<SessionId, std::vector<Bytes>> messages, notices;
  std::map<TicketId, Fate> fates;
  std::size_t num_completions = 0;
  std::vector<SessionId> lost;
  std::vector<TicketId> settled;

  void on_message(const SessionId& session, ByteView message) override {
    messages[session].emplace_back(message.begin(), message.end());
  }
  void on_notice(const SessionId& session, ByteView notice) override {
    notices[session].emplace_back(notice.begin(), notice.end());
  }
  void on_completed(TicketId ticket, Fate fate) override {
    fates[ticket] = fate;
    ++num_completions;
  }
  void on_lost(const SessionId& session, const std::string& /*reason*/) override { lost.push_back(session); }
  void on_settled(TicketId ticket) override { settled.push_back(ticket); }
};

struct Engine {
  explicit Engine(const NixlOptions& with) : counters(with.counters) {
    auto made = make_nixl_transport(with);
    if (CHECK(made.ok())) transport = std::move(made).value();
  }
  Engine() : Engine(options()) {}

  std::shared_ptr<NixlCounters> counters;
  std::unique_ptr<Transport> transport;
  Log log;
};

template <typename Condition>
bool poll_until(Engine& left, Engine& right, Condition condition) {
  for (const TimeUs end = monotonic_us() + kPatienceUs; monotonic_us() < end;) {
    left.transport->poll(left.log);
    right.transport->poll(right.log);
    if (condition()) return true;
  }
  return false;
}

SessionId new_session() {
  return SessionId{random_uuid()};
}

bool open_session(Engine& d, Engine& p, const SessionId& id, std::size_t slot_bytes = kSlotBytes) {
  const auto offer = d.transport->open_landing(id, slot_bytes, kNumSlots);
  if (!CHECK(offer.ok())) return false;
  const auto answer = p.transport->accept(id, offer.value(), slot_bytes, kNumSlots);
  if (!CHECK(answer.ok())) return false;
  if (!CHECK(d.transport->connect(id, answer.value()).ok())) return false;
  if (!CHECK(d.transport->send(id, text("hello")) == Sent::kYes)) return false;
  return CHECK(poll_until(d, p, [&] { return !p.log.messages[id].empty(); }));
}

bool push_one(Engine& d, Engine& p, const SessionId& id, ByteView source, std::uint32_t slot,
              TicketId ticket) {
  const std::size_t before = d.log.notices[id].size();
  if (!CHECK(p.transport->post(id, ticket, source, slot, text("box")) == Sent::kYes)) return false;
  if (!CHECK(poll_until(d, p,
                        [&] { return d.log.notices[id].size() > before && p.log.fates.contains(ticket); }))) {
    return false;
  }
  const Region landing = d.transport->landing(id);
  return CHECK(p.log.fates[ticket] == Fate::kCompleted) &&
         CHECK_EQ(std::memcmp(landing.data + slot * (landing.size_bytes / kNumSlots), source.data(),
                              source.size()),
                  0);
}

Region staging_of(Engine& p, std::size_t size_bytes) {
  const auto staging = p.transport->allocate_staging(size_bytes);
  if (!CHECK(staging.ok())) return {};
  for (std::size_t i = 0; i < size_bytes; ++i)
    staging.value().data[i] = static_cast<std::byte>(i * 7 + i / 251);
  return staging.value();
}

NixlDescription sample_description() {
  NixlDescription sample;
  sample.session = new_session();
  sample.incarnation = Incarnation{random_uuid()};
  sample.backends = "UCX,LIBFABRIC";
  sample.process = this_process();
  sample.connection = Bytes(40, std::byte{3});
  sample.landing = {
      .base_address = 0x7f0000000000, .slot_bytes = 4096, .num_slots = 8, .access = Bytes(30, std::byte{4})};
  return sample;
}

TEST(description_round_trip) {
  const NixlDescription sample = sample_description();
  const auto decoded = decode_nixl_description(encode(sample));
  if (!CHECK(decoded.ok())) return;
  CHECK(decoded.value().session == sample.session);
  CHECK(decoded.value().incarnation == sample.incarnation);
  CHECK_EQ(decoded.value().backends, sample.backends);
  CHECK_EQ(decoded.value().process.pid, sample.process.pid);
  CHECK_EQ(decoded.value().process.start_time_ticks, sample.process.start_time_ticks);
  CHECK(decoded.value().connection == sample.connection);
  CHECK_EQ(decoded.value().landing.base_address, sample.landing.base_address);
  CHECK(decoded.value().landing.access == sample.landing.access);
}

TEST(damaged_description_is_refused) {
  const Bytes good = encode(sample_description());
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(decode_nixl_description(ByteView(good).first(size)).status().code() == Code::kHandshake);
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= std::byte{0x40};
    CHECK(decode_nixl_description(bad).status().code() == Code::kHandshake);
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  CHECK(!decode_nixl_description(longer).ok());
}

TEST(impossible_landing_is_refused) {
  NixlDescription sample = sample_description();
  sample.landing.slot_bytes = UINT64_MAX / 2;
  CHECK(!decode_nixl_description(encode(sample)).ok());
  sample.landing = {.base_address = 4096, .slot_bytes = 0, .num_slots = 1, .access = Bytes(1)};
  CHECK(!decode_nixl_description(encode(sample)).ok());
  sample.landing = {.base_address = 0, .slot_bytes = 1, .num_slots = 1, .access = Bytes(1)};
  CHECK(!decode_nixl_description(encode(sample)).ok());
  sample.landing = {};
  CHECK(decode_nixl_description(encode(sample)).ok());
}

TEST(death_is_proven_only_when_certain) {
  const ProcessIdentity self = this_process();
  if (self.pid == 0) SKIP("/proc does not show this process");
  CHECK(!proven_dead(self, self));
  CHECK(!proven_dead(ProcessIdentity{}, self));

  int ready[2];
  if (!CHECK_EQ(pipe(ready), 0)) return;
  const pid_t child = fork();
  if (child == 0) {
    const ProcessIdentity mine = this_process();
    if (write(ready[1], &mine.start_time_ticks, sizeof(mine.start_time_ticks)) < 0) _exit(1);
    pause();
    _exit(0);
  }
  ProcessIdentity other = self;
  other.pid = static_cast<std::uint32_t>(child);
  CHECK_EQ(read(ready[0], &other.start_time_ticks, sizeof(other.start_time_ticks)),
           static_cast<ssize_t>(sizeof(other.start_time_ticks)));
  CHECK(!proven_dead(other, self));

  ProcessIdentity reused = other;
  ++reused.start_time_ticks;
  CHECK(proven_dead(reused, self));
  ProcessIdentity elsewhere = reused;
  elsewhere.boot_id += "x";
  CHECK(!proven_dead(elsewhere, self));
  elsewhere = reused;
  ++elsewhere.pid_namespace;
  CHECK(!proven_dead(elsewhere, self));

  kill(child, SIGKILL);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  CHECK(proven_dead(other, self));
  waitpid(child, nullptr, 0);
  CHECK(proven_dead(other, self));
  close(ready[0]);
  close(ready[1]);
}

TEST(unusable_libraries) {
  NixlOptions with;
  CHECK(make_nixl_transport(with).status().code() == Code::kInvalidArgument);
  with.library_path = "/nowhere/libnixl_capi.so";
  CHECK(make_nixl_transport(with).status().code() == Code::kTransport);
  with.library_path = "libm.so.6";
  CHECK(make_nixl_transport(with).status().code() == Code::kUnsupported);
}

TEST(unknown_backend) {
  NixlOptions with = options();
  with.backends = {"NO_SUCH_BACKEND"};
  CHECK(make_nixl_transport(with).status().code() == Code::kUnsupported);
}

TEST(sessions_of_one_pair_end_one_by_one) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const Region staging = staging_of(p, kSlotBytes);
  const SessionId first = new_session(), second = new_session();
  if (!open_session(d, p, first) || !open_session(d, p, second)) return;
  TicketId ticket = 0;
  for (std::uint32_t slot = 0; slot < kNumSlots; ++slot) {
    for (const SessionId& id : {first, second})
      push_one(d, p, id, {staging.data, kSlotBytes - slot}, slot, ++ticket);
  }
  for (Engine* engine : {&d, &p}) engine->transport->close_session(first);
  push_one(d, p, second, {staging.data, 1}, 0, ++ticket);

  // The pair's third session, over the connection that both keep.
  for (Engine* engine : {&d, &p}) engine->transport->close_session(second);
  const SessionId third = new_session();
  if (open_session(d, p, third)) push_one(d, p, third, {staging.data, 4097}, 3, ++ticket);
  CHECK(d.log.lost.empty());
  CHECK(p.log.lost.empty());
}

TEST(both_ways_over_one_connection) {
  Engine a, b;
  if (!a.transport || !b.transport) return;
  const Region staging_a = staging_of(a, kSlotBytes), staging_b = staging_of(b, kSlotBytes);
  const SessionId forth = new_session(), back = new_session();
  if (!open_session(b, a, forth) || !open_session(a, b, back)) return;
  push_one(b, a, forth, {staging_a.data, kSlotBytes}, 1, 1);
  push_one(a, b, back, {staging_b.data, kSlotBytes}, 2, 2);
}

TEST(landing_addresses_are_not_reused) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const Region staging = staging_of(p, kSlotBytes);
  std::vector<std::byte*> seen;
  for (TicketId i = 1; i <= 8; ++i) {
    const SessionId id = new_session();
    if (!open_session(d, p, id) || !push_one(d, p, id, {staging.data, kSlotBytes}, 0, i)) return;
    seen.push_back(d.transport->landing(id).data);
    for (Engine* engine : {&d, &p}) engine->transport->close_session(id);
    d.transport->release_landing(id);
    CHECK(d.transport->landing(id).data == nullptr);
  }
  std::sort(seen.begin(), seen.end());
  CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
}

TEST(posts_that_cannot_be_fail_and_write_nothing) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  if (!open_session(d, p, id)) return;
  const Region staging = staging_of(p, 2 * kSlotBytes);
  const std::vector<std::byte> unregistered(100);
  CHECK(p.transport->post(id, 1, unregistered, 0, text("x")) == Sent::kYes);
  CHECK(p.transport->post(id, 2, {staging.data, kSlotBytes + 1}, 0, text("x")) == Sent::kYes);
  CHECK(p.transport->post(id, 3, {staging.data, 1}, kNumSlots, text("x")) == Sent::kYes);
  CHECK(d.transport->post(id, 4, {staging.data, 1}, 0, text("x")) == Sent::kLost);
  CHECK(poll_until(d, p, [&] { return p.log.num_completions == 3; }));
  for (const TicketId ticket : {1U, 2U, 3U}) CHECK(p.log.fates[ticket] == Fate::kFailed);
  CHECK(push_one(d, p, id, {staging.data, kSlotBytes}, 0, 5));
  CHECK_EQ(d.log.notices[id].size(), 1U);
  CHECK(d.log.lost.empty() && p.log.lost.empty());
}

TEST(posts_in_flight_are_bounded_and_each_completes_once) {
  NixlOptions with = options();
  with.max_posts_per_session = 3;
  Engine d, p(with);
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  const auto offer = d.transport->open_landing(id, 1 << 20, kNumSlots);
  const auto answer = p.transport->accept(id, offer.value(), 1 << 20, kNumSlots);
  if (!CHECK(answer.ok()) || !CHECK(d.transport->connect(id, answer.value()).ok())) return;
  const Region staging = staging_of(p, 1 << 20);
  const ByteView source(staging.data, staging.size_bytes);
  CHECK(p.transport->post(id, 0, source, 0, text("early")) == Sent::kAgain);
  CHECK(p.transport->send(id, text("early")) == Sent::kAgain);
  CHECK(d.transport->send(id, text("hello")) == Sent::kYes);
  CHECK(poll_until(d, p, [&] { return !p.log.messages[id].empty(); }));

  TicketId posted = 0, refused = 0;
  const bool all = poll_until(d, p, [&] {
    for (int i = 0; i < 8 && posted < 100; ++i) {
      const Sent sent = p.transport->post(id, posted + 1, source,
                                          static_cast<std::uint32_t>(posted) % kNumSlots, text("box"));
      if (sent == Sent::kYes) ++posted;
      if (sent == Sent::kAgain) ++refused;
    }
    return d.log.notices[id].size() == 100 && p.log.num_completions == 100;
  });
  CHECK(all);
  CHECK(refused > 0);
  CHECK_EQ(p.log.fates.size(), 100U);
}

TEST(closing_answers_every_post_and_late_notices_are_dropped) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  if (!open_session(d, p, id, 1 << 20)) return;
  const Region staging = staging_of(p, 1 << 20);
  for (TicketId ticket = 1; ticket <= 20; ++ticket) {
    CHECK(p.transport->post(id, ticket, {staging.data, staging.size_bytes}, 0, text("box")) == Sent::kYes);
  }
  p.transport->close_session(id);
  d.transport->close_session(id);
  CHECK(p.counters->orphaned_posts > 0);
  for (int i = 0; i < 1000; ++i) d.transport->poll(d.log);
  CHECK(!d.transport->landing_quiet(id));
  p.transport->poll(p.log);
  CHECK_EQ(p.log.num_completions, 20U);
  CHECK(poll_until(d, p, [&] { return d.counters->dropped_notifications >= 1; }));
  CHECK(poll_until(d, p, [&] { return d.counters->dropped_notifications >= p.counters->orphaned_posts; }));
  CHECK_EQ(p.log.num_completions, 20U);
  CHECK(d.log.notices[id].empty());
  // Each of them has completed after all, and P knows that its source is free.
  CHECK(poll_until(d, p, [&] { return p.log.settled.size() == p.counters->orphaned_posts; }));
  for (const TicketId ticket : p.log.settled) CHECK(p.log.fates.at(ticket) == Fate::kUnknown);
  CHECK(poll_until(d, p, [&] { return d.transport->landing_quiet(id); }));
  CHECK(p.transport->send(id, text("x")) == Sent::kLost);
  d.transport->release_landing(id);
}

TEST(only_the_peer_can_close_or_vouch) {
  Engine d, p, stranger;
  if (!d.transport || !p.transport || !stranger.transport) return;
  const SessionId id = new_session();
  const auto offer = d.transport->open_landing(id, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return;
  CHECK(stranger.transport->accept(id, offer.value(), kSlotBytes, kNumSlots).ok());
  const auto answer = p.transport->accept(id, offer.value(), kSlotBytes, kNumSlots);
  if (!CHECK(answer.ok()) || !CHECK(d.transport->connect(id, answer.value()).ok())) return;
  CHECK(d.transport->send(id, text("hello")) == Sent::kYes);
  CHECK(poll_until(d, p, [&] { return !p.log.messages[id].empty(); }));

  const auto stranger_closes = [&] {
    CHECK(stranger.transport->accept(id, offer.value(), kSlotBytes, kNumSlots).ok());
    stranger.transport->close_session(id);
    for (int i = 0; i < 1000; ++i) {
      stranger.transport->poll(stranger.log);
      d.transport->poll(d.log);
    }
  };
  stranger.transport->close_session(id);
  stranger_closes();
  CHECK(d.log.lost.empty());
  d.transport->close_session(id);
  stranger_closes();
  CHECK(!d.transport->landing_quiet(id));
  p.transport->close_session(id);
  CHECK(poll_until(d, p, [&] { return d.transport->landing_quiet(id); }));
}

TEST(landing_without_a_word_is_quiet) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  const auto offer = d.transport->open_landing(id, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return;
  CHECK(!d.transport->landing_quiet(id));
  d.transport->close_session(id);
  CHECK(d.transport->landing_quiet(id));
  d.transport->release_landing(id);
}

TEST(handshake_errors_name_both_values) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  const auto offer = d.transport->open_landing(id, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return;
  const Status sizes = p.transport->accept(id, offer.value(), kSlotBytes + 1, kNumSlots).status();
  CHECK(sizes.code() == Code::kHandshake);
  CHECK(sizes.message().find("65536") != std::string::npos &&
        sizes.message().find("65537") != std::string::npos);
  CHECK(p.transport->accept(new_session(), offer.value(), kSlotBytes, kNumSlots).status().code() ==
        Code::kHandshake);
  CHECK(d.transport->accept(new_session(), offer.value(), kSlotBytes, kNumSlots).status().code() ==
        Code::kHandshake);
  CHECK(d.transport->connect(id, offer.value()).code() == Code::kHandshake);
  CHECK(d.transport->connect(id, text("garbage")).code() == Code::kHandshake);
  const auto answer = p.transport->accept(id, offer.value(), kSlotBytes, kNumSlots);
  CHECK(answer.ok() && d.transport->connect(id, answer.value()).ok());
}

TEST(a_peer_that_restarts_is_a_new_peer) {
  Engine d;
  if (!d.transport) return;
  for (TicketId life = 1; life <= 3; ++life) {
    Engine p;
    if (!p.transport) return;
    const SessionId id = new_session();
    if (!open_session(d, p, id)) return;
    const Region staging = staging_of(p, kSlotBytes);
    if (!push_one(d, p, id, {staging.data, kSlotBytes}, 0, life)) return;
    p.transport.reset();
    d.transport->close_session(id);
    d.transport->release_landing(id);
    for (int i = 0; i < 1000; ++i) d.transport->poll(d.log);
  }
}

TEST(large_and_empty_messages) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  if (!open_session(d, p, id)) return;
  const std::size_t limit = d.transport->capabilities().max_message_bytes;
  const Bytes large(limit, std::byte{0x5a});
  CHECK(d.transport->send(id, large) == Sent::kYes);
  CHECK(d.transport->send(id, {}) == Sent::kYes);
  CHECK(poll_until(d, p, [&] { return p.log.messages[id].size() == 3; }));
  const auto& got = p.log.messages[id];
  CHECK(std::find(got.begin(), got.end(), large) != got.end());
  CHECK(std::find(got.begin(), got.end(), Bytes{}) != got.end());
  const Region staging = staging_of(p, kSlotBytes);
  CHECK(p.transport->post(id, 1, {staging.data, 8}, 0, large) == Sent::kYes);
  CHECK(poll_until(d, p, [&] { return d.log.notices[id].size() == 1 && d.log.notices[id][0] == large; }));
  CHECK(d.transport->send(id, Bytes(limit + 1)) == Sent::kLost);
}

TEST(latency_of_one_mebibyte) {
  Engine d, p;
  if (!d.transport || !p.transport) return;
  const SessionId id = new_session();
  if (!open_session(d, p, id, 1 << 20)) return;
  const Region staging = staging_of(p, 1 << 20);
  std::vector<TimeUs> took_us;
  for (TicketId ticket = 1; ticket <= 100; ++ticket) {
    const TimeUs start = monotonic_us();
    if (!push_one(d, p, id, {staging.data, staging.size_bytes}, 0, ticket)) return;
    took_us.push_back(monotonic_us() - start);
  }
  const TimeUs first = took_us.front();
  std::sort(took_us.begin(), took_us.end());
  std::printf(
      "1 MiB, post to notice and completion, data compared, one thread: first %lld us, median %lld us, max "
      "%lld us\n",
      static_cast<long long>(first), static_cast<long long>(took_us[took_us.size() / 2]),
      static_cast<long long>(took_us.back()));
}

conformance::Subject nixl() {
  conformance::Subject subject;
  subject.label = "nixl";
  subject.make = [](const Incarnation& self) -> std::unique_ptr<Transport> {
    auto made = make_nixl_transport(options(self));
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}
KVPUSH_TRANSPORT_CONFORMANCE(nixl)

}  // namespace
}  // namespace kvpush
