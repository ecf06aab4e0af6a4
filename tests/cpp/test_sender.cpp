// P's machine as tables: pairing, claims, packing and its end. Timeouts and sessions: test_sender_ends.cpp.
#include "check.hpp"
#include "sender_script.hpp"

using namespace kvpush;
using script::SenderTable;

namespace {

void table(const char* title, std::initializer_list<script::Row> rows, std::size_t num_groups = 1) {
  SenderTable machine(num_groups);
  script::run(title, machine, rows);
}

}  // namespace

TEST(one_push_and_one_open) {
  table("intent, open, push", {{"A intent 1 k", ""},
                               {"A open 1 k 0-4", ""},
                               {"push 1 k", "A:ACCEPT(1)"},
                               {"A pack", "none"},
                               {"advance 1 4", ""},
                               {"A drain", "2 boxes"},
                               {"finish 1", "A:END(1,2,8) sent(1)"},
                               {"A done 1", ""},
                               {"A done 1", ""}});
  table("open before push", {{"A open 1 k 0-2", ""}, {"push 1 k", "A:ACCEPT(1)"}});
  table("push before open", {{"push 1 k", ""}, {"A open 1 k 0-2", "A:ACCEPT(1)"}});
  table("finished push before open", {{"push 1 k", ""},
                                      {"advance 1 3", ""},
                                      {"finish 1", ""},
                                      {"A intent 1 k", ""},
                                      {"A open 1 k 1-3", "A:ACCEPT(1)"},
                                      {"A pack", "1 0-2 1-3"},
                                      {"A packed", "post A:END(1,1,4) sent(1)"}});
  table("finish while packing", {{"push 1 k", ""},
                                 {"A open 1 k 0-3", "A:ACCEPT(1)"},
                                 {"advance 1 3", ""},
                                 {"A pack", "1 0-2 0-2"},
                                 {"A pack", "1 0-2 2-3"},
                                 {"finish 1", ""},
                                 {"A packed", "post"},
                                 {"A packed", "post A:END(1,2,6) sent(1)"}});
  table("nothing wanted",
        {{"A open 1 k .", ""}, {"push 1 k", "A:ACCEPT(1)"}, {"finish 1", "A:END(1,0,0) sent(1)"}});
  table("only the wanted positions", {{"push 1 k", ""},
                                      {"A open 1 k 1-2,5-7", "A:ACCEPT(1)"},
                                      {"advance 1 1", ""},
                                      {"A pack", "none"},
                                      {"advance 1 9", ""},
                                      {"A pack", "1 0-2 1-2"},
                                      {"A pack", "1 0-2 5-7"},
                                      {"A pack", "none"}});
}

TEST(groups) {
  table("each group has its own wants",
        {{"push 1 k", ""},
         {"A open 1 k 0-1|.|2-4", "A:ACCEPT(1)"},
         {"advance 1 1||2", ""},
         {"A pack", "1 g0 0-2 0-1"},
         {"A pack", "none"},
         {"advance 1 1|3|2", ""},
         {"A pack", "1 g2 0-2 2-4"},
         {"A packed", "post"},
         {"finish 1", ""},
         {"A packed", "post A:END(1,2,6) sent(1)"}},
        3);
  table("a wrong number of groups", {{"A open 1 k 0-1", "A:breach"}}, 2);
}

TEST(digests_and_taken) {
  table("mismatch fails the claim and leaves the push", {{"push 1 k good", ""},
                                                         {"A open 1 k 0-1 bad", "A:FAIL(1,digest_mismatch)"},
                                                         {"A cancel 1", ""},
                                                         {"A open 2 k 0-1 good", "A:ACCEPT(2)"}});
  table("mismatch of a waiting claim", {{"A open 1 k 0-1 bad", ""},
                                        {"B open 2 k 0-1 good", ""},
                                        {"push 1 k good", "A:FAIL(1,digest_mismatch) B:ACCEPT(2)"}});
  table("an empty digest", {{"A open 1 k 0-1 none", "A:breach"}});
  table("one push serves one open", {{"push 1 k", ""},
                                     {"A open 1 k 0-1", "A:ACCEPT(1)"},
                                     {"B open 1 k 0-1", "B:FAIL(1,taken)"},
                                     {"advance 1 1", ""},
                                     {"A drain", "1 boxes"},
                                     {"finish 1", "A:END(1,1,2) sent(1)"}});
  table("two opens wait",
        {{"A open 1 k 0-1", ""}, {"B open 1 k 0-1", ""}, {"push 1 k", "A:ACCEPT(1) B:FAIL(1,taken)"}});
}

TEST(wanted_positions_that_p_lacks) {
  table("missing at finish", {{"push 1 k", ""},
                              {"A open 1 k 0-3", "A:ACCEPT(1)"},
                              {"advance 1 2", ""},
                              {"A drain", "1 boxes"},
                              {"finish 1", "A:FAIL(1,missing) failed(1,missing)"},
                              {"A cancel 1", ""}});
  table("missing while packing", {{"push 1 k", ""},
                                  {"A open 1 k 0-5", "A:ACCEPT(1)"},
                                  {"advance 1 4", ""},
                                  {"A pack", "1 0-2 0-2"},
                                  {"finish 1", ""},
                                  {"A packed", "post"},
                                  {"A pack", "1 0-2 2-4"},
                                  {"A packed", "post A:FAIL(1,missing) failed(1,missing)"}});
  table("missing when opened late", {{"push 1 k", ""},
                                     {"advance 1 2", ""},
                                     {"finish 1", ""},
                                     {"A open 1 k 2-3", "A:ACCEPT(1) A:FAIL(1,missing) failed(1,missing)"}});
  table("missing, another claim waits", {{"push 1 k", ""},
                                         {"B intent 1 k", ""},
                                         {"advance 1 2", ""},
                                         {"finish 1", ""},
                                         {"A open 1 k 2-3", "A:ACCEPT(1) A:FAIL(1,missing)"},
                                         {"B open 1 k 0-2", "B:ACCEPT(1)"},
                                         {"B drain", "1 boxes B:END(1,1,4) sent(1)"}});
  table("a wanted hole", {{"push 1 k", ""},
                          {"A open 1 k 0-4", "A:ACCEPT(1)"},
                          {"advance 1 3-2", ""},
                          {"A pack", "1 0-2 0-2"},
                          {"A packed", "post"},
                          {"A pack", "1 0-2 2-3"},
                          {"A packed", "post A:FAIL(1,missing) failed(1,missing)"}});
  table("a wanted hole with packs running", {{"push 1 k", ""},
                                             {"A open 1 k 0-2", "A:ACCEPT(1)"},
                                             {"advance 1 1-", ""},
                                             {"A pack", "1 0-2 0-1"},
                                             {"advance 1 3", "A:FAIL(1,missing)"},
                                             {"A packed", "drop failed(1,missing)"}});
  table("a hole that nobody wants", {{"push 1 k", ""},
                                     {"A open 1 k 0-1,2-3", "A:ACCEPT(1)"},
                                     {"advance 1 1-1", ""},
                                     {"A drain", "2 boxes"},
                                     {"finish 1", "A:END(1,2,4) sent(1)"}});
}

TEST(cancel_in_every_state) {
  table("waiting for the push", {{"A open 1 k 0-1", ""},
                                 {"A cancel 1", ""},
                                 {"push 1 k", "failed(1,cancelled)"},
                                 {"A open 2 k 0-1", "A:FAIL(2,cancelled)"}});
  table("intent before the push",
        {{"A intent 1 k", ""}, {"A cancel 1", ""}, {"push 1 k", "failed(1,cancelled)"}});
  table("a later claim revives the key", {{"A intent 1 k", ""},
                                          {"A cancel 1", ""},
                                          {"B intent 1 k", ""},
                                          {"push 1 k", ""},
                                          {"B open 1 k 0-1", "B:ACCEPT(1)"}});
  table("the memory of cancelled claims expires",
        {{"A intent 1 k", ""}, {"A cancel 1", ""}, {"wait 100", ""}, {"push 1 k", ""}});
  table("intent with a push",
        {{"push 1 k", ""}, {"A intent 1 k", ""}, {"A cancel 1", "failed(1,cancelled)"}});
  table("one of two claims", {{"push 1 k", ""},
                              {"A intent 1 k", ""},
                              {"B intent 1 k", ""},
                              {"A cancel 1", ""},
                              {"B open 1 k 0-1", "B:ACCEPT(1)"},
                              {"B cancel 1", "failed(1,cancelled)"}});
  table("active, packs running", {{"push 1 k", ""},
                                  {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                  {"advance 1 4", ""},
                                  {"A pack", "1 0-2 0-2"},
                                  {"A pack", "1 0-2 2-4"},
                                  {"A cancel 1", ""},
                                  {"A pack", "none"},
                                  {"A packed", "drop"},
                                  {"A packed", "drop failed(1,cancelled)"}});
  table("active, another claim waits", {{"push 1 k", ""},
                                        {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                        {"B intent 1 k", ""},
                                        {"advance 1 4", ""},
                                        {"A pack", "1 0-2 0-2"},
                                        {"A cancel 1", ""},
                                        {"B open 1 k 0-4", "B:ACCEPT(1)"},
                                        {"A packed", "drop"},
                                        {"B drain", "2 boxes"},
                                        {"finish 1", "B:END(1,2,8) sent(1)"}});
  table("after END", {{"push 1 k", ""},
                      {"A open 1 k 0-1", "A:ACCEPT(1)"},
                      {"advance 1 1", ""},
                      {"A drain", "1 boxes"},
                      {"finish 1", "A:END(1,1,2) sent(1)"},
                      {"A cancel 1", ""},
                      {"push 2 k", ""}});
  table("never issued", {{"A cancel 1", "A:breach"}});
  table("of the other session", {{"A intent 1 k", ""}, {"B cancel 1", "B:breach"}});
}

TEST(breaches) {
  table("DONE before END", {{"push 1 k", ""}, {"A open 1 k 0-1", "A:ACCEPT(1)"}, {"A done 1", "A:breach"}});
  table("DONE before pairing", {{"A open 1 k 0-1", ""}, {"A done 1", "A:breach"}});
  table("DONE of nothing", {{"A intent 3 k", ""}, {"A done 4", "A:breach"}});
  table("ended ids are dropped",
        {{"A intent 3 k", ""}, {"A cancel 3", ""}, {"A done 3", ""}, {"A done 2", ""}});
  table("two INTENTs", {{"A intent 1 k", ""}, {"A intent 1 k", "A:breach"}});
  table("two OPENs", {{"A open 1 k 0-1", ""}, {"A open 1 k 0-1", "A:breach"}});
  table("OPEN of another key", {{"A intent 1 k", ""}, {"A open 1 other 0-1", "A:breach"}});
  table("an ended id again",
        {{"A open 2 k 0-1", ""}, {"A cancel 2", ""}, {"A open 2 k 0-1", ""}, {"A open 1 k 0-1", ""}});
  for (const char* wanted : {"A open 1 k 0-0", "A open 1 k 2-1", "A open 1 k 0-2,1-3", "A open 1 k 0-2,2-3",
                             "A open 1 k 4-5,0-1", "A open 1 k 0-4000000000"}) {
    table("malformed wants", {{wanted, "A:breach"}});
  }
}

TEST(retract_and_resume) {
  table("running packs are waited for", {{"push 1 k", ""},
                                         {"A open 1 k 0-6", "A:ACCEPT(1)"},
                                         {"advance 1 5", ""},
                                         {"A pack", "1 0-2 0-2"},
                                         {"fence 1", ""},
                                         {"quiet 1", "no"},
                                         {"A pack", "none"},
                                         {"A packed", "post"},
                                         {"quiet 1", "yes"},
                                         {"A pack", "none"},
                                         {"resume 1", "at 2"},
                                         {"A pack", "none"},
                                         {"advance 1 4", ""},
                                         {"A drain", "2 boxes"},
                                         {"finish 1", "A:END(1,3,12) sent(1)"}});
  table("before any claim", {{"push 1 k", ""},
                             {"advance 1 3", ""},
                             {"fence 1", ""},
                             {"quiet 1", "yes"},
                             {"resume 1", "at 0"},
                             {"A open 1 k 0-2", "A:ACCEPT(1)"},
                             {"A pack", "none"},
                             {"advance 1 2", ""},
                             {"A pack", "1 0-2 0-2"}});
  table("what was packed is never sent to another",
        {{"push 1 k", ""},
         {"A open 1 k 0-4", "A:ACCEPT(1)"},
         {"B intent 1 k", ""},
         {"advance 1 3", ""},
         {"A pack", "1 0-2 0-2"},
         {"A packed", "post"},
         {"fence 1", ""},
         {"resume 1", "at 2"},
         {"A cancel 1", ""},
         {"B open 1 k 1-4", "B:ACCEPT(1) B:FAIL(1,missing) failed(1,missing)"}});
  table("but what comes later is", {{"push 1 k", ""},
                                    {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                    {"B intent 1 k", ""},
                                    {"advance 1 3", ""},
                                    {"A pack", "1 0-2 0-2"},
                                    {"A packed", "post"},
                                    {"fence 1", ""},
                                    {"resume 1", "at 2"},
                                    {"A cancel 1", ""},
                                    {"advance 1 2", ""},
                                    {"B open 1 k 2-4", "B:ACCEPT(1)"},
                                    {"B drain", "1 boxes"},
                                    {"finish 1", "B:END(1,1,4) sent(1)"}});
  table("a finished push goes on", {{"push 1 k", ""},
                                    {"advance 1 3", ""},
                                    {"finish 1", ""},
                                    {"fence 1", ""},
                                    {"resume 1", "at 0"},
                                    {"wait 50", ""},
                                    {"advance 1 3", ""},
                                    {"finish 1", ""},
                                    {"wait 10", "failed(1,unclaimed)"}});
  table("not more than was ready", {{"push 1 k", ""},
                                    {"A open 1 k 5-6", "A:ACCEPT(1)"},
                                    {"advance 1 3", ""},
                                    {"fence 1", ""},
                                    {"resume 1", "at 3"},
                                    {"advance 1 3", ""},
                                    {"A pack", "1 0-2 5-6"}});
  table("each group by itself",
        {{"push 1 k", ""},
         {"A open 1 k 0-4|0-2", "A:ACCEPT(1)"},
         {"advance 1 3|2", ""},
         {"A pack", "1 g0 0-2 0-2"},
         {"A packed", "post"},
         {"fence 1", ""},
         {"resume 1", "at 2|0"}},
        2);
  table("an ended push", {{"push 1 k", ""},
                          {"abort 1", "failed(1,aborted)"},
                          {"fence 1", ""},
                          {"quiet 1", "yes"},
                          {"resume 1", "at 0"}});
}

TEST(a_stripe_cut_by_retract_is_completed) {
  // Seven planes, two units to a box: a position takes four boxes.
  Cache cache;
  const Plane plane{nullptr, 10, 1, 1, 64, 64, 0, 0, "p", 0};
  cache.groups = {Group{16, std::vector<Plane>(7, plane)}};
  protocol::Sender sender(cache, {});
  protocol::Actions out;
  const SessionId a = script::session('A');
  sender.open_session(a, 2 * 64);
  sender.push(1, "k", Bytes(1), 0, out);
  sender.on_message(a, protocol::Open{1, "k", Bytes(1), {{{0, 1}}}}, 0, out);
  sender.advance(1, {{4}}, 0, out);
  std::vector<std::int32_t> used;
  std::uint64_t num_units = 0;
  const auto draw = [&] {
    const auto task = sender.next_box(a);
    if (!task) return false;
    used.push_back(task->block_ids[0]);
    num_units += task->box.num_units();
    return sender.packed(a, *task, {}, 0, out);
  };
  CHECK(draw());
  sender.fence(1);
  CHECK(!draw());
  CHECK_EQ(sender.resume(1)[0], 0U);
  sender.advance(1, {{8}}, 0, out);
  while (draw()) continue;
  sender.finish(1, 0, out);
  CHECK(used == (std::vector<std::int32_t>{4, 8, 8, 8}));
  CHECK_EQ(num_units, 7U);
  CHECK_EQ(out.events.size(), 1U);
}
