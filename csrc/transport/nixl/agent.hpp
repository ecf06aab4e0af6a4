// One NIXL agent as a C++ value: owns every C handle, turns codes into Status.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/status.hpp"
#include "shim/cuda_device.hpp"
#include "shim/nixl_api.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// Deletes a NIXL object through the function of the table that `Destroy` names.
template <typename Object, auto Destroy>
struct NixlDeleter {
  const NixlApi* api = nullptr;
  void operator()(Object* object) const noexcept { (api->*Destroy)(object); }
};
template <typename Object, auto Destroy>
using NixlHandle = std::unique_ptr<Object, NixlDeleter<Object, Destroy>>;

/// What NIXL must know of memory beside its address.
struct NixlMemoryPlace {
  int type = kNixlDram;
  std::uint32_t device = 0;  ///< of kNixlVram: its CUDA index in the process that owns it
};

/// An agent with its backends, without NIXL's own threads: it moves only inside notifications() and
/// status(), on the caller's thread. All memory of its own is in one place: the host's, or a GPU's.
/// Externally synchronised: NIXL is not thread-safe without its locks, which are off.
class NixlAgent {
 public:
  /// Creates the agent `name` with `backends`, each with its plugin's default parameters.
  /// Errors: Unsupported (a backend that this installation lacks), Transport (anything else).
  /// Waits:  some 100 ms, in which the backends probe devices, and for other agents that start or end.
  /// `device` is where the memory is that will be registered; null: the host's.
  static Result<std::unique_ptr<NixlAgent>> create(std::shared_ptr<const NixlApi> api, std::string name,
                                                   const std::vector<std::string>& backends,
                                                   std::shared_ptr<const CudaDevice> device);
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;
  ~NixlAgent();

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Metadata that lets a peer send notifications, and reach no memory at all.
  [[nodiscard]] const Bytes& connection() const noexcept { return connection_; }

  [[nodiscard]] NixlMemoryPlace place() const noexcept { return place_; }

  Status register_memory(Region region);
  Status deregister_memory(Region region);
  /// Metadata that gives a peer that has loaded connection() access to this region and to no other.
  Result<Bytes> access_to(Region region);

  /// Loads metadata of a peer, which must say that it is `agent`'s.
  Status load(const std::string& agent, ByteView metadata);
  /// Drops what was loaded of `agent` and closes the connection. Requests to it must have ended.
  void forget(const std::string& agent);
  /// False once NIXL itself dropped `agent`, which it does when a request finds it disconnected.
  [[nodiscard]] bool knows(const std::string& agent) const;

  /// Sends a notification. Success says only that the backend took it.
  NixlCode notify(const std::string& agent, ByteView payload);

  /// A write of `source` to `destination` in `agent`'s memory, with a notification behind it; null with
  /// the reason when NIXL refuses, and then nothing was sent.
  Result<NixlRequestObject*> create_write(const std::string& agent, ByteView source,
                                          std::uint64_t destination, NixlMemoryPlace destination_place,
                                          ByteView payload);
  NixlCode post(NixlRequestObject* request) {
    const Scope scope(device_);
    return api_->post_xfer_req(agent_, request, nullptr);
  }
  /// Also what makes the request move, and what sends its notification.
  NixlCode status(NixlRequestObject* request) {
    const Scope scope(device_);
    return api_->get_xfer_status(agent_, request);
  }
  /// Frees a request that was never posted or has ended.
  void release(NixlRequestObject* request) noexcept;

  /// Moves the backends, then calls `visit(agent, payload)` for each notification that has arrived.
  template <typename Visit>
  void notifications(Visit&& visit) {
    std::size_t num_agents = fetch_notifications();
    for (std::size_t i = 0; i < num_agents; ++i) {
      const char* agent = nullptr;
      std::size_t num_notifications = 0;
      if (api_->notif_map_get_agent_at(arrived_.get(), i, &agent) != kNixlOk ||
          api_->notif_map_get_notifs_size(arrived_.get(), agent, &num_notifications) != kNixlOk) {
        continue;
      }
      for (std::size_t j = 0; j < num_notifications; ++j) {
        const void* data = nullptr;
        std::size_t size = 0;
        if (api_->notif_map_get_notif(arrived_.get(), agent, j, &data, &size) != kNixlOk) continue;
        visit(agent, ByteView(static_cast<const std::byte*>(data), size));
      }
    }
  }

  /// Makes the destructor leave the agent alive: for requests that may still be running.
  void leak() noexcept { leaked_ = true; }

 private:
  template <typename Object, auto Destroy>
  NixlHandle<Object, Destroy> own(Object* object) const {
    return NixlHandle<Object, Destroy>(object, {api_.get()});
  }
  using RegList = NixlHandle<NixlRegListObject, &NixlApi::destroy_reg_dlist>;
  using XferList = NixlHandle<NixlXferListObject, &NixlApi::destroy_xfer_dlist>;
  using Backend = NixlHandle<NixlBackendObject, &NixlApi::destroy_backend>;
  using OptArgs = NixlHandle<NixlOptArgsObject, &NixlApi::destroy_opt_args>;
  using NotifMap = NixlHandle<NixlNotifMapObject, &NixlApi::destroy_notif_map>;

  /// UCX finds its way to device memory by the context that is current.
  struct Scope {
    explicit Scope(const std::shared_ptr<const CudaDevice>& device) {
      if (device) cuda.emplace(*device);
    }
    std::optional<CudaScope> cuda;
  };

  NixlAgent(std::shared_ptr<const NixlApi> api, std::string name, std::shared_ptr<const CudaDevice> device);
  Status start(const std::vector<std::string>& backends);
  Status add_backend(const std::string& backend);
  Result<RegList> list_of(Region region) const;
  std::size_t fetch_notifications();

  std::shared_ptr<const NixlApi> api_;
  std::string name_;
  std::shared_ptr<const CudaDevice> device_;
  NixlMemoryPlace place_;
  NixlAgentObject* agent_ = nullptr;
  bool leaked_ = false;
  std::vector<Backend> backends_;
  XferList local_;
  std::array<XferList, 2> remote_;  // by the type of memory
  OptArgs write_args_;
  NotifMap arrived_;
  Bytes connection_;
};

}  // namespace kvpush
