#include "cache/cache.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace kvpush {
namespace {

constexpr std::size_t kMaxShownChars = 120;

std::string plane_label(std::size_t group, std::size_t plane, const std::string& name) {
  std::string label = "group " + std::to_string(group) + ", plane " + std::to_string(plane);
  if (!name.empty()) label += " (" + name + ")";
  return label;
}

Status invalid(const std::string& where, const std::string& what) {
  return {Code::kInvalidArgument, where + ": " + what};
}

/// One axis of a plane; an axis of size 1 has no stride that matters.
struct Axis {
  std::int64_t size;
  std::int64_t stride_bytes;
  const char* name;
};

/// Bytes from the first to past the last byte of the plane, or why two elements would share a byte.
/// Sorted by stride, each axis must step over everything that the ones before it span.
Result<std::int64_t> checked_span(const Plane& plane, const std::string& where) {
  std::array<Axis, 3> axes{{{plane.num_blocks, plane.block_stride_bytes, "block"},
                            {plane.num_heads, plane.head_stride_bytes, "head"},
                            {plane.num_tokens, plane.token_stride_bytes, "token"}}};
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride_bytes < b.stride_bytes; });
  std::int64_t span = plane.content_bytes;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (axis.stride_bytes < span) {
      return invalid(where, std::string(axis.name) + "_stride_bytes is " + std::to_string(axis.stride_bytes) +
                                ", but what it steps over spans " + std::to_string(span) +
                                " bytes: elements overlap");
    }
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(axis.size - 1, axis.stride_bytes, &reach) ||
        __builtin_add_overflow(span, reach, &span)) {
      return invalid(where, std::string(axis.name) + " axis: " + std::to_string(axis.size) + " steps of " +
                                std::to_string(axis.stride_bytes) + " bytes exceed 2^63");
    }
  }
  return span;
}

Status validate_plane(const Plane& plane, const std::string& where) {
  const std::array<std::pair<const char*, std::int64_t>, 4> sizes{{{"num_blocks", plane.num_blocks},
                                                                   {"num_heads", plane.num_heads},
                                                                   {"num_tokens", plane.num_tokens},
                                                                   {"content_bytes", plane.content_bytes}}};
  for (const auto& [name, size] : sizes) {
    if (size < 1)
      return invalid(where, std::string(name) + " is " + std::to_string(size) + ", at least 1 is needed");
  }
  if (plane.num_blocks > std::numeric_limits<std::int32_t>::max()) {
    return invalid(where, "num_blocks is " + std::to_string(plane.num_blocks) + ", block ids are 32-bit");
  }
  if (plane.head_begin < 0) return invalid(where, "head_begin is " + std::to_string(plane.head_begin));
  if (plane.base == nullptr) return invalid(where, "base is a null pointer");
  const Result<std::int64_t> span = checked_span(plane, where);
  if (!span.ok()) return span.status();
  const auto base = reinterpret_cast<std::uintptr_t>(plane.base);
  if (static_cast<std::uintptr_t>(span.value()) > std::numeric_limits<std::uintptr_t>::max() - base) {
    return invalid(where, std::to_string(span.value()) + " bytes from its base pass the end of memory");
  }
  return {};
}

/// Text of either side fit for a log line: bounded, and without control characters.
std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, kMaxShownChars)) out.push_back(c >= ' ' && c <= '~' ? c : '?');
  if (text.size() > kMaxShownChars) out += "...";
  return out;
}

}  // namespace

std::size_t Cache::max_unit_bytes() const {
  std::size_t largest = 0;
  for (const Group& group : groups) {
    for (const Plane& plane : group.planes) largest = std::max(largest, plane.unit_bytes());
  }
  return largest;
}

Status Cache::validate() const {
  if (groups.empty() || groups.size() > kMaxGroups) {
    return {Code::kInvalidArgument, "a cache has 1 to " + std::to_string(kMaxGroups) + " groups, not " +
                                        std::to_string(groups.size())};
  }
  if (device < -1) return invalid("cache", "device is " + std::to_string(device) + ", not -1 or an index");
  std::size_t num_planes = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Group& group = groups[g];
    const std::string where = "group " + std::to_string(g);
    if (group.block_size < 1) {
      return invalid(where, "block_size is " + std::to_string(group.block_size) + ", at least 1 is needed");
    }
    if (group.planes.empty()) return invalid(where, "it has no planes");
    num_planes += group.planes.size();
    if (num_planes > kMaxPlanes) {
      return {Code::kInvalidArgument, "a cache has at most " + std::to_string(kMaxPlanes) + " planes"};
    }
    for (std::size_t p = 0; p < group.planes.size(); ++p) {
      const Plane& plane = group.planes[p];
      const std::string label = plane_label(g, p, plane.name);
      KVPUSH_TRY(validate_plane(plane, label));
      if (plane.num_blocks != group.num_blocks()) {
        return invalid(label, "num_blocks is " + std::to_string(plane.num_blocks) +
                                  ", plane 0 of its group has " + std::to_string(group.num_blocks()) +
                                  "; they share one block table");
      }
      // A box covers all heads of its planes, so they must have the same ones.
      if (plane.num_heads != group.planes.front().num_heads) {
        return invalid(label, "num_heads is " + std::to_string(plane.num_heads) +
                                  ", plane 0 of its group has " +
                                  std::to_string(group.planes.front().num_heads) +
                                  "; planes of different head counts belong in different groups");
      }
    }
  }
  return {};
}

std::map<std::string, std::string> Cache::identity() const {
  std::map<std::string, std::string> fields;
  for (const auto& [name, value] : fingerprint) fields.emplace("fingerprint." + name, value);
  fields.emplace("group.count", std::to_string(groups.size()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Group& group = groups[g];
    const std::string prefix = "group[" + std::to_string(g) + "].";
    fields.emplace(prefix + "block_size", std::to_string(group.block_size));
    fields.emplace(prefix + "num_planes", std::to_string(group.planes.size()));
    for (std::size_t p = 0; p < group.planes.size(); ++p) {
      const Plane& plane = group.planes[p];
      const std::string field = prefix + "plane[" + std::to_string(p) + "].";
      fields.emplace(field + "name", plane.name);
      fields.emplace(field + "heads", std::to_string(plane.head_begin) + " to " +
                                          std::to_string(plane.head_begin + plane.num_heads));
      fields.emplace(field + "num_tokens", std::to_string(plane.num_tokens));
      fields.emplace(field + "content_bytes", std::to_string(plane.content_bytes));
    }
  }
  return fields;
}

std::string first_difference(const std::map<std::string, std::string>& theirs,
                             const std::map<std::string, std::string>& ours) {
  static const std::string kAbsent = "(absent)";
  auto a = theirs.begin();
  auto b = ours.begin();
  while (a != theirs.end() || b != ours.end()) {
    const bool only_theirs = b == ours.end() || (a != theirs.end() && a->first < b->first);
    const bool only_ours = !only_theirs && (a == theirs.end() || b->first < a->first);
    if (only_theirs || only_ours || a->second != b->second) {
      return shown(only_ours ? b->first : a->first) + ": theirs " + shown(only_ours ? kAbsent : a->second) +
             ", ours " + shown(only_theirs ? kAbsent : b->second);
    }
    ++a;
    ++b;
  }
  return {};
}

}  // namespace kvpush
