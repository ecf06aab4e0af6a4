#include "bindings/transports.hpp"

#include <array>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>

#include "transport/fabric/fabric_transport.hpp"
#include "transport/nixl/nixl_transport.hpp"
#include "transport/shm/description.hpp"
#include "transport/shm/shm_transport.hpp"

namespace kvpush::bindings {
namespace {

constexpr const char* kAuto = "auto";
// Equals in this order: libfabric says which of its providers it takes, of NIXL it can only be guessed.
constexpr std::array<const char*, 3> kNames = {"shm", "fabric", "nixl"};

Result<std::unique_ptr<Transport>> make_transport(const std::string& name,
                                                  const TransportSettings& settings) {
  if (name == "shm") {
    return make_shm_transport(settings.incarnation, settings.call_budget_us, settings.device);
  }
  if (name == "nixl") {
    NixlOptions options;
    options.incarnation = settings.incarnation;
    options.library_path = settings.nixl_library;
    options.backends = settings.nixl_backends;
    options.device = settings.device;
    options.device_slots = settings.nixl_device_memory;
    if (options.library_path.empty()) {
      return Status(Code::kUnsupported,
                    "transport 'nixl' needs NIXL's library: pip install 'kvpush[nixl]', or set nixl_library "
                    "(KVPUSH_NIXL_LIBRARY) to the path of libnixl_capi.so");
    }
    return make_nixl_transport(options);
  }
  if (name == "fabric") {
    auto api = load_fabric_api(settings.fabric_libraries);
    if (!api.ok()) return api.status();
    FabricOptions options;
    options.incarnation = settings.incarnation;
    options.provider = settings.fabric_provider;
    options.device = settings.device;
    return make_fabric_transport(api.value(), options);
  }
  return Status(Code::kInvalidArgument,
                "transport '" + name + "' is unknown; known are auto, shm, nixl, fabric");
}

/// Whether the machine has an RDMA device that the kernel drives (verbs, also EFA's).
bool has_rdma_devices() {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
  return !error && devices != std::filesystem::directory_iterator();
}

/// Whether and how one transport leads to other engines, by what can be seen without making it.
Result<Path> look_for(const std::string& name, const TransportSettings& settings) {
  if (name == "shm") {
    Result<std::string> host = shm::host_identity();
    if (!host.ok()) return host.status();
    return Path{name, host.value(), Path::Rank::kHost};
  }
  if (name == "fabric") {
    auto api = load_fabric_api(settings.fabric_libraries);
    if (!api.ok()) return api.status();
    Result<std::string> provider = find_fabric_provider(*api.value(), settings.fabric_provider);
    if (!provider.ok()) return provider.status();
    const std::string_view text = provider.value();
    const bool is_rdma = text.starts_with("efa") || text.starts_with("verbs");
    return Path{name, provider.value(), is_rdma ? Path::Rank::kRdma : Path::Rank::kNetwork};
  }
  std::error_code error;
  if (!std::filesystem::is_regular_file(settings.nixl_library, error)) {
    return Status(Code::kUnsupported, "NIXL's library is not there");
  }
  return Path{name, "", has_rdma_devices() ? Path::Rank::kRdma : Path::Rank::kNetwork};
}

class Source final : public TransportSource {
 public:
  Source(TransportSettings settings, const std::optional<FaultPolicy>& policy)
      : settings_(std::move(settings)), policy_(policy) {}

  std::vector<Path> look() override {
    std::vector<Path> paths;
    for (const char* name : kNames) {
      if (settings_.name != kAuto && settings_.name != name) continue;
      if (Result<Path> path = look_for(name, settings_); path.ok()) paths.push_back(std::move(path).value());
    }
    return paths;
  }
  Result<std::unique_ptr<Transport>> make(const std::string& name) override {
    auto made = make_transport(name, settings_);
    if (made.ok() && policy_) return make_fault_transport(std::move(made).value(), *policy_);
    return made;
  }

 private:
  TransportSettings settings_;
  std::optional<FaultPolicy> policy_;
};

}  // namespace

TransportSettings transport_settings_from(const py::dict& description, const Incarnation& incarnation,
                                          std::shared_ptr<const CudaDevice> device) {
  TransportSettings settings;
  settings.name = description["transport"].cast<std::string>();
  settings.incarnation = incarnation;
  settings.call_budget_us = description["peer_timeout_us"].cast<TimeUs>() / 10;
  settings.nixl_library = description["nixl_library"].cast<std::string>();
  settings.nixl_backends = description["nixl_backends"].cast<std::vector<std::string>>();
  settings.nixl_device_memory = description["nixl_device_memory"].cast<bool>();
  settings.fabric_libraries = description["fabric_library"].cast<std::vector<std::string>>();
  settings.fabric_provider = description["fabric_provider"].cast<std::string>();
  settings.device = std::move(device);
  return settings;
}

void add_transports(EngineParts& parts, const TransportSettings& settings,
                    const std::optional<FaultPolicy>& policy) {
  parts.is_auto = settings.name == kAuto;
  parts.source = std::make_unique<Source>(settings, policy);
  std::string reasons;
  for (const char* name : kNames) {
    if (!parts.is_auto && settings.name != name) continue;
    auto made = parts.source->make(name);
    if (made.ok()) {
      parts.transport = std::move(made).value();
      return;
    }
    if (!parts.is_auto) raise(made.status());
    reasons += (reasons.empty() ? "" : "; ") + std::string(name) + ": " + made.status().message();
  }
  raise(Status(Code::kUnsupported, "no transport can be used here: " + reasons));
}

py::dict transports(const std::string& nixl_library, const std::vector<std::string>& fabric_libraries,
                    const std::string& fabric_provider) {
  TransportSettings settings;
  static_cast<Uuid&>(settings.incarnation) = random_uuid();
  settings.call_budget_us = 100'000;
  settings.nixl_library = nixl_library;
  settings.nixl_backends = {"UCX"};
  settings.fabric_libraries = fabric_libraries;
  settings.fabric_provider = fabric_provider;
  py::dict found;
  for (const char* name : {"shm", "nixl", "fabric"}) {
    const auto made = make_transport(name, settings);
    found[name] = made.ok() ? std::string() : made.status().message();
  }
  return found;
}

py::list paths(const py::dict& description) {
  py::list found;
  for (const Path& path : Source(transport_settings_from(description, {}, nullptr), {}).look()) {
    constexpr std::array<const char*, 3> kRanks = {"host", "rdma", "network"};
    found.append(py::make_tuple(path.name, path.reach, kRanks[static_cast<std::size_t>(path.rank)]));
  }
  return found;
}

}  // namespace kvpush::bindings
