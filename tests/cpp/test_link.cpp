// Order, duplicates, loss and silence of one session's messages.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "protocol/link.hpp"

using namespace kvpush;
using namespace kvpush::protocol;

namespace {

constexpr TimeUs kPeer = 10'000;

Incarnation incarnation(std::uint8_t fill) {
  Incarnation id;
  id.bytes.fill(fill);
  return id;
}

/// Two ends; what one seals, the other takes.
struct Pair {
  Link a{incarnation(1), incarnation(2), kPeer, 0};
  Link b{incarnation(2), incarnation(1), kPeer, 0};
  std::vector<Body> got;

  bool take(const Bytes& bytes, TimeUs now = 0) { return b.take_message(bytes, now, got).ok(); }
  /// The transfer ids of the DONEs that came, in order.
  [[nodiscard]] std::vector<TransferId> ids() const {
    std::vector<TransferId> ids;
    for (const Body& body : got) ids.push_back(std::get<Done>(body).transfer);
    return ids;
  }
};

BoxNotice box(TransferId id) {
  return {id, 0, {0, 0, 1, 0, 1, 0, 1}, 0};
}

/// 1 new, 0 dropped, -1 refused.
int take_box(Link& link, const Bytes& bytes, TimeUs now = 0) {
  const auto got = link.take_notice(bytes, now);
  if (!got.ok()) return -1;
  return got.value() ? 1 : 0;
}

}  // namespace

TEST(order_is_restored_and_duplicates_are_dropped) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    Pair pair;
    constexpr std::size_t kNum = 20;
    std::vector<Bytes> sent;
    for (std::size_t i = 0; i < kNum; ++i) sent.push_back(pair.a.seal(Done{i}));
    for (std::size_t i = 0; i < kNum / 2; ++i) sent.push_back(sent[random() % kNum]);
    std::shuffle(sent.begin(), sent.end(), random);
    for (const Bytes& bytes : sent) CHECK(pair.take(bytes));
    std::vector<TransferId> want(kNum);
    std::iota(want.begin(), want.end(), TransferId{0});
    CHECK(pair.ids() == want);
  }
}

TEST(nothing_passes_a_missing_message) {
  Pair pair;
  const Bytes first = pair.a.seal(Done{0});
  const Bytes second = pair.a.seal(Done{1});
  CHECK(pair.take(second));
  CHECK(pair.got.empty());
  CHECK(pair.take(first));
  CHECK(pair.ids() == (std::vector<TransferId>{0, 1}));
}

TEST(boxes_come_once_in_any_order) {
  Pair pair;
  std::vector<Bytes> sent;
  for (TransferId i = 0; i < 5; ++i) sent.push_back(pair.a.seal(box(i)));
  for (const std::size_t i : {3U, 0U, 4U, 1U, 2U}) CHECK_EQ(take_box(pair.b, sent[i]), 1);
  for (const Bytes& bytes : sent) CHECK_EQ(take_box(pair.b, bytes), 0);
  CHECK_EQ(take_box(pair.b, pair.a.seal(box(9))), 1);
}

TEST(a_gap_shown_by_ping_is_lost_after_peer_timeout) {
  for (const bool lose_box : {false, true}) {
    Pair pair;
    if (lose_box) {
      (void)pair.a.seal(box(1));
      pair.a.box_completed();
    } else {
      (void)pair.a.seal(Done{1});
    }
    TimeUs now = 0;
    for (; now < 5 * kPeer; now += kPeer / 10) {
      if (now >= 3 * kPeer) CHECK(pair.take(pair.a.seal(Ping{}), now));
      if (pair.b.check(now)) break;
      if (now < 3 * kPeer) pair.b.restart_clocks(now);  // silent, but not what is asked here
    }
    CHECK_EQ(now, 4 * kPeer);
    const auto why = pair.b.check(now);
    CHECK(why && why->find("lost on the way") != std::string::npos);
  }
}

TEST(a_message_lost_without_a_ping_is_no_gap) {
  Pair pair;
  (void)pair.a.seal(Done{0});
  CHECK(pair.take(pair.a.seal(Done{1}), kPeer - 1));
  CHECK(!pair.b.check(2 * kPeer - 2));
}

TEST(a_box_that_has_not_completed_is_no_gap) {
  Pair pair;
  (void)pair.a.seal(box(1));
  for (TimeUs now = 0; now < 5 * kPeer; now += kPeer / 10) {
    CHECK(pair.take(pair.a.seal(Ping{}), now));
    CHECK(!pair.b.check(now));
  }
}

TEST(a_gap_that_closes_is_forgotten) {
  Pair pair;
  const Bytes first = pair.a.seal(Done{0});
  CHECK(pair.take(pair.a.seal(Ping{}), 0));
  const Bytes second = pair.a.seal(Done{1});
  CHECK(pair.take(pair.a.seal(Ping{}), kPeer - 10));
  CHECK(pair.take(first, kPeer - 5));  // closes the first gap; the second one counts from here
  CHECK(!pair.b.check(kPeer));
  CHECK(pair.take(pair.a.seal(Ping{}), 2 * kPeer - 6));
  CHECK(!pair.b.check(2 * kPeer - 6));
  CHECK(pair.b.check(2 * kPeer - 5).has_value());
  CHECK(pair.take(second, 2 * kPeer - 5));
  CHECK(!pair.b.check(2 * kPeer - 5));
}

TEST(a_stale_ping_opens_nothing) {
  Pair pair;
  const Bytes early = pair.a.seal(Ping{});
  const Bytes first = pair.a.seal(Done{0});
  const Bytes late = pair.a.seal(Ping{});
  CHECK(pair.take(first, 1));
  CHECK(pair.take(late, 2));
  CHECK(pair.take(early, 3));
  CHECK(pair.take(late, 3));
  CHECK(!pair.b.check(kPeer + 2));
  CHECK(pair.got.size() == 1);
}

TEST(silence_is_lost_and_anything_breaks_it) {
  Pair pair;
  CHECK(!pair.b.check(kPeer - 1));
  CHECK(pair.b.check(kPeer).has_value());
  CHECK(pair.take(pair.a.seal(Ping{}), kPeer - 1));
  CHECK(!pair.b.check(2 * kPeer - 2));
  CHECK_EQ(take_box(pair.b, pair.a.seal(box(1)), 2 * kPeer - 2), 1);
  CHECK(!pair.b.check(3 * kPeer - 3));
  const auto why = pair.b.check(3 * kPeer - 2);
  CHECK(why && why->find("silent") != std::string::npos);
}

TEST(restarted_clocks_count_from_now) {
  Pair pair;
  (void)pair.a.seal(Done{0});
  CHECK(pair.take(pair.a.seal(Ping{}), 0));
  CHECK(pair.b.check(10 * kPeer).has_value());
  pair.b.restart_clocks(10 * kPeer);
  CHECK(!pair.b.check(11 * kPeer - 1));
  CHECK(pair.b.check(11 * kPeer).has_value());
}

TEST(other_incarnations_are_dropped) {
  Pair pair;
  Link stranger(incarnation(3), incarnation(2), kPeer, 0);
  CHECK(pair.take(stranger.seal(Done{7}), kPeer - 1));
  CHECK_EQ(take_box(pair.b, stranger.seal(box(1)), kPeer - 1), 0);
  CHECK(pair.got.empty());
  CHECK(pair.b.check(kPeer).has_value());  // and do not count as signs of life
}

TEST(what_comes_the_wrong_way_or_damaged_is_a_breach) {
  Pair pair;
  CHECK(!pair.take(pair.a.seal(box(1))));
  CHECK_EQ(take_box(pair.b, pair.a.seal(Done{1})), -1);
  CHECK_EQ(take_box(pair.b, pair.a.seal(Ping{})), -1);
  CHECK_EQ(take_box(pair.b, Bytes(5)), -1);
  Bytes damaged = pair.a.seal(Done{1});
  damaged.back() ^= std::byte{1};
  CHECK(!pair.take(damaged));
}

TEST(pings_are_due_ten_times_per_peer_timeout) {
  Link link(incarnation(1), incarnation(2), kPeer, 0);
  int num_pings = 0;
  for (TimeUs now = 0; now < kPeer; now += 100) {
    if (link.ping_due(now)) ++num_pings;
    CHECK(link.next_deadline() > now);
  }
  CHECK_EQ(num_pings, 10);
  CHECK_EQ(link.next_deadline(), kPeer);
}

TEST(a_ping_that_was_refused_is_due_again_soon) {
  Link link(incarnation(1), incarnation(2), kPeer, 0);
  CHECK(link.ping_due(0));
  link.ping_refused(0);
  CHECK_EQ(link.next_deadline(), kPeer / 100);
  CHECK(!link.ping_due(kPeer / 100 - 1));
  CHECK(link.ping_due(kPeer / 100));
  CHECK(!link.ping_due(kPeer / 100 + kPeer / 10 - 1));
}
