#include "engine/choice.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

namespace kvpush {
namespace {

// Peers whose rates are remembered. Anybody may name a new one in a hello.
constexpr std::size_t kMaxPeers = 256;

}  // namespace

std::vector<std::string> common_paths(const std::vector<Path>& ours, const std::vector<Path>& theirs) {
  std::vector<std::tuple<Path::Rank, std::size_t, std::string>> both;
  for (const Path& path : ours) {
    const auto same = std::ranges::find_if(theirs, [&](const Path& their_path) {
      return their_path.name == path.name && their_path.reach == path.reach;
    });
    if (same != theirs.end()) both.emplace_back(std::max(path.rank, same->rank), both.size(), path.name);
  }
  std::ranges::sort(both);
  std::vector<std::string> names;
  names.reserve(both.size());
  for (auto& entry : both) names.push_back(std::move(std::get<std::string>(entry)));
  return names;
}

std::string describe(const std::vector<Path>& paths) {
  std::string text;
  for (const Path& path : paths) {
    text += (text.empty() ? "" : ", ") + path.name + (path.reach.empty() ? "" : " (" + path.reach + ")");
  }
  return text.empty() ? "none" : text;
}

void Rates::note(const Incarnation& peer, const std::string& name, std::uint64_t bytes_per_s) {
  if (rates_.size() >= kMaxPeers && !rates_.contains(peer)) rates_.erase(rates_.begin());
  rates_[peer][name] = bytes_per_s;
}

std::string Rates::choose(const Incarnation& peer, const std::vector<std::string>& names,
                          std::uint64_t floor) const {
  const auto known = rates_.find(peer);
  if (known == rates_.end()) return names.front();
  const std::string* best = nullptr;
  std::uint64_t best_rate = 0;
  for (const std::string& name : names) {
    const auto rate = known->second.find(name);
    if (rate == known->second.end() || rate->second >= std::max<std::uint64_t>(floor, 1)) return name;
    if (best == nullptr || rate->second > best_rate) {
      best = &name;
      best_rate = rate->second;
    }
  }
  return *best;
}

}  // namespace kvpush
