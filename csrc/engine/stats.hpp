// Counters of one engine. Names are public: Engine.stats(), docs and metrics use the same ones.
#pragma once

#include <array>
#include <cstdint>

#include "protocol/fail_code.hpp"

namespace kvpush {

/// Counted since the engine began, unless it says "now".
struct Stats {
  std::uint64_t network_ops = 0;  ///< posts: one write and one notice each
  std::uint64_t boxes_sent = 0;
  std::uint64_t boxes_received = 0;
  std::uint64_t boxes_discarded = 0;  ///< of ended transfers, or seen before
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t breaches = 0;
  std::uint64_t pushes_sent = 0;
  std::uint64_t receives_done = 0;
  std::array<std::uint64_t, kNumFailCodes> push_failures{};
  std::array<std::uint64_t, kNumFailCodes> receive_failures{};
  std::uint64_t sessions_opened = 0;
  std::uint64_t sessions_ended = 0;  ///< lost or closed
  std::uint64_t pack_us = 0;         ///< what the copies took, summed
  std::uint64_t unpack_us = 0;
  std::uint64_t post_us = 0;     ///< from post to completion, summed
  std::uint64_t slow_links = 0;  ///< sessions whose link was slower than min_link_bytes_per_s
  // Now.
  std::uint64_t sessions = 0;
  std::uint64_t open_pushes = 0;
  std::uint64_t open_claims = 0;
  std::uint64_t open_receives = 0;
  std::uint64_t credits = 0;  ///< slots of peers that this engine may fill
  std::uint64_t leases_in_use = 0;
  std::uint64_t landing_bytes = 0;
  std::uint64_t quarantined_bytes = 0;
  std::uint64_t link_bytes_per_s = 0;  ///< of the session measured last; 0: none was
};

}  // namespace kvpush
