// What a call is judged by on the caller's own thread.
#include "check.hpp"
#include "engine/registry.hpp"

using namespace kvpush;

namespace {

Cache two_groups() {
  Cache cache;
  const Plane plane{nullptr, 10, 1, 1, 8, 8, 0, 0, "p", 0};
  Plane small = plane;
  small.num_blocks = 4;
  cache.groups = {Group{16, {plane}}, Group{16, {small}}};
  return cache;
}

protocol::Destination to(std::vector<std::vector<std::int32_t>> blocks) {
  std::vector<std::uint32_t> first(blocks.size(), 0);
  return {std::move(blocks), std::move(first)};
}

void refused(const Status& status, Code code, const char* text) {
  CHECK_EQ(status.code(), code);
  if (status.message().find(text) == std::string::npos) check::fail(__FILE__, __LINE__, status.message());
}

}  // namespace

TEST(one_open_push_per_key) {
  const Cache cache = two_groups();
  Registry registry(cache, 10);
  CHECK(registry.add_push(1, "k").ok());
  refused(registry.add_push(2, "k"), Code::kDuplicateKey, "'k'");
  CHECK(registry.add_push(3, "l").ok());
  registry.remove(2);
  refused(registry.add_push(4, "k"), Code::kDuplicateKey, "'k'");
  registry.remove(1);
  CHECK(registry.add_push(5, "k").ok());
  CHECK_EQ(registry.num_open(), 2U);
}

TEST(room_counts_pushes_and_receives) {
  const Cache cache = two_groups();
  Registry registry(cache, 2);
  CHECK(registry.add_push(1, "k").ok());
  CHECK(registry.add_receive(2, to({{1}, {}})).ok());
  refused(registry.add_push(3, "l"), Code::kQueueFull, "max_open_transfers (2)");
  refused(registry.add_receive(3, to({{2}, {}})), Code::kQueueFull, "max_open_transfers (2)");
  registry.remove(2);
  registry.remove(2);
  CHECK(registry.add_receive(3, to({{1}, {}})).ok());
}

TEST(claims_and_sessions) {
  const Cache cache = two_groups();
  Registry registry(cache, 1);
  CHECK(registry.add_claim(5).ok());
  refused(registry.add_claim(6), Code::kQueueFull, "max_open_transfers (1)");
  CHECK(!registry.remove_claim(6));
  CHECK(registry.remove_claim(5) && !registry.remove_claim(5));
  CHECK(registry.add_claim(6).ok());
  const SessionId session;
  refused(registry.check_session(session), Code::kPeerLost, "no open session");
  registry.add_session(session);
  CHECK(registry.check_session(session).ok());
  registry.remove_session(session);
  CHECK(!registry.check_session(session).ok());
}

TEST(block_ids) {
  const Cache cache = two_groups();
  const Registry registry(cache, 2);
  CHECK(registry.check_ids({{0, 9, -1, 9}, {3}}).ok());
  CHECK(registry.check_ids({{}, {}}).ok());
  refused(registry.check_ids({{10}, {}}), Code::kInvalidArgument, "block 10 of group 0 is outside [0, 10)");
  refused(registry.check_ids({{}, {4}}), Code::kInvalidArgument, "block 4 of group 1 is outside [0, 4)");
  refused(registry.check_ids({{-2}, {}}), Code::kInvalidArgument, "block -2");
  refused(registry.check_ids({{1}}), Code::kInvalidArgument, "blocks of 1 groups, the cache has 2");
  refused(registry.check_ids({{}, {}, {}}), Code::kInvalidArgument, "blocks of 3 groups");
}

TEST(destinations_have_one_owner) {
  const Cache cache = two_groups();
  Registry registry(cache, 10);
  CHECK(registry.add_receive(1, to({{1, 2, -1, -1}, {1}})).ok());
  refused(registry.add_receive(2, to({{5, 2}, {}})), Code::kInvalidArgument,
          "block 2 of group 0 belongs to another");
  refused(registry.add_receive(2, to({{5, 6, 5}, {}})), Code::kInvalidArgument,
          "block 5 of group 0 is given twice");
  refused(registry.add_receive(2, to({{5}, {1}})), Code::kInvalidArgument, "block 1 of group 1 belongs");
  CHECK(registry.add_receive(2, to({{5, 6}, {2}})).ok());  // what was refused owns nothing
  registry.remove(1);
  CHECK(registry.add_receive(3, to({{1, 2}, {1}})).ok());
  refused(registry.add_receive(4, to({{11}, {}})), Code::kInvalidArgument, "outside");
  CHECK_EQ(registry.num_open(), 2U);
}
