// The words of a Receiver's table.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "protocol/receiver.hpp"
#include "script.hpp"

namespace kvpush::script {

/// A expect T KEY | A receive T H KEY 0:4|3:2-1 (first:blocks) | cancel T
/// A accept T | A end T BOXES UNITS | A fail T CODE | A lose CODE
/// A box T SLOT p0-p1 b0-b1 [GROUP] | copied SLOT [bad|error]: the unpack of that slot (of session A)
/// wait US: time passes
/// Two planes; four units fit a slot; three slots. Timeouts: pairing 100, progress 1000.
class ReceiverTable {
 public:
  explicit ReceiverTable(std::size_t num_groups = 1)
      : cache_(make_cache(num_groups)), receiver_(cache_, timeouts()) {
    for (const char name : {'A', 'B'}) receiver_.open_session(session(name), 4 * kUnitBytes, 3);
  }

  std::string do_event(std::vector<std::string> words) {
    if (words[0].size() > 1) words.insert(words.begin(), "A");
    const char from = words[0][0];
    words.erase(words.begin());
    words.resize(7);
    carry_out(from, words);
    for (const auto& unpack : out_.unpacks) running_[unpack.slot] = unpack;
    return drain(out_);
  }

  protocol::Receiver& receiver() { return receiver_; }

 private:
  static constexpr std::size_t kUnitBytes = 64;
  static constexpr std::uint64_t kSum = 42;

  static Cache make_cache(std::size_t num_groups) {
    Cache cache;
    const Plane plane{nullptr, 1000, 1, 1, kUnitBytes, kUnitBytes, 0, 0, "p", 0};
    cache.groups.assign(num_groups, Group{16, {plane, plane}});
    return cache;
  }
  static protocol::Timeouts timeouts() {
    protocol::Timeouts timeouts;
    timeouts.pairing_us = 100;
    timeouts.progress_us = 1000;
    return timeouts;
  }

  void carry_out(char from, const std::vector<std::string>& words) {
    const SessionId id = session(from);
    const std::string& verb = words[0];
    const TransferId transfer = number(words[1]);
    const auto tell = [&](const protocol::Body& body) { receiver_.on_message(id, body, now_, out_); };
    if (verb == "expect") receiver_.expect(id, transfer, words[2], now_, out_);
    if (verb == "receive") {
      protocol::Destination to;
      for (const auto& group : split(words[4], '|')) {
        const auto parts = split(group, ':');
        to.first.push_back(number(parts[0]));
        to.blocks.push_back(parts.size() > 1 ? blocks(parts[1], next_block_) : std::vector<std::int32_t>{});
      }
      receiver_.receive(id, transfer, number(words[2]), words[3], Bytes(4), std::move(to), now_, out_);
    }
    if (verb == "cancel") receiver_.cancel(transfer, out_);
    if (verb == "accept") tell(protocol::Accept{transfer});
    if (verb == "end") tell(protocol::End{transfer, number(words[2]), number(words[3])});
    if (verb == "fail") tell(protocol::Fail{transfer, code_of(words[2])});
    if (verb == "lose") receiver_.close_session(id, code_of(words[1]), out_);
    if (verb == "box") {
      const auto planes = split(words[3], '-');
      const auto positions = split(words[4], '-');
      const Box box{number(words[5]),     number(planes[0]),   number(planes[1]), 0, 1,
                    number(positions[0]), number(positions[1])};
      receiver_.on_box(id, {transfer, number(words[2]), box, kSum}, now_, out_);
    }
    if (verb == "copied") {
      const protocol::Unpack unpack = running_.at(number(words[1]));
      running_.erase(unpack.slot);
      const Status status = words[2] == "error" ? Status(Code::kTransport, "no") : Status();
      receiver_.unpacked(unpack, words[2] == "bad" ? kSum + 1 : kSum, status, now_, out_);
    }
    if (verb == "wait") {
      now_ += number(words[1]);
      receiver_.tick(now_, out_);
    }
  }

  Cache cache_;
  protocol::Receiver receiver_;
  protocol::Actions out_;
  TimeUs now_ = 0;
  std::int32_t next_block_ = 0;
  std::map<std::uint32_t, protocol::Unpack> running_;
};

}  // namespace kvpush::script
