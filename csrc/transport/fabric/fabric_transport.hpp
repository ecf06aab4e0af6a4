// The transport over libfabric: EFA, verbs or TCP, as its providers find them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

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

struct FabricOptions {
  Incarnation incarnation;
  std::string provider;                      ///< libfabric's name of it; empty chooses
  std::uint32_t max_posts_per_session = 64;  ///< above this many unfinished ones post() answers kAgain
  std::size_t max_write_bytes = SIZE_MAX;    ///< a box of more goes as several writes
  std::shared_ptr<FabricCounters> counters;  ///< optional
  std::shared_ptr<const CudaDevice> device;  ///< host memory is pinned for it; null: not
};

/// One endpoint, on host memory. It waits by descriptor where the provider has one, and cannot revoke a
/// peer's access. Providers without progress of their own move data only while both sides poll.
/// Errors: InvalidArgument; Unsupported for a provider that is not there; Transport.
Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& api,
                                                         const FabricOptions& options);

/// The provider that an endpoint would take, without opening one. Errors: Unsupported.
Result<std::string> find_fabric_provider(const FabricApi& api, const std::string& provider);

}  // namespace kvpush
