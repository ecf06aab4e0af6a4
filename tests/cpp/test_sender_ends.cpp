// P's machine as tables: aborts, tombstones, timeouts, eviction, lost sessions, fairness.
#include "check.hpp"
#include "sender_script.hpp"

using namespace kvpush;
using script::SenderTable;

namespace {

void table(const char* title, std::initializer_list<script::Row> rows) {
  SenderTable machine;
  script::run(title, machine, rows);
}

}  // namespace

TEST(abort_in_every_state) {
  table("alone", {{"push 1 k", ""},
                  {"abort 1", "failed(1,aborted)"},
                  {"abort 1", ""},
                  {"advance 1 1", ""},
                  {"finish 1", ""}});
  table("claimed",
        {{"push 1 k", ""}, {"A intent 1 k", ""}, {"abort 1", "A:FAIL(1,aborted) failed(1,aborted)"}});
  table("packs running", {{"push 1 k", ""},
                          {"A open 1 k 0-4", "A:ACCEPT(1)"},
                          {"advance 1 4", ""},
                          {"A pack", "1 0-2 0-2"},
                          {"A pack", "1 0-2 2-4"},
                          {"abort 1", "A:FAIL(1,aborted)"},
                          {"finish 1", ""},
                          {"A packed", "drop"},
                          {"A packed error", "drop failed(1,aborted)"}});
  table("after sent", {{"push 1 k", ""},
                       {"A open 1 k 0-1", "A:ACCEPT(1)"},
                       {"advance 1 1", ""},
                       {"A drain", "1 boxes"},
                       {"finish 1", "A:END(1,1,2) sent(1)"},
                       {"abort 1", ""}});
}

TEST(tombstones) {
  table("answer claims at once", {{"push 1 k", ""},
                                  {"abort 1", "failed(1,aborted)"},
                                  {"A intent 1 k", "A:FAIL(1,aborted)"},
                                  {"A open 2 k 0-1", "A:FAIL(2,aborted)"},
                                  {"A cancel 2", ""}});
  table("a new push replaces them", {{"push 1 k", ""},
                                     {"abort 1", "failed(1,aborted)"},
                                     {"push 2 k", ""},
                                     {"A open 1 k 0-1", "A:ACCEPT(1)"},
                                     {"wait 100", ""}});
  table("last for pairing_timeout", {{"push 1 k", ""},
                                     {"abort 1", "failed(1,aborted)"},
                                     {"wait 99", ""},
                                     {"A open 1 k 0-1", "A:FAIL(1,aborted)"},
                                     {"wait 1", ""},
                                     {"A open 2 k 0-1", ""},
                                     {"push 2 k", "A:ACCEPT(2)"}});
  table("none after sent", {{"push 1 k", ""},
                            {"A open 1 k .", "A:ACCEPT(1)"},
                            {"finish 1", "A:END(1,0,0) sent(1)"},
                            {"B open 1 k 0-1", ""}});
}

TEST(a_failed_pack_fails_the_push) {
  table("at once", {{"push 1 k", ""},
                    {"A open 1 k 0-2", "A:ACCEPT(1)"},
                    {"advance 1 2", ""},
                    {"A pack", "1 0-2 0-2"},
                    {"A packed error", "drop A:FAIL(1,pack) failed(1,pack)"}});
  table("with another running", {{"push 1 k", ""},
                                 {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                 {"advance 1 4", ""},
                                 {"A pack", "1 0-2 0-2"},
                                 {"A pack", "1 0-2 2-4"},
                                 {"A packed error", "drop A:FAIL(1,pack)"},
                                 {"A packed", "drop failed(1,pack)"}});
}

TEST(timeouts) {
  table("unclaimed", {{"push 1 k", ""},
                      {"wait 5000", ""},
                      {"finish 1", ""},
                      {"wait 9", ""},
                      {"wait 1", "failed(1,unclaimed)"},
                      {"A open 1 k 0-1", "A:FAIL(1,unclaimed)"}});
  table("claimed, never opened", {{"push 1 k", ""},
                                  {"A intent 1 k", ""},
                                  {"finish 1", ""},
                                  {"wait 999", ""},
                                  {"wait 1", "A:FAIL(1,claim_expired) failed(1,claim_expired)"}});
  table("a claim in time", {{"push 1 k", ""},
                            {"finish 1", ""},
                            {"wait 9", ""},
                            {"A intent 1 k", ""},
                            {"wait 990", ""},
                            {"wait 1", "A:FAIL(1,claim_expired) failed(1,claim_expired)"}});
  table("none once paired, as long as more may come",
        {{"push 1 k", ""}, {"A open 1 k 0-1", "A:ACCEPT(1)"}, {"advance 1 1", ""}, {"wait 100000", ""}});
  table("D makes no room for a finished push", {{"push 1 k", ""},
                                                {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                                {"advance 1 4", ""},
                                                {"finish 1", ""},
                                                {"wait 499", ""},
                                                {"A pack", "1 0-2 0-2"},
                                                {"A packed", "post"},
                                                {"wait 499", ""},
                                                {"wait 1",
                                                 "A:FAIL(1,progress_timeout) "
                                                 "failed(1,progress_timeout)"}});
  table("another claim is no room", {{"push 1 k", ""},
                                     {"A open 1 k 0-1", "A:ACCEPT(1)"},
                                     {"advance 1 1", ""},
                                     {"finish 1", ""},
                                     {"wait 499", ""},
                                     {"B intent 1 k", ""},
                                     {"wait 1",
                                      "A:FAIL(1,progress_timeout) B:FAIL(1,progress_timeout) "
                                      "failed(1,progress_timeout)"}});
  table("nor for one that was finished before", {{"push 1 k", ""},
                                                 {"advance 1 1", ""},
                                                 {"finish 1", ""},
                                                 {"A open 1 k 0-1", "A:ACCEPT(1)"},
                                                 {"wait 499", ""},
                                                 {"wait 1",
                                                  "A:FAIL(1,progress_timeout) "
                                                  "failed(1,progress_timeout)"}});
  table("boxes of others in its session are progress too", {{"push 1 k", ""},
                                                            {"push 2 l", ""},
                                                            {"A open 1 k 0-4", "A:ACCEPT(1)"},
                                                            {"A open 2 l 0-4", "A:ACCEPT(2)"},
                                                            {"advance 1 4", ""},
                                                            {"finish 1", ""},
                                                            {"advance 2 4", ""},
                                                            {"finish 2", ""},
                                                            {"wait 499", ""},
                                                            {"A pack", "1 0-2 0-2"},
                                                            {"A packed", "post"},
                                                            {"wait 499", ""},
                                                            {"wait 1",
                                                             "A:FAIL(1,progress_timeout) "
                                                             "A:FAIL(2,progress_timeout) "
                                                             "failed(1,progress_timeout) "
                                                             "failed(2,progress_timeout)"}});
  table("a mismatch leaves it unclaimed", {{"push 1 k good", ""},
                                           {"finish 1", ""},
                                           {"A open 1 k 0-1 bad", "A:FAIL(1,digest_mismatch)"},
                                           {"wait 9", ""},
                                           {"wait 1", "failed(1,unclaimed)"}});
  table("the active claim goes, another waits",
        {{"push 1 k", ""},
         {"A open 1 k 0-1", "A:ACCEPT(1)"},
         {"B intent 1 k", ""},
         {"finish 1", "A:FAIL(1,missing)"},
         {"wait 999", ""},
         {"wait 1", "B:FAIL(1,claim_expired) failed(1,claim_expired)"}});
}

TEST(eviction) {
  table("longest finished first, only finished and not opened",
        {{"push 1 a", ""},
         {"push 2 b", ""},
         {"push 3 c", ""},
         {"push 4 d", ""},
         {"A intent 1 b", ""},
         {"A open 2 d 0-1", "A:ACCEPT(2)"},
         {"finish 2", ""},
         {"wait 1", ""},
         {"finish 1", ""},
         {"advance 4 1", ""},
         {"finish 4", ""},
         {"evict 1", "A:FAIL(1,evicted) failed(2,evicted)"},
         {"evict 5", "failed(1,evicted)"},
         {"evict 5", ""},
         {"A drain", "1 boxes A:END(2,1,2) sent(4)"}});
}

TEST(a_session_ends_in_every_state) {
  table("active", {{"push 1 k", ""},
                   {"A open 1 k 0-2", "A:ACCEPT(1)"},
                   {"A lose peer_lost", "failed(1,peer_lost)"},
                   {"B open 1 k 0-1", "B:FAIL(1,peer_lost)"}});
  table("active, packs running", {{"push 1 k", ""},
                                  {"A open 1 k 0-2", "A:ACCEPT(1)"},
                                  {"advance 1 2", ""},
                                  {"A pack", "1 0-2 0-2"},
                                  {"A lose peer_closed", ""},
                                  {"A packed", "drop failed(1,peer_closed)"}});
  table("active, another claim waits", {{"push 1 k", ""},
                                        {"A open 1 k 0-2", "A:ACCEPT(1)"},
                                        {"B intent 1 k", ""},
                                        {"advance 1 2", ""},
                                        {"A lose peer_lost", ""},
                                        {"B open 1 k 0-2", "B:ACCEPT(1)"},
                                        {"B drain", "1 boxes"},
                                        {"finish 1", "B:END(1,1,4) sent(1)"}});
  table("intent only", {{"push 1 k", ""},
                        {"A intent 1 k", ""},
                        {"finish 1", ""},
                        {"A lose peer_lost", ""},
                        {"wait 9", ""},
                        {"wait 1", "failed(1,unclaimed)"}});
  table("waiting, no push", {{"A open 1 k 0-2", ""},
                             {"A lose peer_lost", ""},
                             {"push 1 k", ""},
                             {"B open 1 k 0-2", "B:ACCEPT(1)"}});
  table("after END", {{"push 1 k", ""},
                      {"A open 1 k .", "A:ACCEPT(1)"},
                      {"finish 1", "A:END(1,0,0) sent(1)"},
                      {"A lose peer_lost", ""},
                      {"push 2 k", ""}});
  SenderTable machine;
  script::run("nothing is left", machine,
              {{"A intent 1 a", ""},
               {"A open 2 b 0-1", ""},
               {"push 1 c", ""},
               {"A open 3 c .", "A:ACCEPT(3)"},
               {"finish 1", "A:END(3,0,0) sent(1)"},
               {"A lose engine_closed", ""}});
  CHECK_EQ(machine.sender().num_claims(), 0U);
  CHECK_EQ(machine.sender().num_pushes(), 0U);
  CHECK_EQ(machine.sender().next_deadline(), kNever);
}

TEST(a_new_session_of_a_peer_starts_anew) {
  table("ids", {{"A intent 5 k", ""},
                {"A lose peer_lost", ""},
                {"A join", ""},
                {"A intent 2 k", ""},
                {"push 1 k", ""},
                {"A open 2 k 0-1", "A:ACCEPT(2)"}});
}

TEST(transfers_take_turns) {
  table("eight boxes each", {{"push 1 a", ""},
                             {"push 2 b", ""},
                             {"A open 1 a 0-18", "A:ACCEPT(1)"},
                             {"A open 2 b 0-4", "A:ACCEPT(2)"},
                             {"advance 1 18", ""},
                             {"advance 2 4", ""},
                             {"A pack", "1 0-2 0-2"},
                             {"A pack", "1 0-2 2-4"},
                             {"A pack", "1 0-2 4-6"},
                             {"A pack", "1 0-2 6-8"},
                             {"A pack", "1 0-2 8-10"},
                             {"A pack", "1 0-2 10-12"},
                             {"A pack", "1 0-2 12-14"},
                             {"A pack", "1 0-2 14-16"},
                             {"A pack", "2 0-2 0-2"},
                             {"A pack", "2 0-2 2-4"},
                             {"A pack", "1 0-2 16-18"},
                             {"A pack", "none"}});
  table("oldest ready first", {{"push 1 a", ""},
                               {"push 2 b", ""},
                               {"A open 1 a 0-2", "A:ACCEPT(1)"},
                               {"A open 2 b 0-2", "A:ACCEPT(2)"},
                               {"advance 2 2", ""},
                               {"advance 1 2", ""},
                               {"A pack", "2 0-2 0-2"},
                               {"A pack", "1 0-2 0-2"}});
}
