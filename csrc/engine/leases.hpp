// P's staging memory, for transports whose slots are not mapped.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "transport/transport.hpp"

namespace kvpush {

/// A pool of equal staging buffers. A buffer whose post has an unknown fate is quarantined, and replaced,
/// until the post is settled. Progress thread only.
class Leases {
 public:
  Leases(Transport& transport, std::size_t lease_bytes, std::size_t num_leases)
      : transport_(transport), lease_bytes_(lease_bytes), num_leases_(num_leases) {}
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;
  ~Leases() {
    for (const Region& region : free_) transport_.release_staging(region);
  }

  [[nodiscard]] std::size_t lease_bytes() const { return lease_bytes_; }
  [[nodiscard]] std::size_t in_use() const { return in_use_; }
  [[nodiscard]] std::size_t quarantined_bytes() const { return quarantined_.size() * lease_bytes_; }

  /// Nothing when all are out, or memory cannot be had.
  std::optional<Region> take() {
    if (in_use_ == num_leases_) return std::nullopt;
    if (free_.empty()) {
      Result<Region> fresh = transport_.allocate_staging(lease_bytes_);
      if (!fresh.ok()) return std::nullopt;
      free_.push_back(fresh.value());
    }
    const Region region = free_.back();
    free_.pop_back();
    ++in_use_;
    return region;
  }
  void give_back(const Region& region) {
    free_.push_back(region);
    --in_use_;
  }
  void quarantine(TicketId ticket, const Region& region) {
    quarantined_.emplace(ticket, region);
    --in_use_;
  }
  /// The post is over. Its buffer was replaced: it goes back to the transport.
  void settle(TicketId ticket) {
    const auto found = quarantined_.find(ticket);
    if (found == quarantined_.end()) return;
    transport_.release_staging(found->second);
    quarantined_.erase(found);
  }

 private:
  Transport& transport_;
  std::size_t lease_bytes_;
  std::size_t num_leases_;
  std::vector<Region> free_;
  std::size_t in_use_ = 0;
  std::map<TicketId, Region> quarantined_;
};

}  // namespace kvpush
