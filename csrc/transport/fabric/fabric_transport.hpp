// The transport over libfabric: EFA, verbs or TCP, as its providers find them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "shim/cuda_device.hpp"
#include "shim/fabric_api.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// What only the transport sees. Counted on the progress thread, read on any.
struct FabricCounters {
  std::atomic<std::uint64_t> dropped_messages{0};    ///< malformed, or of no open session
  std::atomic<std::uint64_t> dropped_immediates{0};  ///< late, repeated, or of no open session
  std::atomic<std::uint64_t> failed_operations{0};   ///< writes and messages that ended with an error
  std::atomic<std::uint64_t> orphaned_posts{0};      ///< unfinished when their session was closed
};

inline constexpr std::size_t kFabricMinQueueEntries = 1024;

struct FabricOptions {
  Incarnation incarnation;
  std::string provider;                      ///< libfabric's name of it; empty chooses
  std::vector<std::string> rails;            ///< see FabricChoice
  std::uint32_t max_posts_per_session = 64;  ///< above this many unfinished ones post() answers kAgain
  std::size_t max_write_bytes = SIZE_MAX;    ///< a box of more goes as several writes
  std::size_t min_stripe_bytes = std::size_t{256} << 10U;  ///< a box of twice that goes over two rails, ...
  std::size_t queue_entries = std::size_t{64} << 10U;      ///< of each rail's completion queue, at most
  TimeUs revoke_after_us = 1'000'000;        ///< for a peer to say itself that it writes no more
  TimeUs try_again_us = 10'000'000;          ///< until a lane that failed is given a trial message
  TimeUs stall_us = 10'000'000;              ///< without an end of what is under way, until a lane has failed
  std::shared_ptr<FabricCounters> counters;  ///< optional
  std::shared_ptr<const CudaDevice> device;  ///< where this engine's cache is; null: in host memory
  bool pin_thread = false;                   ///< the thread that polls: to the first rail's NUMA node
  std::string sysfs = "/sys";                ///< but for tests
  bool device_slots = false;                 ///< with a device: staging and landings in its memory
  TimeUs pin_budget_us = std::numeric_limits<TimeUs>::max();  ///< for one landing or staging buffer
};

/// One endpoint per rail, on host memory, which is pinned for the device if there is one, or on device
/// memory. It waits by descriptor where the provider has one, and revokes a peer's access only over providers
/// of which that is known (revocation.hpp). Providers without progress of their own move data only while both
/// sides poll. Errors: InvalidArgument (also device_slots without a device); Unsupported for a provider that
/// is not there, or does not reach the device's memory; Transport.
Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& api,
                                                         const FabricOptions& options);

}  // namespace kvpush
