#include "bindings/transports.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"
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
    options.pin_budget_us = settings.call_budget_us;
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
    options.rails = settings.fabric_rails;
    options.device = settings.device;
    options.device_slots = settings.fabric_device_memory;
    options.pin_budget_us = settings.call_budget_us;
    options.pin_thread = settings.fabric_pin_thread;
    // As long as a peer may be silent.
    options.stall_us = 10 * settings.call_budget_us;
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
    const auto nics = list_fabric_nics(
        *api.value(), {settings.fabric_provider, settings.fabric_rails, "", settings.fabric_device_memory});
    if (!nics.ok()) return nics.status();
    const auto rail = std::find_if(nics.value().begin(), nics.value().end(),
                                   [](const FabricNic& nic) { return nic.chosen; });
    if (rail == nics.value().end()) return Status(Code::kUnsupported, "libfabric has no NIC that fits");
    const bool is_rdma = rail->provider.starts_with("efa") || rail->provider.starts_with("verbs");
    return Path{name, rail->protocol, is_rdma ? Path::Rank::kRdma : Path::Rank::kNetwork};
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
  settings.fabric_rails = description["fabric_rails"].cast<std::vector<std::string>>();
  settings.fabric_device_memory = description["fabric_device_memory"].cast<bool>();
  settings.fabric_pin_thread = description["fabric_pin_thread"].cast<bool>();
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
                    const std::string& fabric_provider, const std::vector<std::string>& fabric_rails) {
  TransportSettings settings;
  static_cast<Uuid&>(settings.incarnation) = random_uuid();
  settings.call_budget_us = 100'000;
  settings.nixl_library = nixl_library;
  settings.nixl_backends = {"UCX"};
  settings.fabric_libraries = fabric_libraries;
  settings.fabric_provider = fabric_provider;
  settings.fabric_rails = fabric_rails;
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

py::list fabric_rails(const std::vector<std::string>& libraries, const std::string& provider,
                      const std::vector<std::string>& rails, const std::string& gpu_pci) {
  const auto api = check(load_fabric_api(libraries));
  py::list found;
  for (const FabricNic& nic : check(list_fabric_nics(*api, {provider, rails, gpu_pci, false}))) {
    py::dict each;
    each["provider"] = nic.provider;
    each["protocol"] = nic.protocol;
    each["domain"] = nic.domain;
    each["device"] = nic.device;
    each["address"] = nic.address;
    each["pci"] = nic.pci;
    each["numa_node"] = nic.numa_node;
    each["gbit_per_s"] = static_cast<double>(nic.bits_per_s) / 1e9;
    each["chosen"] = nic.chosen;
    found.append(each);
  }
  return found;
}

}  // namespace kvpush::bindings
