#include "shim/fabric_api.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "shim/dl.hpp"

namespace kvpush {
namespace {

Result<DynamicLibrary> open_first(const std::vector<std::string>& paths) {
  if (paths.empty()) return Status(Code::kInvalidArgument, "no path of libfabric is given");
  std::string reasons;
  for (const std::string& path : paths) {
    auto library = DynamicLibrary::open(path, DynamicLibrary::Lifetime::kProcess);
    if (library.ok()) return library;
    reasons += (reasons.empty() ? "" : "; ") + library.status().message();
  }
  return Status(Code::kTransport, reasons);
}

}  // namespace

std::string describe_fabric_version(std::uint32_t version) {
  return std::to_string(version >> 16U) + "." + std::to_string(version & 0xffffU);
}

Result<std::shared_ptr<const FabricApi>> load_fabric_api(const std::vector<std::string>& paths) {
  // The loader serialises this too, but a thread sanitizer does not see its lock.
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  auto library = open_first(paths);
  if (!library.ok()) return library.status();

  auto api = std::make_shared<FabricApi>();
  api->path = library.value().path();
#define KVPUSH_FABRIC_LOOKUP(name, type) KVPUSH_TRY(library.value().lookup("fi_" #name, &api->name));
  KVPUSH_FABRIC_FUNCTIONS(KVPUSH_FABRIC_LOOKUP)
#undef KVPUSH_FABRIC_LOOKUP

  if (const std::uint32_t version = api->version(); version < kFabricVersion) {
    return Status(Code::kUnsupported, api->path + " is libfabric " + describe_fabric_version(version) +
                                          ", needed is " + describe_fabric_version(kFabricVersion) +
                                          " or newer");
  }
  return std::shared_ptr<const FabricApi>(std::move(api));
}

Result<FabricInfo> find_fabric_providers(const FabricApi& api, const FabricQuery& query) {
  const FabricInfo hints(api.dupinfo(nullptr), {&api});
  if (!hints) return Status(Code::kExhausted, "libfabric has no memory");
  hints->caps = kFiMsg | kFiRma;
  hints->mode = kFiContext | kFiContext2;
  hints->ep_attr->type = kFiEpRdm;
  hints->domain_attr->mr_mode = kFiMrLocal | kFiMrVirtAddr | kFiMrAllocated | kFiMrProvKey;
  hints->domain_attr->threading = kFiThreadDomain;
  hints->domain_attr->resource_mgmt = kFiRmEnabled;
  hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
  if (query.delivery_complete) hints->tx_attr->op_flags = kFiDeliveryComplete;
  if (query.device_memory) {
    hints->caps |= kFiHmem;
    hints->domain_attr->mr_mode |= kFiMrHmem;
  }
  // freeinfo() frees it with free().
  if (!query.provider.empty()) hints->fabric_attr->prov_name = strdup(query.provider.c_str());

  FiInfo* found = nullptr;
  const char* node = query.source.empty() ? nullptr : query.source.c_str();
  const int code =
      api.getinfo(kFabricVersion, node, nullptr, node == nullptr ? 0 : kFiSource, hints.get(), &found);
  if (code == 0 && found != nullptr) return FabricInfo(found, {&api});
  return Status(Code::kUnsupported,
                "libfabric " + describe_fabric_version(api.version()) + " (" + api.path + ") has " +
                    (query.provider.empty() ? "no provider" : "no provider '" + query.provider + "'") +
                    " with messages, remote writes and immediate data" +
                    (query.device_memory ? " for GPU memory" : "") + " here" +
                    (node == nullptr ? "" : " at " + query.source) + ": " + api.strerror(-code));
}

std::vector<FabricProvider> list_fabric_providers(const FabricApi& api) {
  FiInfo* all = nullptr;
  const int code = api.getinfo(kFabricVersion, nullptr, nullptr, 0, nullptr, &all);
  const FabricInfo owned(code == 0 ? all : nullptr, {&api});
  std::vector<FabricProvider> found;
  for (const FiInfo* info = owned.get(); info != nullptr; info = info->next) {
    const char* name = info->fabric_attr->prov_name;
    if (std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.name == name; }))
      continue;
    FabricProvider& one = found.emplace_back();
    one.name = name;
    one.version = info->fabric_attr->prov_version;
    for (const bool delivers : {true, false}) {
      const auto usable = find_fabric_providers(api, {one.name, delivers, false, {}});
      one.reason = usable.status().message();
      if (!usable.ok()) continue;
      one.protocol = usable.value()->ep_attr->protocol;
      one.protocol_version = usable.value()->ep_attr->protocol_version;
      one.delivers = delivers;
      break;
    }
  }
  return found;
}

}  // namespace kvpush
