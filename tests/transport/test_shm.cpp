// Shared memory: the conformance suite, and what only it can be asked.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "conformance.hpp"
#include "transport/shm/segment.hpp"
#include "transport/shm/shm_transport.hpp"
#include "transport/shm/socket.hpp"

namespace {

using namespace kvpush;
using conformance::End;
using conformance::establish;
using conformance::new_session;
using conformance::numbered;
using conformance::pattern;
using conformance::pump_until;
using conformance::settle;

constexpr TimeUs kBudgetUs = 1'000'000;
constexpr std::size_t kSlotBytes = 4096;

std::unique_ptr<Transport> make_shm(const Incarnation& self) {
  auto made = make_shm_transport(self, kBudgetUs);
  CHECK_EQ(made.status().message(), "");
  return made.ok() ? std::move(made).value() : nullptr;
}

conformance::Subject shm() {
  conformance::Subject subject;
  subject.label = "shm";
  subject.make = make_shm;
  return subject;
}
KVPUSH_TRANSPORT_CONFORMANCE(shm)

std::size_t num_open_fds() {
  std::size_t count = 0;
  DIR* const list = ::opendir("/proc/self/fd");
  while (::readdir(list) != nullptr) ++count;
  ::closedir(list);
  return count;
}

std::size_t num_mappings() {
  std::size_t count = 0;
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  std::array<char, 512> line{};
  while (std::fgets(line.data(), line.size(), maps) != nullptr)
    count += std::strstr(line.data(), "kvpush") != nullptr;
  std::fclose(maps);
  return count;
}

/// An engine whose incarnation is known, so that strangers can call.
struct Host {
  Incarnation self{random_uuid()};
  End end{
      conformance::Subject{.label = "shm", .make = [this](const Incarnation&) { return make_shm(self); }}};
  [[nodiscard]] std::uint64_t num_dropped() {
    return static_cast<ShmTransport&>(*end).counters().dropped_connections;
  }
};

shm::SegmentHeader& header_of(const Region& slots) {
  return *reinterpret_cast<shm::SegmentHeader*>(slots.data - shm::kSlotsOffset);
}

TEST(no_leak_over_many_cycles) {
  End d(shm());
  End p(shm());
  const std::size_t fds = num_open_fds();
  for (int i = 0; i < 10'000; ++i) {
    const SessionId session = new_session();
    if (i % 4 == 0) {
      Result<Bytes> offer = d->open_landing(session, kSlotBytes, 2);
      if (!CHECK(offer.ok())) return;
      if (i % 8 == 0) CHECK(p->accept(session, offer.value(), kSlotBytes, 2).ok());
    } else if (!establish(d, p, session, kSlotBytes, 2)) {
      return;
    }
    if (i % 2 == 0) d->close_session(session);
    p->close_session(session);
    if (i % 3 == 0) d.poll();
    d->close_session(session);
    CHECK(d->landing_quiet(session));
    d->release_landing(session);
    if (i % 3 == 1) p.poll();
    d.messages.clear();
    p.messages.clear();
  }
  settle({&d, &p});
  CHECK_EQ(num_open_fds(), fds);
  CHECK_EQ(num_mappings(), 0);
}

TEST(destruction_frees_everything_and_tells_the_peer) {
  const std::size_t fds = num_open_fds();
  {
    End d(shm());
    End p(shm());
    const SessionId session = new_session();
    if (!establish(d, p, session, kSlotBytes, 2)) return;
    p.destroy();
    CHECK(pump_until({&d}, [&] { return d.losses.contains(session); }));
    CHECK(d->landing_quiet(session));
  }
  CHECK_EQ(num_open_fds(), fds);
  CHECK_EQ(num_mappings(), 0);
}

TEST(published_before_the_end_arrives_before_the_loss) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return;
  for (std::uint64_t i = 0; i < 500; ++i)
    CHECK(p.post(session, i, 0, pattern(i, 10), numbered(i, 40)) == Sent::kYes);
  p.destroy();
  d.poll();
  CHECK_EQ(d.notices[session].size(), 500);
  CHECK_EQ(d.losses[session].size(), 1);
}

TEST(no_loss_after_a_close_in_the_last_notice) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return;
  d.notice_hook = [&](const SessionId&, ByteView) { d->close_session(session); };
  CHECK(p.post(session, 1, 0, {}, numbered(1, 40)) == Sent::kYes);
  p.destroy();
  settle({&d});
  CHECK_EQ(d.notices[session].size(), 1);
  CHECK(d.losses.empty());
  CHECK(d->landing_quiet(session));
}

TEST(a_description_of_another_host_names_both) {
  Host p;
  const SessionId session = new_session();
  shm::Description description{.host = "some-other-boot/net:1",
                               .engine = p.self,
                               .session = session,
                               .pid = 1,
                               .slot_bytes = kSlotBytes,
                               .num_slots = 2};
  const Result<Bytes> answer = p.end->accept(session, encode(description), kSlotBytes, 2);
  CHECK(answer.status().code() == Code::kHandshake);
  CHECK(answer.status().message().find("some-other-boot/net:1") != std::string::npos);
  CHECK(answer.status().message().find(shm::host_identity().value()) != std::string::npos);
}

TEST(every_flipped_byte_of_a_description_is_refused) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, 2);
  for (std::size_t i = 0; i < offer.value().size(); ++i) {
    Bytes wrong = offer.value();
    wrong[i] ^= std::byte{0x20};
    CHECK(!p->accept(session, wrong, kSlotBytes, 2).ok());
  }
  CHECK(!p->accept(new_session(), offer.value(), kSlotBytes, 2).ok());
}

TEST(impossible_landings_are_refused) {
  End d(shm());
  CHECK(d->open_landing(new_session(), 0, 2).status().code() == Code::kInvalidArgument);
  CHECK(d->open_landing(new_session(), 4096, 0).status().code() == Code::kInvalidArgument);
  CHECK(d->open_landing(new_session(), SIZE_MAX, UINT32_MAX).status().code() == Code::kInvalidArgument);
  const SessionId session = new_session();
  CHECK(d->open_landing(session, 4096, 2).ok());
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(d->landing(session).data) % 4096, 0);
}

TEST(a_name_taken_is_an_error) {
  Host first;
  CHECK(make_shm_transport(first.self, kBudgetUs).status().code() == Code::kTransport);
}

TEST(nobody_listening_is_an_error) {
  Host p;
  End d(shm());
  const SessionId session = new_session();
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, 2);
  Result<Bytes> answer = p.end->accept(session, offer.value(), kSlotBytes, 2);
  p.end.destroy();
  CHECK(d->connect(session, answer.value()).code() == Code::kPeerLost);
  d->close_session(session);
  CHECK(d->landing_quiet(session));
}

TEST(garbage_at_the_listening_socket) {
  Host p;
  End d(shm());
  const SessionId session = new_session();
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, 2);
  Result<Bytes> answer = p.end->accept(session, offer.value(), kSlotBytes, 2);
  const std::size_t fds = num_open_fds();
  const shm::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const shm::Fd unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  const shm::SegmentLayout small = shm::plan_segment(kSlotBytes, 1).value();
  const shm::SegmentLayout fitting = shm::plan_segment(kSlotBytes, 2).value();
  const shm::Segment too_small = shm::create_segment(small, session, shm::Extent::kAll, kBudgetUs).value();
  const shm::Segment of_another =
      shm::create_segment(fitting, new_session(), shm::Extent::kAll, kBudgetUs).value();
  const shm::Segment right = shm::create_segment(fitting, session, shm::Extent::kAll, kBudgetUs).value();
  CHECK_EQ(::pwrite(unsealed.get(), right.mapping.base(), fitting.total_bytes, 0),
           static_cast<ssize_t>(fitting.total_bytes));
  std::vector<shm::Fd> callers;
  const auto call = [&](const std::function<void(const shm::Fd&)>& act) {
    callers.push_back(std::move(shm::connect_to(p.self, kBudgetUs).value()));
    act(callers.back());
  };
  const auto say = [](ByteView bytes) {
    return [bytes](const shm::Fd& socket) {
      CHECK(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0);
    };
  };
  const auto hello = [](const SessionId& id, const shm::Fd& memfd) {
    return [&id, &memfd](const shm::Fd& socket) { CHECK(shm::send_hello(socket, id, memfd).ok()); };
  };
  const Bytes noise = pattern(1, 20);
  const Bytes much = pattern(2, 60'000);
  const SessionId unknown = new_session();
  call(say(noise));
  call(say(much));
  call(say({}));
  call(hello(unknown, too_small.memfd));
  call(hello(session, null));
  call(hello(session, unsealed));
  call(hello(session, too_small.memfd));
  call(hello(session, of_another.memfd));
  const std::size_t num_wrong = callers.size();
  call([](const shm::Fd&) {});  // silent: stays, costs nothing
  settle({&p.end, &d});
  CHECK_EQ(p.num_dropped(), num_wrong);
  for (std::size_t i = 0; i < num_wrong; ++i) CHECK(shm::is_hung_up(callers[i]));
  CHECK(!shm::is_hung_up(callers.back()));
  // A flood of silent ones is bounded.
  for (int i = 0; i < 400; ++i) {
    call([](const shm::Fd&) {});
    if (i % 50 == 0) p.end.poll();
  }
  settle({&p.end});
  CHECK(p.num_dropped() >= num_wrong + 100);
  callers.clear();
  settle({&p.end});
  // The rightful one still gets in.
  CHECK(d->connect(session, answer.value()).ok());
  CHECK(d->send(session, noise) == Sent::kYes);
  CHECK(pump_until({&d, &p.end}, [&] { return p.end.messages[session].size() == 1; }));
  // Nobody gets in twice.
  const std::uint64_t dropped = p.num_dropped();
  call(hello(session, of_another.memfd));
  settle({&p.end, &d});
  CHECK_EQ(p.num_dropped(), dropped + 1);
  CHECK(p.end.losses.empty());
  callers.clear();
  // null, unsealed, three segments; two sockets in place of the session's memory file.
  CHECK_EQ(num_open_fds(), fds + 6);
}

TEST(an_unknown_packet_on_the_session_socket_loses_the_session) {
  Host p;
  const SessionId session = new_session();
  const shm::SegmentLayout layout = shm::plan_segment(kSlotBytes, 2).value();
  const shm::Segment segment = shm::create_segment(layout, session, shm::Extent::kAll, kBudgetUs).value();
  const shm::Description description{.host = shm::host_identity().value(),
                                     .engine = p.self,
                                     .session = session,
                                     .pid = 1,
                                     .slot_bytes = kSlotBytes,
                                     .num_slots = 2};
  CHECK(p.end->accept(session, encode(description), kSlotBytes, 2).ok());
  const shm::Fd socket = std::move(shm::connect_to(p.self, kBudgetUs).value());
  CHECK(shm::send_hello(socket, session, segment.memfd).ok());
  settle({&p.end});
  CHECK_EQ(p.end->slot_memory(session, 1).size_bytes, kSlotBytes);
  CHECK(p.end.losses.empty());
  CHECK_EQ(::send(socket.get(), "WW", 2, MSG_NOSIGNAL), 2);
  settle({&p.end});
  CHECK_EQ(p.end.losses[session].size(), 1);
  CHECK(!shm::is_hung_up(socket));  // P has not unmapped
  p.end->close_session(session);
  CHECK(shm::is_hung_up(socket));
}

/// Applies `damage` to the header as the peer of `victim` would, and expects the loss of the session.
void expect_loss(bool victim_is_source, const std::function<void(shm::SegmentHeader&, std::byte*)>& damage,
                 const std::string& reason) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return;
  End& victim = victim_is_source ? p : d;
  shm::SegmentHeader& header = header_of(d->landing(session));
  damage(header, reinterpret_cast<std::byte*>(&header));
  (void)victim->send(session, numbered(1, shm::kMaxRecordBytes));
  for (int i = 0; i < 10; ++i) {
    (void)victim->send(session, numbered(1, shm::kMaxRecordBytes));
    victim.poll();
  }
  if (CHECK_EQ(victim.losses[session].size(), 1)) {
    CHECK(victim.losses[session].front().find(reason) != std::string::npos);
  }
  CHECK(victim->send(session, numbered(1, 8)) == Sent::kLost);
  CHECK(victim.messages[session].empty() && victim.notices[session].empty());
}

TEST(damaged_indices_lose_the_session) {
  for (const std::uint64_t wrong : {std::uint64_t{1}, std::uint64_t{8} << 40, UINT64_MAX, UINT64_MAX - 7,
                                    std::uint64_t{shm::kRingBytes} * 2}) {
    expect_loss(
        true, [&](shm::SegmentHeader& header, std::byte*) { header.to_source.tail = wrong; }, "write index");
    expect_loss(
        false, [&](shm::SegmentHeader& header, std::byte*) { header.to_landing.tail = wrong; },
        "write index");
    expect_loss(
        true,
        [&](shm::SegmentHeader& header, std::byte*) { header.to_landing.head = wrong + shm::kRingBytes; },
        "read index");
  }
}

TEST(damaged_records_lose_the_session) {
  const std::uint64_t good_kind = std::uint64_t{1} << 32;
  for (const std::uint64_t word : {good_kind | 0xffffffffU, good_kind | (shm::kMaxRecordBytes + 1),
                                   good_kind | 9, std::uint64_t{8}, std::uint64_t{7} << 32}) {
    expect_loss(
        false,
        [&](shm::SegmentHeader& header, std::byte* base) {
          std::memcpy(base + shm::kToLandingOffset, &word, sizeof(word));
          header.to_landing.tail = 16;
        },
        "impossible length or kind");
  }
}

TEST(a_notice_of_the_landing_loses_the_session) {
  expect_loss(
      true,
      [&](shm::SegmentHeader& header, std::byte* base) {
        const std::uint64_t word = std::uint64_t{2} << 32;
        const std::uint64_t at = header.to_source.tail;
        std::memcpy(base + shm::kToSourceOffset + at, &word, sizeof(word));
        header.to_source.tail = at + 8;
      },
      "sent a notice");
}

TEST(noise_in_the_shared_pages_is_survived) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    End d(shm());
    End p(shm());
    const SessionId session = new_session();
    if (!establish(d, p, session, kSlotBytes, 2)) return;
    auto* const base = reinterpret_cast<std::byte*>(&header_of(d->landing(session)));
    for (std::uint64_t i = 0; i < 40; ++i) {
      const Bytes noise = pattern(seed * 100 + i, 16);
      const std::size_t span = i % 2 == 0 ? shm::kPageBytes : shm::kSlotsOffset;
      const std::size_t at =
          (static_cast<std::size_t>(noise[0]) << 8 | static_cast<std::size_t>(noise[1])) * 8 % span;
      std::memcpy(base + at, noise.data() + 8, 8);
      (void)d->send(session, numbered(i, 100));
      (void)p.post(session, i, 0, {}, numbered(i, 100));
      d.poll();
      p.poll();
      (void)d->arm_wait();
      (void)p->arm_wait();
    }
    d.poll();
    p.poll();
    CHECK(d.losses[session].size() <= 1);
    CHECK(p.losses[session].size() <= 1);
  }
}

TEST(misuse_fails_closed) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return;
  CHECK(p->post(session, 1, {}, 2, numbered(1, 8)) == Sent::kLost);
  p.poll();
  CHECK_EQ(p.losses[session].size(), 1);
  CHECK(p.fates.empty());
  CHECK(!p->allocate_staging(4096).ok());
  CHECK(d->send(session, Bytes(shm::kMaxRecordBytes + 1)) == Sent::kLost);
  d.poll();
  CHECK_EQ(d.losses[session].size(), 1);
}

TEST(an_idle_engine_is_not_woken) {
  End d(shm());
  End p(shm());
  const SessionId session = new_session();
  if (!establish(d, p, session, kSlotBytes, 2)) return;
  settle({&d, &p});
  CHECK(!d->arm_wait());
  CHECK(!p->arm_wait());
  std::array<pollfd, 2> entries{{{d->wait_fd(), POLLIN, 0}, {p->wait_fd(), POLLIN, 0}}};
  CHECK_EQ(::poll(entries.data(), entries.size(), 50), 0);
  // One wake-up however much arrives; none while the peer is awake.
  for (int i = 0; i < 100; ++i) CHECK(d->send(session, numbered(1, 8)) == Sent::kYes);
  CHECK_EQ(::poll(entries.data(), entries.size(), 1000), 1);
  p.poll();
  CHECK_EQ(p.messages[session].size(), 100);
  CHECK(d->send(session, numbered(1, 8)) == Sent::kYes);
  CHECK_EQ(::poll(entries.data(), entries.size(), 0), 0);
  CHECK(p->arm_wait());
}

TEST(running_out_of_descriptors_does_not_spin) {
  Host p;
  std::vector<shm::Fd> callers;
  for (int i = 0; i < 3; ++i) callers.push_back(std::move(shm::connect_to(p.self, kBudgetUs).value()));
  std::vector<shm::Fd> hoard;
  while (hoard.empty() || hoard.back().ok()) hoard.emplace_back(::dup(0));
  for (int i = 0; i < 5; ++i) p.end.poll();
  CHECK_EQ(p.num_dropped(), 3);
  pollfd entry{p.end->wait_fd(), POLLIN, 0};
  CHECK_EQ(::poll(&entry, 1, 0), 0);
  hoard.clear();
  CHECK(shm::connect_to(p.self, kBudgetUs).ok());
}

}  // namespace
