// The bounded waits of the protocol, and a queue of deadlines.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.hpp"

namespace kvpush::protocol {

/// All in microseconds. Who waits, for what: docs/protocol.md, "Time".
struct Timeouts {
  TimeUs pairing_us = 60'000'000;
  TimeUs claim_us = 1'800'000'000;
  TimeUs unclaimed_us = 30'000'000;
  TimeUs progress_us = 1'800'000'000;
  TimeUs peer_us = 10'000'000;
  TimeUs handshake_us = 30'000'000;
};

/// One deadline per id. Externally synchronised.
template <typename Id>
class Deadlines {
 public:
  void arm(const Id& id, TimeUs at) {
    disarm(id);
    at_[id] = at;
    order_.emplace(at, id);
  }
  void disarm(const Id& id) {
    const auto found = at_.find(id);
    if (found == at_.end()) return;
    order_.erase({found->second, id});
    at_.erase(found);
  }
  /// Removes and returns what is due, earliest first.
  std::vector<Id> take_due(TimeUs now) {
    std::vector<Id> due;
    while (!order_.empty() && order_.begin()->first <= now) {
      due.push_back(order_.begin()->second);
      at_.erase(due.back());
      order_.erase(order_.begin());
    }
    return due;
  }
  [[nodiscard]] TimeUs next() const { return order_.empty() ? kNever : order_.begin()->first; }

 private:
  std::map<Id, TimeUs> at_;
  std::set<std::pair<TimeUs, Id>> order_;
};

}  // namespace kvpush::protocol
