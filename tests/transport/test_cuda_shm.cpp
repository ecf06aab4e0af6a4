// Shared memory between engines whose caches are on (fake) GPUs: where the slots are, and who gives them
// back.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "conformance.hpp"
#include "fake_gpu.hpp"
#include "transport/process_identity.hpp"
#include "transport/shm/shm_transport.hpp"

namespace {

using namespace kvpush;
using conformance::End;
using conformance::establish;
using conformance::fake;
using conformance::fake_gpu;
using conformance::new_session;
using conformance::numbered;
using conformance::pump_until;
using conformance::settle;
using conformance::Subject;

constexpr TimeUs kBudgetUs = 1'000'000;
constexpr std::size_t kSlotBytes = 4096;
constexpr int kHost = -1;
constexpr CudaCode kInvalidValue = 1;

Subject engine_on(int gpu) {
  Subject subject;
  subject.label = "shm";
  subject.make = [gpu](const Incarnation& self) -> std::unique_ptr<Transport> {
    auto made = make_shm_transport(self, kBudgetUs, gpu == kHost ? nullptr : fake_gpu(gpu));
    CHECK_EQ(made.status().message(), "");
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}

/// Ends are made on `first` and `second` in turn: in the suite D comes first, and a child is the other one.
Subject pair_of(const char* label, int first, int second) {
  static std::atomic<unsigned> num_made{0};
  num_made = 0;
  Subject subject;
  subject.label = label;
  subject.make = [first, second](const Incarnation& self) {
    return engine_on(num_made++ % 2 == 0 ? first : second).make(self);
  };
  return subject;
}

Subject gpu_to_gpu() {
  Subject subject = pair_of("gpu_to_gpu", 0, 0);
  subject.one_address = true;
  return subject;
}
KVPUSH_TRANSPORT_CONFORMANCE(gpu_to_gpu)

Subject host_to_gpu() {
  return pair_of("host_to_gpu", 0, kHost);
}
KVPUSH_TRANSPORT_CONFORMANCE(host_to_gpu)

Subject gpu_to_host() {
  return pair_of("gpu_to_host", kHost, 0);
}
KVPUSH_TRANSPORT_CONFORMANCE(gpu_to_host)

Subject gpu_to_other_gpu() {
  return pair_of("gpu_to_other_gpu", 0, 1);
}
KVPUSH_TRANSPORT_CONFORMANCE(gpu_to_other_gpu)

/// As in a container that may not open its neighbour's memory.
Subject gpu_without_ipc() {
  Subject subject = pair_of("gpu_without_ipc", 0, 0);
  subject.make = [make = subject.make](const Incarnation& self) {
    fake().fail("cuIpcOpenMemHandle_v2", -1, kInvalidValue);
    return make(self);
  };
  return subject;
}
KVPUSH_CONFORMANCE_TEST(gpu_without_ipc, process_source)
KVPUSH_CONFORMANCE_TEST(gpu_without_ipc, process_landing)
KVPUSH_CONFORMANCE_TEST(gpu_without_ipc, child_entry)

TEST(the_suites_above_left_nothing) {
  CHECK_EQ(fake().leaks(), 0);
}

std::uint64_t device_sessions(End& end) {
  return static_cast<ShmTransport&>(*end).counters().device_sessions;
}

/// Sets up a session and pushes one box through it. The reason why not, or "".
std::string push_one(End& d, End& p, const SessionId& session) {
  const auto offer = d->open_landing(session, kSlotBytes, 2);
  if (!offer.ok()) return offer.status().message();
  const auto answer = p->accept(session, offer.value(), kSlotBytes, 2);
  if (!answer.ok()) return answer.status().message();
  if (const Status status = d->connect(session, answer.value()); !status.ok()) return status.message();
  if (d->send(session, numbered(1, 8)) != Sent::kYes) return "not sent";
  if (!pump_until({&d, &p}, [&] { return !p.messages[session].empty() || !p.losses[session].empty(); }))
    return "nothing came";
  if (!p.losses[session].empty()) return p.losses[session].front();
  const Bytes box = numbered(9, kSlotBytes);
  if (p.post(session, 1, 1, box, numbered(1, 8)) != Sent::kYes) return "not posted";
  if (!pump_until({&d, &p}, [&] { return !d.notices[session].empty(); })) return "no notice";
  return std::memcmp(d->landing(session).data + kSlotBytes, box.data(), box.size()) == 0 ? "" : "wrong data";
}

void end(End& d, End& p, const SessionId& session) {
  d->close_session(session);
  p->close_session(session);
  CHECK(pump_until({&d, &p}, [&] { return d->landing_quiet(session); }));
  d->release_landing(session);
}

TEST(slots_are_in_device_memory_where_both_reach_it) {
  fake().reset();
  End d(engine_on(0));
  End p(engine_on(0));
  const SessionId session = new_session();
  CHECK_EQ(push_one(d, p, session), "");
  CHECK_EQ(device_sessions(d), 1);
  CHECK_EQ(device_sessions(p), 1);
  CHECK(p->slot_memory(session, 0).data == d->landing(session).data);
  CHECK_EQ(fake().count("cuMemHostRegister_v2"), 0);
  end(d, p, session);
  CHECK_EQ(fake().count("cuMemFree_v2"), 1);
}

TEST(slots_are_in_pinned_host_memory_elsewhere) {
  const std::array<std::array<int, 2>, 3> pairs{{{0, kHost}, {kHost, 0}, {0, 1}}};
  for (const auto& [d_gpu, p_gpu] : pairs) {
    fake().reset();
    {
      End d(engine_on(d_gpu));
      End p(engine_on(p_gpu));
      const SessionId session = new_session();
      CHECK_EQ(push_one(d, p, session), "");
      CHECK_EQ(device_sessions(d) + device_sessions(p), 0);
      CHECK(p->slot_memory(session, 0).data != d->landing(session).data);
      // One range each: both have a GPU, or one of them.
      CHECK_EQ(fake().count("cuMemHostRegister_v2"), (d_gpu != kHost) + (p_gpu != kHost));
      // What D offered in vain is free again.
      CHECK_EQ(fake().count("cuMemFree_v2"), d_gpu != kHost);
      end(d, p, session);
    }
    CHECK_EQ(fake().count("cuMemHostUnregister"), fake().count("cuMemHostRegister_v2"));
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(every_cuda_call_that_fails_costs_the_fast_path_or_gives_an_error) {
  const std::array<std::array<int, 2>, 3> pairs{{{0, 0}, {0, kHost}, {kHost, 0}}};
  for (const auto& [d_gpu, p_gpu] : pairs) {
    for (const char* symbol :
         {"cuCtxPushCurrent_v2", "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuMemHostRegister_v2",
          "cuMemHostGetDevicePointer_v2", "cuMemFree_v2", "cuMemHostUnregister"}) {
      for (const int nth : {1, 2, -1}) {
        fake().reset();
        {
          End d(engine_on(d_gpu));
          End p(engine_on(p_gpu));
          fake().fail(symbol, nth, kInvalidValue);
          const SessionId session = new_session();
          const std::string reason = push_one(d, p, session);
          CHECK(reason.empty() || reason.find("cuMem") != std::string::npos);
          fake().fail(symbol, 0, 0);
          end(d, p, session);
          // The engines are as good as new.
          const SessionId next = new_session();
          CHECK_EQ(push_one(d, p, next), "");
          end(d, p, next);
        }
        CHECK_EQ(fake().leaks(), 0);
      }
    }
  }
}

TEST(a_landing_that_cannot_be_shared_is_in_the_segment) {
  for (const char* symbol : {"cuMemAlloc_v2", "cuIpcGetMemHandle"}) {
    fake().reset();
    End d(engine_on(0));
    End p(engine_on(0));
    fake().fail(symbol, 1, kCudaOutOfMemory);
    const SessionId session = new_session();
    CHECK_EQ(push_one(d, p, session), "");
    CHECK_EQ(device_sessions(d), 0);
    end(d, p, session);
  }
}

TEST(device_memory_that_p_has_open_outlives_the_landing) {
  fake().reset();
  {
    End d(engine_on(0));
    End p(engine_on(0));
    const SessionId session = new_session();
    CHECK_EQ(push_one(d, p, session), "");
    d->close_session(session);
    CHECK(!d->release_landing(session));
    CHECK(pump_until({&d, &p}, [&] { return p.losses.contains(session); }));
    CHECK_EQ(fake().count("cuMemFree_v2"), 0);
    p->slot_memory(session, 1).data[0] = std::byte{1};
    p->close_session(session);
    CHECK(pump_until({&d}, [&] { return d->release_landing(session); }));
    CHECK_EQ(fake().count("cuMemFree_v2"), 1);
  }
  CHECK_EQ(fake().leaks(), 0);
}

TEST(an_answer_that_takes_what_was_not_offered_is_refused) {
  End d(engine_on(kHost));
  const SessionId session = new_session();
  CHECK(d->open_landing(session, kSlotBytes, 2).ok());
  shm::Description answer{.kind = shm::DescriptionKind::kAnswer,
                          .host = shm::host_identity().value(),
                          .engine = Incarnation{random_uuid()},
                          .session = session,
                          .pid = 1,
                          .slot_bytes = kSlotBytes,
                          .num_slots = 2,
                          .on_device = true};
  const Status status = d->connect(session, encode(answer));
  CHECK(status.code() == Code::kHandshake);
  CHECK(status.message().find("not offered") != std::string::npos);
}

shm::Description offer_of(const SessionId& session, const ProcessIdentity& life) {
  return {.kind = shm::DescriptionKind::kOffer,
          .host = shm::host_identity().value(),
          .engine = Incarnation{random_uuid()},
          .session = session,
          .pid = 1,
          .slot_bytes = kSlotBytes,
          .num_slots = 2,
          .process = random_uuid(),
          .life = life,
          .on_device = true,
          .device = {.gpu = fake_gpu()->uuid(), .address = 4096}};
}

TEST(p_takes_device_memory_only_from_who_can_prove_its_end) {
  for (const bool can_judge : {true, false}) {
    End p(engine_on(0));
    const SessionId session = new_session();
    const shm::Description offer = offer_of(session, can_judge ? this_process() : ProcessIdentity{});
    const auto bytes = p->accept(session, encode(offer), kSlotBytes, 2);
    if (!CHECK(bytes.ok())) return;
    shm::Description expected = offer;
    expected.kind = shm::DescriptionKind::kAnswer;
    const auto answer = decode_matching(bytes.value(), expected);
    if (!CHECK(answer.ok())) return;
    CHECK_EQ(answer.value().on_device, can_judge);
  }
}

enum class Source : std::uint8_t {
  kOpens,
  kCannotOpen,
  kStops,  ///< its sockets close, and the process goes on for as long as the side channel is open
};

void close_sockets_but(int kept) {
  for (int fd = 3; fd < 1024; ++fd) {
    struct stat info{};
    if (fd != kept && ::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode)) ::close(fd);
  }
}

/// P in a process of its own; `talk` is its side channel.
[[noreturn]] void run_source(int talk, Source kind) {
  fake().reset();
  bool good = false;
  {
    End p(engine_on(0));
    if (kind == Source::kCannotOpen) fake().fail("cuIpcOpenMemHandle_v2", 1, kInvalidValue);
    SessionId session;
    Bytes offer(4096);
    const ssize_t got = ::recv(talk, session.bytes.data(), session.bytes.size(), 0);
    const ssize_t size = ::recv(talk, offer.data(), offer.size(), 0);
    offer.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    const auto answer = p->accept(session, offer, kSlotBytes, 2);
    // D may withdraw its offer now, and free what it offered.
    const bool opened_early = fake().count("cuIpcOpenMemHandle_v2") != 0;
    if (got > 0 && answer.ok() && !opened_early) {
      (void)::send(talk, answer.value().data(), answer.value().size(), 0);
      good = pump_until({&p}, [&] { return !p.messages[session].empty(); });
      const Bytes box = numbered(9, kSlotBytes);
      good = good && p.post(session, 1, 1, box, numbered(1, 8)) == Sent::kYes;
      if (kind == Source::kStops) {
        close_sockets_but(talk);
        char byte = 0;
        (void)::recv(talk, &byte, 1, 0);
        ::_exit(good ? 0 : 1);
      }
      good = good && pump_until({&p}, [&] { return p.losses.contains(session); });
      p->close_session(session);
    }
  }
  ::_exit(good && fake().leaks() == 0 ? 0 : 1);
}

/// D's side of a session with such a P. The number of sessions in device memory.
int land_from_source(Source kind) {
  std::array<int, 2> talk{};
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, talk.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(talk[0]);
    run_source(talk[1], kind);
  }
  ::close(talk[1]);
  int outcome = 0;
  {
    End d(engine_on(0));
    const SessionId session = new_session();
    const auto offer = d->open_landing(session, kSlotBytes, 2);
    CHECK(::send(talk[0], session.bytes.data(), session.bytes.size(), 0) > 0);
    CHECK(::send(talk[0], offer.value().data(), offer.value().size(), 0) > 0);
    Bytes answer(4096);
    const ssize_t size = ::recv(talk[0], answer.data(), answer.size(), 0);
    answer.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    CHECK(d->connect(session, answer).ok());
    CHECK(d->send(session, numbered(1, 8)) == Sent::kYes);
    CHECK(pump_until({&d}, [&] { return !d.notices[session].empty(); }));
    const Bytes box = numbered(9, kSlotBytes);
    CHECK(std::memcmp(d->landing(session).data + kSlotBytes, box.data(), box.size()) == 0);
    outcome = static_cast<int>(device_sessions(d));
    CHECK_EQ(fake().count("cuMemFree_v2"), 1 - outcome);
    if (kind == Source::kStops) {
      CHECK(pump_until({&d}, [&] { return d.losses.contains(session); }));
      d->close_session(session);
      settle({&d});
      // Its kernels may be writing yet.
      CHECK(!d->landing_quiet(session));
      CHECK(!d->release_landing(session));
      settle({&d});
      CHECK_EQ(fake().count("cuMemFree_v2"), 0);
      ::close(std::exchange(talk[0], -1));
      siginfo_t info{};
      CHECK_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
      CHECK(d->release_landing(session));
      CHECK_EQ(fake().count("cuMemFree_v2"), 1);
    } else {
      d->close_session(session);
      CHECK(pump_until({&d}, [&] { return d->landing_quiet(session); }));
      d->release_landing(session);
    }
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  if (talk[0] >= 0) ::close(talk[0]);
  return outcome;
}

TEST(p_decides_by_whether_it_can_open_the_memory) {
  for (const Source kind : {Source::kOpens, Source::kCannotOpen}) {
    fake().reset();
    CHECK_EQ(land_from_source(kind), kind == Source::kOpens);
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(device_memory_waits_for_the_process_not_for_its_socket) {
  fake().reset();
  CHECK_EQ(land_from_source(Source::kStops), 1);
  CHECK_EQ(fake().leaks(), 0);
}

TEST(a_transport_that_ends_first_leaves_its_device_memory_to_the_process) {
  fake().reset();
  End p(engine_on(0));
  End d(engine_on(0));
  const SessionId session = new_session();
  CHECK_EQ(push_one(d, p, session), "");
  d.destroy();
  CHECK_EQ(fake().count("cuMemFree_v2"), 0);
  p->slot_memory(session, 1).data[0] = std::byte{1};
}

}  // namespace
