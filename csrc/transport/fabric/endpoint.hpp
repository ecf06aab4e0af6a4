// One libfabric endpoint with its fabric, domain, completion queue and address vector.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/bytes.hpp"
#include "base/status.hpp"
#include "shim/cuda_device.hpp"
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
  /// `delivers`: with operations that end when their data have arrived, which `info` must offer. Of a queue
  /// of `queue_entries` it takes what it gets. `device`: whose memory it reads and writes, beside the host's;
  /// may be null. Errors: Transport (libfabric refuses a call; its words).
  static Result<std::unique_ptr<FabricEndpoint>> open(std::shared_ptr<const FabricApi> api, FabricInfo info,
                                                      bool delivers, std::size_t queue_entries,
                                                      std::shared_ptr<const CudaDevice> device);
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;
  ~FabricEndpoint() = default;

  /// Ends all operations. Only registrations may be closed after this.
  void shut() noexcept { endpoint_.reset(); }

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
  /// How many completions may wait to be read.
  [[nodiscard]] std::size_t queue_entries() const noexcept { return queue_entries_; }
  /// -1 where the provider has none.
  [[nodiscard]] int wait_fd() const noexcept { return wait_fd_; }
  /// Whether wait_fd() may be waited on: nothing is left to read.
  [[nodiscard]] bool may_wait();

  Result<FiAddr> insert(ByteView name);
  void remove(FiAddr address);

  /// Registers memory, with a key that cannot be guessed where keys are ours to choose. `on_device`: it is
  /// the device's.
  Result<FidHandle<FidMr>> register_memory(Region region, std::uint64_t access, bool on_device);

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
    const Scope scope(device_);
    return queue_->ops->read(queue_.get(), entries.data(), entries.size());
  }
  /// The error entry with its text; false when there is none.
  bool read_error(FiCqErrEntry& entry, std::string& text);
  [[nodiscard]] std::string describe(std::ptrdiff_t code) const;

 private:
  /// Providers copy to and from device memory, and look it up, in the context that is current.
  struct Scope {
    explicit Scope(const std::shared_ptr<const CudaDevice>& device) {
      if (device) cuda.emplace(*device);
    }
    std::optional<CudaScope> cuda;
  };

  FabricEndpoint(std::shared_ptr<const FabricApi> api, FabricInfo info, bool delivers,
                 std::size_t queue_entries, std::shared_ptr<const CudaDevice> device)
      : api_(std::move(api)),
        device_(std::move(device)),
        info_(std::move(info)),
        delivers_(delivers),
        queue_entries_(queue_entries) {}
  Status start();
  Status open_queue();
  int try_open_queue(int wait_object);
  FabricStart started(std::ptrdiff_t code);

  std::shared_ptr<const FabricApi> api_;
  std::shared_ptr<const CudaDevice> device_;
  FabricInfo info_;
  bool delivers_;
  std::size_t queue_entries_;
  int wait_fd_ = -1;
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
