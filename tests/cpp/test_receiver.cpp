// D's machine as tables.
#include "check.hpp"
#include "receiver_script.hpp"

using namespace kvpush;
using script::ReceiverTable;

namespace {

/// Runs the rows; afterwards no deadline may be left when no transfer is.
void table(const char* title, std::initializer_list<script::Row> rows, std::size_t num_groups = 1) {
  ReceiverTable machine(num_groups);
  script::run(title, machine, rows);
  if (machine.receiver().num_transfers() == 0) CHECK_EQ(machine.receiver().next_deadline(), kNever);
}

}  // namespace

TEST(one_receive) {
  table("with intent", {{"A expect 1 k", "A:INTENT(1)"},
                        {"A receive 1 7 k 2:4", "A:OPEN(1,2-6)"},
                        {"A accept 1", ""},
                        {"A box 1 0 0-2 2-4", "unpack(1,slot 0)"},
                        {"A box 1 2 0-2 4-6", "unpack(1,slot 2)"},
                        {"copied 2", "A:credit(2)"},
                        {"A end 1 2 8", ""},
                        {"copied 0", "A:DONE(1) A:credit(0) received(7)"},
                        {"A end 1 2 8", ""},
                        {"A fail 1 aborted", ""}});
  table("without intent", {{"A receive 1 7 k 0:1", "A:OPEN(1,0-1)"}});
  table("END after the last unpack", {{"A receive 1 7 k 0:1", "A:OPEN(1,0-1)"},
                                      {"A accept 1", ""},
                                      {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                                      {"copied 0", "A:credit(0)"},
                                      {"A end 1 1 2", "A:DONE(1) received(7)"}});
  table("END before the box", {{"A receive 1 7 k 0:1", "A:OPEN(1,0-1)"},
                               {"A end 1 1 2", ""},
                               {"A accept 1", ""},
                               {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                               {"copied 0", "A:DONE(1) A:credit(0) received(7)"}});
  table("a box before ACCEPT", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                                {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                                {"wait 999", ""},
                                {"A accept 1", ""},
                                {"wait 1", "A:CANCEL(1)"},
                                {"copied 0", "A:credit(0) failed(7,progress_timeout)"}});
  table("a slot serves again", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                                {"A box 1 1 0-2 0-1", "unpack(1,slot 1)"},
                                {"copied 1", "A:credit(1)"},
                                {"A box 1 1 0-2 1-2", "unpack(1,slot 1)"},
                                {"copied 1", "A:credit(1)"},
                                {"A end 1 2 4", "A:DONE(1) received(7)"}});
}

TEST(wants) {
  table("holes", {{"A receive 1 7 k 3:2-1--2", "A:OPEN(1,3-5,6-7,9-11)"}});
  table("groups",
        {{"A receive 1 7 k 0:2|4:|1:-1", "A:OPEN(1,0-2|.|2-3)"},
         {"A box 1 0 0-2 2-3 2", "unpack(1,slot 0)"},
         {"A box 1 1 0-1 0-2 0", "unpack(1,slot 1)"},
         {"A box 1 2 1-2 0-2 0", "unpack(1,slot 2)"},
         {"copied 0", "A:credit(0)"},
         {"copied 1", "A:credit(1)"},
         {"A end 1 3 6", ""},
         {"copied 2", "A:DONE(1) A:credit(2) received(7)"}},
        3);
  table("nothing",
        {{"A receive 1 7 k 0:", "A:INTENT(1) A:CANCEL(1) received(7)"}, {"A fail 1 cancelled", ""}});
  table("nothing but holes, after an intent",
        {{"A expect 1 k", "A:INTENT(1)"}, {"A receive 1 7 k 5:--", "A:CANCEL(1) received(7)"}});
}

TEST(boxes_that_fail_the_transfer_and_return_their_credit) {
  for (const char* box : {"A box 1 0 0-2 1-3", "A box 1 0 0-2 5-7", "A box 1 0 0-2 9-10", "A box 1 0 0-3 2-3",
                          "A box 1 0 1-1 2-3", "A box 1 0 0-1 3-3", "A box 1 0 0-1 2-3 1",
                          "A box 1 0 0-1 6-7", "A box 1 0 0-2 2-5", "A box 1 0 0-1 4000000000-4000000001"}) {
    table(box, {{"A receive 1 7 k 2:4-1", "A:OPEN(1,2-6,7-8)"},
                {"A accept 1", ""},
                {box, "A:CANCEL(1) A:credit(0) failed(7,breach)"},
                {"A box 1 0 0-2 2-3", "A:credit(0)"},
                {"A end 1 1 2", ""}});
  }
  table("units twice", {{"A receive 1 7 k 0:4", "A:OPEN(1,0-4)"},
                        {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                        {"A box 1 1 1-2 1-3", "A:CANCEL(1) A:credit(1)"},
                        {"copied 0", "A:credit(0) failed(7,breach)"}});
  table("a bad checksum", {{"A receive 1 7 k 0:4", "A:OPEN(1,0-4)"},
                           {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                           {"A box 1 1 0-2 2-4", "unpack(1,slot 1)"},
                           {"copied 1 bad", "A:CANCEL(1) A:credit(1)"},
                           {"copied 0", "A:credit(0) failed(7,checksum)"}});
  table("a failed unpack", {{"A receive 1 7 k 0:1", "A:OPEN(1,0-1)"},
                            {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                            {"copied 0 error", "A:CANCEL(1) A:credit(0) failed(7,pack)"}});
}

TEST(breaches) {
  table("a slot that was not credited", {{"A receive 1 7 k 0:4", "A:OPEN(1,0-4)"},
                                         {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                                         {"A box 1 0 0-2 2-4", "A:breach"}});
  table("a slot that does not exist",
        {{"A receive 1 7 k 0:4", "A:OPEN(1,0-4)"}, {"A box 1 3 0-2 0-2", "A:breach"}});
  table("a box of an id never issued", {{"A box 1 0 0-2 0-2", "A:breach"}});
  table("a box before OPEN", {{"A expect 1 k", "A:INTENT(1)"}, {"A box 1 0 0-2 0-2", "A:breach"}});
  table("ACCEPT, END, FAIL of ids never issued",
        {{"A accept 1", "A:breach"}, {"A end 1 0 0", "A:breach"}, {"A fail 1 taken", "A:breach"}});
  table("ACCEPT and END of an intent",
        {{"A expect 1 k", "A:INTENT(1)"}, {"A accept 1", "A:breach"}, {"A end 1 0 0", "A:breach"}});
  table("of another session's transfer", {{"A receive 1 7 k 0:1", "A:OPEN(1,0-1)"},
                                          {"B accept 1", "B:breach"},
                                          {"B box 1 0 0-2 0-1", "B:breach"}});
}

TEST(end_totals) {
  table("units", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                  {"A accept 1", ""},
                  {"A end 1 1 3", "A:CANCEL(1) failed(7,breach)"}});
  table("units, while unpacking", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                                   {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                                   {"A end 1 1 3", "A:CANCEL(1)"},
                                   {"copied 0", "A:credit(0) failed(7,breach)"}});
  table("boxes", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                  {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                  {"A end 1 2 4", ""},
                  {"copied 0", "A:CANCEL(1) A:credit(0) failed(7,breach)"}});
}

TEST(p_fails_it) {
  table(
      "waiting",
      {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"}, {"A fail 1 taken", "failed(7,taken)"}, {"A accept 1", ""}});
  table("while unpacking", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                            {"A accept 1", ""},
                            {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                            {"A fail 1 aborted", ""},
                            {"A box 1 1 0-2 1-2", "A:credit(1)"},
                            {"copied 0", "A:credit(0) failed(7,aborted)"}});
  for (const char* code : {"aborted", "cancelled"}) {
    const std::string fail = std::string("A fail 1 ") + code;
    const std::string failed = std::string("failed(7,") + code + ")";
    table("an intent, then the receive",
          {{"A expect 1 k", "A:INTENT(1)"}, {fail.c_str(), ""}, {"A receive 1 7 k 0:2", failed.c_str()}});
    table("an intent, then the cancel",
          {{"A expect 1 k", "A:INTENT(1)"}, {fail.c_str(), ""}, {"cancel 1", ""}, {"A fail 1 taken", ""}});
  }
}

TEST(cancel_in_every_state) {
  table("intent", {{"A expect 1 k", "A:INTENT(1)"},
                   {"cancel 1", "A:CANCEL(1)"},
                   {"cancel 1", ""},
                   {"A fail 1 aborted", ""}});
  table("waiting", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                    {"cancel 1", "A:CANCEL(1) failed(7,cancelled)"},
                    {"cancel 1", ""}});
  table("accepted", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                     {"A accept 1", ""},
                     {"cancel 1", "A:CANCEL(1) failed(7,cancelled)"},
                     {"A box 1 0 0-2 0-2", "A:credit(0)"},
                     {"A end 1 1 4", ""}});
  table("while unpacking", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                            {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                            {"A box 1 1 0-2 1-2", "unpack(1,slot 1)"},
                            {"cancel 1", "A:CANCEL(1)"},
                            {"cancel 1", ""},
                            {"A fail 1 aborted", ""},
                            {"copied 1", "A:credit(1)"},
                            {"copied 0", "A:credit(0) failed(7,cancelled)"}});
  table("after received", {{"A receive 1 7 k 0:", "A:INTENT(1) A:CANCEL(1) received(7)"}, {"cancel 1", ""}});
}

TEST(a_claim_is_used_once) {
  table("open already", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                         {"A receive 1 8 k 0:2", "failed(8,cancelled)"},
                         {"A fail 1 taken", "failed(7,taken)"}});
  table("cancelled before", {{"A expect 1 k", "A:INTENT(1)"},
                             {"cancel 1", "A:CANCEL(1)"},
                             {"A receive 1 7 k 0:2", "failed(7,cancelled)"}});
}

TEST(timeouts) {
  table("pairing", {{"A expect 1 k", "A:INTENT(1)"},
                    {"wait 5000", ""},
                    {"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                    {"wait 99", ""},
                    {"wait 1", "A:CANCEL(1) failed(7,pairing_timeout)"}});
  table("progress, restarted by each box", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                                            {"wait 99", ""},
                                            {"A accept 1", ""},
                                            {"wait 999", ""},
                                            {"A box 1 0 0-2 0-1", "unpack(1,slot 0)"},
                                            {"copied 0", "A:credit(0)"},
                                            {"wait 999", ""},
                                            {"A accept 1", ""},
                                            {"wait 1", "A:CANCEL(1) failed(7,progress_timeout)"}});
}

TEST(a_session_ends_in_every_state) {
  table("waiting", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                    {"B receive 2 8 k 0:2", "B:OPEN(2,0-2)"},
                    {"A lose peer_lost", "failed(7,peer_lost)"}});
  table("while unpacking", {{"A receive 1 7 k 0:2", "A:OPEN(1,0-2)"},
                            {"A box 1 0 0-2 0-2", "unpack(1,slot 0)"},
                            {"A lose peer_lost", ""},
                            {"copied 0", "failed(7,peer_lost)"}});
  table("intent, then the receive", {{"A expect 1 k", "A:INTENT(1)"},
                                     {"A lose peer_closed", ""},
                                     {"A receive 1 7 k 0:2", "failed(7,peer_closed)"}});
  table("intent, then the cancel",
        {{"A expect 1 k", "A:INTENT(1)"}, {"A lose peer_closed", ""}, {"cancel 1", ""}});
  table("calls that come late", {{"A lose peer_lost", ""},
                                 {"A receive 1 7 k 0:2", "failed(7,peer_lost)"},
                                 {"A expect 2 k", ""},
                                 {"A receive 2 8 k 0:2", "failed(8,peer_lost)"},
                                 {"A expect 3 k", ""},
                                 {"cancel 3", ""}});
}
