// One libfabric endpoint with its fabric, domain, completion queue and address vector.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.hpp"
#include "base/status.hpp"
#include "shim/fabric_api.hpp"
#include "transport/transport.hpp"

namespace kvpush {

struct FidDeleter {
  template <typename Object>
  void operator()(Object* object) const noexcept {
    static_cast<void>(object->fid.ops->close(&object->fid));
  }
};
/// Owns one object of libfabric; closes it.
template <typename Object>
using FidHandle = std::unique_ptr<Object, FidDeleter>;

/// What FabricEndpoint's calls that start something say.
enum class FabricStart : std::uint8_t {
  kYes,    ///< its completion, or an error, will be read from the queue
  kAgain,  ///< no room now, or not yet connected: nothing was started
  kNo,     ///< refused; see error()
};

/// Reliable, connectionless, on one NIC. Externally synchronised: it moves only inside its calls.
class FabricEndpoint {
 public:
  /// `provider` by its libfabric name; empty takes the first that is there of efa, verbs, tcp, net.
  /// Errors: Unsupported (no such provider, or none that sends `min_message_bytes` at once), Transport (it
  /// refuses a call; its words).
  static Result<std::unique_ptr<FabricEndpoint>> open(const std::shared_ptr<const FabricApi>& api,
                                                      const std::string& provider,
                                                      std::size_t min_message_bytes);
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;
  ~FabricEndpoint() = default;

  /// Ends all operations. Only registrations may be closed after this.
  void shut() noexcept { endpoint_.reset(); }

  /// Provider and protocol with its version: two endpoints talk only if these are equal.
  [[nodiscard]] const std::string& protocol() const noexcept { return protocol_; }
  /// How others address this endpoint.
  [[nodiscard]] const Bytes& name() const noexcept { return name_; }
  /// Whether a write that has completed is in the peer's memory, not just on its way.
  [[nodiscard]] bool delivers() const noexcept { return delivers_; }
  /// Whether remote addresses are the owner's, not offsets into its registration.
  [[nodiscard]] bool by_address() const noexcept {
    return (info_->domain_attr->mr_mode & kFiMrVirtAddr) != 0;
  }
  [[nodiscard]] std::size_t max_write_bytes() const noexcept { return info_->ep_attr->max_msg_size; }
  [[nodiscard]] std::size_t max_receives() const noexcept { return info_->rx_attr->size; }
  /// -1 where the provider has none.
  [[nodiscard]] int wait_fd() const noexcept { return wait_fd_; }
  /// Whether wait_fd() may be waited on: nothing is left to read.
  [[nodiscard]] bool may_wait();

  Result<FiAddr> insert(ByteView name);
  void remove(FiAddr address);

  /// Registers memory, with a key that cannot be guessed where keys are ours to choose.
  Result<FidHandle<FidMr>> register_memory(Region region, std::uint64_t access);

  // `context` is at least 64 bytes that are libfabric's until the operation has ended; so are the data.
  FabricStart write(FiAddr peer, ByteView source, void* descriptor, std::uint32_t immediate,
                    std::uint64_t address, std::uint64_t key, void* context);
  FabricStart send(FiAddr peer, ByteView message, void* descriptor, void* context);
  FabricStart receive(std::span<std::byte> buffer, void* descriptor, void* context);
  /// Why the last of these calls was refused.
  [[nodiscard]] std::string error() const { return describe(last_error_); }

  /// Moves everything, then reads what has ended: the number of entries, 0 for none, or a negative code.
  /// After -kFiAvail the next entry is an error: read_error().
  std::ptrdiff_t read(std::span<FiCqDataEntry> entries) {
    return queue_->ops->read(queue_.get(), entries.data(), entries.size());
  }
  /// The error entry with its text; false when there is none.
  bool read_error(FiCqErrEntry& entry, std::string& text);
  [[nodiscard]] std::string describe(std::ptrdiff_t code) const;

 private:
  FabricEndpoint(std::shared_ptr<const FabricApi> api, FabricInfo infos, FiInfo* info, bool delivers);
  Status start();
  Status open_queue();
  FabricStart started(std::ptrdiff_t code);

  std::shared_ptr<const FabricApi> api_;
  FabricInfo infos_;
  FiInfo* info_;  // the entry of infos_ that is used
  bool delivers_;
  int wait_fd_ = -1;
  std::string protocol_;
  Bytes name_;
  std::ptrdiff_t last_error_ = 0;
  // Closed from the last to the first.
  FidHandle<FidFabric> fabric_;
  FidHandle<FidDomain> domain_;
  FidHandle<FidAv> addresses_;
  FidHandle<FidCq> queue_;
  FidHandle<FidEp> endpoint_;
};

}  // namespace kvpush
