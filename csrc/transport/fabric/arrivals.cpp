#include "transport/fabric/arrivals.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvpush {

bool FabricArrivals::add_write(std::uint16_t number) {
  const auto ahead = static_cast<std::uint16_t>(number - static_cast<std::uint16_t>(low_));
  if (ahead >= kWindow) return false;
  if (ahead >= states_.size()) states_.resize(ahead + std::size_t{1}, State::kMissing);
  if (states_[ahead] != State::kMissing) return false;
  states_[ahead] = State::kArrived;
  const std::uint64_t full = low_ + ahead;
  const auto after = waiting_.upper_bound(full);
  if (after == waiting_.begin()) return true;
  const auto& [first, box] = *std::prev(after);
  if (full < first + box.count && is_complete(first, box.count)) complete_.push_back(first);
  return true;
}

bool FabricArrivals::add_notice(std::uint64_t first, std::uint32_t count, ByteView notice) {
  if (first < low_) return false;
  const std::uint64_t offset = first - low_;
  if (count == 0 || offset >= kWindow || count > kWindow - offset) {
    broken_ = true;
    return false;
  }
  const auto after = waiting_.lower_bound(first);
  if (after != waiting_.end() && after->first == first) return false;
  const bool overlaps =
      (after != waiting_.end() && after->first < first + count) ||
      (after != waiting_.begin() && std::prev(after)->first + std::prev(after)->second.count > first);
  if (offset < states_.size() && states_[offset] == State::kDelivered) return false;
  if (overlaps) {
    broken_ = true;
    return false;
  }
  waiting_.emplace(first, Waiting{count, Bytes(notice.begin(), notice.end())});
  if (is_complete(first, count)) complete_.push_back(first);
  return true;
}

std::optional<Bytes> FabricArrivals::take() {
  if (complete_.empty()) return std::nullopt;
  const std::uint64_t first = complete_.front();
  complete_.pop_front();
  auto box = waiting_.extract(first);
  for (std::uint64_t i = 0; i < box.mapped().count; ++i) states_[first - low_ + i] = State::kDelivered;
  while (!states_.empty() && states_.front() == State::kDelivered) {
    states_.pop_front();
    ++low_;
  }
  return std::move(box.mapped().notice);
}

bool FabricArrivals::is_complete(std::uint64_t first, std::uint64_t count) const {
  const std::uint64_t offset = first - low_;
  if (offset + count > states_.size()) return false;
  const auto begin = states_.begin() + static_cast<std::ptrdiff_t>(offset);
  return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(count),
                     [](State state) { return state == State::kArrived; });
}

}  // namespace kvpush
