// Peers in threads and in processes of their own: a whole small push in each, and what kill -9 does to it.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <optional>
#include <thread>

#include "conformance.hpp"

extern char** environ;

namespace kvpush::conformance {
namespace {

constexpr std::size_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kNumSlots = 4;
constexpr std::uint64_t kNumBoxes = 2'000;
constexpr std::uint64_t kEndless = UINT64_MAX;
constexpr int kChildChannel = 3;
constexpr const char* kRoleVariable = "KVPUSH_CONFORMANCE_ROLE";

/// The side channel: a blocking socket pair that keeps packets apart.
struct Channel {
  int here = -1;
  int there = -1;
  Channel() {
    std::array<int, 2> ends{-1, -1};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    here = ends[0];
    there = ends[1];
  }
  ~Channel() {
    ::close(here);
    if (there >= 0) ::close(there);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
};

bool put_packet(int fd, ByteView bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

Bytes get_packet(int fd) {
  Bytes bytes(64 << 10);
  const ssize_t size = ::recv(fd, bytes.data(), bytes.size(), 0);
  bytes.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return bytes;
}

/// Messages: a letter and a number. 'g' n: push n boxes; 'c' slot: it may be filled again; 'b': done.
Bytes word(char letter, std::uint64_t number) {
  ByteWriter out;
  out.put(letter);
  out.put(number);
  return std::move(out).take();
}

/// Sends in order as room allows.
class Outbox {
 public:
  void add(Bytes message) { queue_.push_back(std::move(message)); }
  [[nodiscard]] bool empty() const { return queue_.empty(); }
  void flush(End& end, const SessionId& session) {
    while (!queue_.empty() && end->send(session, queue_.front()) != Sent::kAgain) queue_.pop_front();
  }

 private:
  std::deque<Bytes> queue_;
};

struct Outcome {
  bool in_time = true;
  std::uint64_t num_boxes = 0;  ///< verified by D; posted by P
  bool is_lost = false;
  bool is_quiet = false;
  bool completed_once = true;
  std::uint64_t num_completed = 0;
};

/// P: accepts over the channel, then pushes what D asks for until 'b' or loss.
Outcome run_source(const Subject& subject, int channel) {
  Outcome outcome;
  End p(subject);
  const Bytes offer = get_packet(channel);
  ByteReader in(offer);
  SessionId session;
  const ByteView raw = in.get_raw(sizeof(Uuid));
  if (!p.ok() || !CHECK(raw.size() == sizeof(Uuid))) return outcome;
  std::memcpy(session.bytes.data(), raw.data(), raw.size());
  Result<Bytes> answer = p->accept(session, in.get_raw(in.remaining()), kSlotBytes, kNumSlots);
  if (!CHECK(answer.ok()) || !CHECK(put_packet(channel, answer.value()))) return outcome;

  std::deque<std::uint32_t> credits{0, 1, 2, 3};
  std::uint64_t goal = 0;
  std::size_t num_read = 0;
  bool done = false;
  while (!done && !outcome.is_lost && outcome.in_time) {
    p.poll();
    const std::vector<Bytes>& messages = p.messages[session];
    for (; num_read < messages.size(); ++num_read) {
      ByteReader message(messages[num_read]);
      const char letter = message.get<char>();
      const auto number = message.get<std::uint64_t>();
      if (letter == 'g') goal = number;
      if (letter == 'c') credits.push_back(static_cast<std::uint32_t>(number));
      if (letter == 'b') done = true;
    }
    while (outcome.num_boxes < goal && !credits.empty()) {
      const std::uint64_t seed = outcome.num_boxes;
      ByteWriter notice;
      notice.put(seed);
      notice.put(credits.front());
      const std::size_t size = 1 + seed * 997 % kSlotBytes;
      if (p.post(session, seed, credits.front(), pattern(seed, size), notice.bytes()) != Sent::kYes) break;
      credits.pop_front();
      ++outcome.num_boxes;
    }
    outcome.is_lost = p.losses.contains(session);
    if (!done && !outcome.is_lost) outcome.in_time = p.wait();
  }
  p->close_session(session);
  CHECK(pump_until({&p}, [&] { return p.fates.size() == outcome.num_boxes; }));
  outcome.num_completed = p.fates.size();
  for (const auto& [ticket, fates] : p.fates)
    outcome.completed_once = outcome.completed_once && fates.size() == 1;
  return outcome;
}

/// D: offers over the channel, asks for `goal` boxes, verifies each; then says 'b' and closes.
/// `at_box` runs after each box.
Outcome run_landing(const Subject& subject, int channel, std::uint64_t goal,
                    const std::function<void(std::uint64_t)>& at_box) {
  Outcome outcome;
  End d(subject);
  const SessionId session = new_session();
  if (!d.ok()) return outcome;
  Result<Bytes> offer = d->open_landing(session, kSlotBytes, kNumSlots);
  if (!CHECK(offer.ok())) return outcome;
  ByteWriter packet;
  packet.put_raw(std::as_bytes(std::span(session.bytes)));
  packet.put_raw(offer.value());
  CHECK(put_packet(channel, packet.bytes()));
  if (!CHECK(d->connect(session, get_packet(channel)).ok())) return outcome;

  Outbox outbox;
  outbox.add(word('g', goal));
  d.notice_hook = [&](const SessionId&, ByteView bytes) {
    ByteReader notice(bytes);
    const auto seed = notice.get<std::uint64_t>();
    const auto slot = notice.get<std::uint32_t>();
    const Bytes expected = pattern(seed, 1 + seed * 997 % kSlotBytes);
    const Region landing = d->landing(session);
    if (!CHECK(notice.done() && slot < kNumSlots) ||
        !CHECK(std::memcmp(landing.data + slot * kSlotBytes, expected.data(), expected.size()) == 0)) {
      return;
    }
    outbox.add(word('c', slot));
    ++outcome.num_boxes;
  };
  std::uint64_t num_told = 0;
  while (outcome.num_boxes < goal && !outcome.is_lost && outcome.in_time) {
    d.poll();
    outbox.flush(d, session);
    while (num_told < outcome.num_boxes) at_box(++num_told);
    outcome.is_lost = d.losses.contains(session);
    if (!outcome.is_lost && outcome.num_boxes < goal) outcome.in_time = d.wait();
  }
  outbox.add(word('b', 0));
  CHECK(pump_until({&d}, [&] {
    outbox.flush(d, session);
    return outbox.empty();
  }));
  d->close_session(session);
  if (subject.proves_quiet) {
    outcome.is_quiet = pump_until({&d}, [&] { return d->landing_quiet(session); });
  }
  d->release_landing(session);
  return outcome;
}

/// This program again, as one role of `subject`; killed and reaped at the end of its scope.
class Child {
 public:
  Child(const Subject& subject, const char* role, Channel& channel) {
    const std::string test = subject.label + "_child_entry";
    std::array<char*, 3> argv{const_cast<char*>("child"), const_cast<char*>(test.c_str()), nullptr};
    const std::string variable = std::string(kRoleVariable) + "=" + role;
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, channel.there, kChildChannel);
    CHECK_EQ(::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environment.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    // Ours must go, or the channel would not end with the child.
    ::close(channel.there);
    channel.there = -1;
  }
  ~Child() {
    if (pid_ > 0) {
      kill_now();
      (void)wait();
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill_now() const { ::kill(pid_, SIGKILL); }
  /// The exit status; -1 when it was killed.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace

void thread_source(const Subject& subject) {
#ifdef __SANITIZE_THREAD__
  if (subject.one_address)
    SKIP("slots are accessed in the order of a ring that is mapped twice: this sanitizer does not see that");
#endif
  const Channel channel;
  std::future<Outcome> source =
      std::async(std::launch::async, [&] { return run_source(subject, channel.there); });
  const Outcome landing = run_landing(subject, channel.here, kNumBoxes, [](std::uint64_t) {});
  const Outcome pushed = source.get();
  CHECK(landing.in_time && pushed.in_time);
  CHECK_EQ(landing.num_boxes, kNumBoxes);
  CHECK_EQ(pushed.num_boxes, kNumBoxes);
  CHECK_EQ(pushed.num_completed, kNumBoxes);
  CHECK(pushed.completed_once);
  CHECK(landing.is_quiet || !subject.proves_quiet);
}

void process_source(const Subject& subject) {
  if (!End(subject).ok()) return;
  Channel channel;
  Child child(subject, "source", channel);
  const Outcome landing = run_landing(subject, channel.here, kNumBoxes, [](std::uint64_t) {});
  CHECK(landing.in_time);
  CHECK_EQ(landing.num_boxes, kNumBoxes);
  CHECK(landing.is_quiet || !subject.proves_quiet);
  CHECK_EQ(child.wait(), 0);
}

void process_landing(const Subject& subject) {
  if (!End(subject).ok()) return;
  Channel channel;
  Child child(subject, "landing", channel);
  const Outcome pushed = run_source(subject, channel.here);
  CHECK(pushed.in_time);
  CHECK_EQ(pushed.num_boxes, kNumBoxes);
  CHECK(pushed.completed_once);
  CHECK_EQ(child.wait(), 0);
}

void killed_source(const Subject& subject) {
  if (!End(subject).ok()) return;
  if (!subject.detects_death) SKIP("the transport does not notice a peer's death by itself");
  Channel channel;
  Child child(subject, "source", channel);
  const Outcome landing = run_landing(subject, channel.here, kEndless, [&](std::uint64_t count) {
    if (count == 100) child.kill_now();
  });
  CHECK(landing.in_time);
  CHECK(landing.is_lost);
  CHECK(landing.num_boxes >= 100);
  CHECK(landing.is_quiet || !subject.proves_quiet);
}

void killed_landing(const Subject& subject) {
  if (!End(subject).ok()) return;
  if (!subject.detects_death) SKIP("the transport does not notice a peer's death by itself");
  Channel channel;
  Child child(subject, "suicidal_landing", channel);
  const Outcome pushed = run_source(subject, channel.here);
  CHECK(pushed.in_time);
  CHECK(pushed.is_lost);
  CHECK(pushed.num_boxes >= 100);
  CHECK_EQ(pushed.num_completed, pushed.num_boxes);
  CHECK(pushed.completed_once);
  CHECK_EQ(child.wait(), -1);
}

void child_entry(const Subject& subject) {
  const char* const role = std::getenv(kRoleVariable);
  if (role == nullptr) SKIP("the entry of child processes");
  bool good = false;
  if (std::strcmp(role, "source") == 0) {
    const Outcome pushed = run_source(subject, kChildChannel);
    good = pushed.in_time && pushed.completed_once && pushed.num_boxes == kNumBoxes;
  } else if (std::strcmp(role, "landing") == 0) {
    good = run_landing(subject, kChildChannel, kNumBoxes, [](std::uint64_t) {}).num_boxes == kNumBoxes;
  } else {
    run_landing(subject, kChildChannel, kEndless, [](std::uint64_t count) {
      if (count == 100) ::raise(SIGKILL);
    });
  }
  ::_exit(good ? 0 : 1);
}

}  // namespace kvpush::conformance
