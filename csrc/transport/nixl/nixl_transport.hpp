// The transport over NIXL: RDMA, shared memory or TCP, as NIXL's backends find them.
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
#include "transport/transport.hpp"

namespace kvpush {

/// What only the transport sees. Counted on the progress thread, read on any.
struct NixlCounters {
  std::atomic<std::uint64_t> dropped_notifications{0};  ///< malformed, of no open session, or not its peer's
  std::atomic<std::uint64_t> failed_posts{0};           ///< NIXL reported an error after the post
  std::atomic<std::uint64_t> orphaned_posts{0};         ///< unfinished when their session was closed
  std::atomic<std::uint64_t> leaked_requests{0};        ///< handles that could never be freed safely
  std::atomic<std::uint64_t> broken_peers{0};           ///< connections that NIXL gave up
  std::atomic<std::uint64_t> retired_bytes{0};          ///< device memory kept back, see max_retired_bytes
};

struct NixlOptions {
  Incarnation incarnation;   ///< names the agent
  std::string library_path;  ///< libnixl_capi.so, full path
  std::vector<std::string> backends = {"UCX"};
  std::uint32_t max_posts_per_session = 64;  ///< above this many unfinished ones post() answers kAgain
  std::shared_ptr<NixlCounters> counters;    ///< optional
  std::shared_ptr<const CudaDevice> device;  ///< where this engine's cache is; null: in host memory
  bool device_slots = false;                 ///< with a device: staging and landings in its memory
  TimeUs pin_budget_us = std::numeric_limits<TimeUs>::max();  ///< for one landing or staging buffer
  /// Device memory of ended landings, which is not freed at once: a peer that knows such an address under
  /// another key would refuse the next landing there. Above this, and when there is no other left, the oldest
  /// is freed.
  std::size_t max_retired_bytes = std::size_t{256} << 20U;
};

/// One agent, on host memory, which is pinned for the device if there is one, or on device memory. It cannot
/// wait (poll it), cannot revoke a peer's access, and moves data only while both sides poll. Errors: those of
/// load_nixl_api(); InvalidArgument (device_slots without a device); Unsupported for a backend that is not
/// there, or device_slots on a device that may show a NIC's writes too late; Transport. Waits: some 100 ms
/// for the backends to probe devices.
Result<std::unique_ptr<Transport>> make_nixl_transport(const NixlOptions& options);

}  // namespace kvpush
