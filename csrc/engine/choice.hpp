// Which transport a session takes, out of those that both sides have.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/ids.hpp"

namespace kvpush {

/// One way to other engines. Better ones come first in any list.
struct Path {
  enum class Rank : std::uint8_t { kHost, kRdma, kNetwork };  ///< lower is better

  std::string name;   ///< Transport::name()
  std::string reach;  ///< it leads only to engines that have it with the same reach
  Rank rank = Rank::kNetwork;

  bool operator==(const Path&) const = default;
};

/// The names of those of `ours` that lead to an engine that has `theirs`, best first: one that is less at
/// either end is less. Equals keep our order.
[[nodiscard]] std::vector<std::string> common_paths(const std::vector<Path>& ours,
                                                    const std::vector<Path>& theirs);
/// "fabric (tcp), nixl": for messages.
[[nodiscard]] std::string describe(const std::vector<Path>& paths);

/// D: what was measured of each path to each peer. Progress thread only.
class Rates {
 public:
  /// 0 of a path that does not work.
  void note(const Incarnation& peer, const std::string& name, std::uint64_t bytes_per_s);
  /// The first of `names` that nothing is known of or that reaches `floor`; if there is none, the fastest.
  [[nodiscard]] std::string choose(const Incarnation& peer, const std::vector<std::string>& names,
                                   std::uint64_t floor) const;

 private:
  std::map<Incarnation, std::map<std::string, std::uint64_t>> rates_;
};

}  // namespace kvpush
