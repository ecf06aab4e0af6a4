// Writes with immediate data and nothing else: what `kvpush bench` compares the transport with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/status.hpp"
#include "shim/fabric_api.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// How the other side reaches this side's memory.
struct PlainAddress {
  Bytes endpoint;
  std::uint64_t base = 0;
  std::uint64_t key = 0;
};

/// Bytes [from, from + size) of the writer's memory go to [to, to + size) of the other's.
struct PlainPiece {
  std::size_t from = 0;
  std::size_t to = 0;
  std::size_t size_bytes = 0;
};

/// One side's endpoint and its memory in the host. Data move only inside write() and wait(), which look at
/// the completion queue without a pause. Threads: one at a time.
class PlainWrites {
 public:
  virtual ~PlainWrites() = default;
  PlainWrites(const PlainWrites&) = delete;
  PlainWrites& operator=(const PlainWrites&) = delete;

  /// Provider and protocol.
  [[nodiscard]] virtual std::string protocol() const = 0;
  [[nodiscard]] virtual PlainAddress address() const = 0;
  /// Once, before anything moves.
  virtual Status connect(const PlainAddress& peer) = 0;
  /// Writes the pieces in parts of `write_bytes`, at most `window` under way; the immediate is the piece's
  /// index. Returns when all have completed. Errors: InvalidArgument, Transport (also: not over within a
  /// minute).
  virtual Status write(const std::vector<PlainPiece>& pieces, std::size_t write_bytes,
                       std::size_t window) = 0;
  /// Returns when counts[i] writes of piece i have arrived, with the time of the last of each in nanoseconds
  /// of CLOCK_MONOTONIC. Errors: Transport (also: not over within a minute).
  virtual Result<std::vector<std::int64_t>> wait(std::vector<std::size_t> counts) = 0;

 protected:
  PlainWrites() = default;
};

/// `memory` must outlive the result. Errors: as FabricEndpoint::open.
Result<std::unique_ptr<PlainWrites>> make_plain_writes(const std::shared_ptr<const FabricApi>& api,
                                                       const std::string& provider, Region memory);

}  // namespace kvpush
