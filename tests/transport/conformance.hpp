// One suite for every transport. To put a transport under it, write tests/transport/test_<name>.cpp:
//
//   #include "conformance.hpp"
//   #include "transport/<name>/<name>_transport.hpp"
//
//   namespace {
//   kvpush::conformance::Subject name() {
//     kvpush::conformance::Subject subject;
//     subject.label = "name";                       // the same word as below
//     subject.make = [](const kvpush::Incarnation& self) -> std::unique_ptr<kvpush::Transport> {
//       auto made = kvpush::make_name_transport(self, 1'000'000);   // or SKIP("no library here")
//       return made.ok() ? std::move(made).value() : nullptr;
//     };
//     subject.detects_death = false;                // what it does not promise; see Subject
//     return subject;
//   }
//   KVPUSH_TRANSPORT_CONFORMANCE(name)
//   }  // namespace
//
// Nothing is assumed beyond transport.hpp: no order, no mapped slots, no wait_fd. Peers run in the same
// thread, in threads, and in processes (the test program starts itself again with <label>_child_entry).
// Sizes of zero are not posted: no box is empty.
#pragma once

#include "check.hpp"
#include "harness.hpp"

namespace kvpush::conformance {

void set_up(const Subject& subject);
void message_sizes(const Subject& subject);
void post_sizes(const Subject& subject);
void one_completion(const Subject& subject);
void message_back_pressure(const Subject& subject);
void notice_back_pressure(const Subject& subject);
void many_sessions(const Subject& subject);
void many_peers(const Subject& subject);
void close_with_outstanding_posts(const Subject& subject);
void closed_by_landing(const Subject& subject);
void closed_by_source(const Subject& subject);
void closed_inside_poll(const Subject& subject);
void never_connected(const Subject& subject);
void wrong_descriptions(const Subject& subject);
void unknown_sessions(const Subject& subject);
void wake_up(const Subject& subject);
void thread_source(const Subject& subject);
void process_source(const Subject& subject);
void process_landing(const Subject& subject);
void killed_source(const Subject& subject);
void killed_landing(const Subject& subject);
void child_entry(const Subject& subject);

}  // namespace kvpush::conformance

#define KVPUSH_CONFORMANCE_TEST(subject, body) \
  TEST(subject##_##body) {                     \
    ::kvpush::conformance::body(subject());    \
  }

/// Registers the whole suite for the function `subject`, which returns a Subject.
#define KVPUSH_TRANSPORT_CONFORMANCE(subject)                    \
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
  KVPUSH_CONFORMANCE_TEST(subject, wake_up)                      \
  KVPUSH_CONFORMANCE_TEST(subject, thread_source)                \
  KVPUSH_CONFORMANCE_TEST(subject, process_source)               \
  KVPUSH_CONFORMANCE_TEST(subject, process_landing)              \
  KVPUSH_CONFORMANCE_TEST(subject, killed_source)                \
  KVPUSH_CONFORMANCE_TEST(subject, killed_landing)               \
  KVPUSH_CONFORMANCE_TEST(subject, child_entry)
