#include "transport/fabric/nics.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <utility>

#include "transport/fabric/operations.hpp"
#include "transport/fabric/topology.hpp"

namespace kvpush {
namespace {

// Across hosts, by what moves data best. shm reaches one host only, and sockets and udp are slower than tcp.
constexpr std::array<std::string_view, 5> kPreferred = {"efa", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "net"};

std::string text_of(const char* text) {
  return text != nullptr ? text : "";
}

std::string address_of(const FiInfo& info) {
  const auto* const any = static_cast<const sockaddr*>(info.src_addr);
  const bool is_ip = info.addr_format == kFiSockaddr || info.addr_format == kFiSockaddrIn ||
                     info.addr_format == kFiSockaddrIn6;
  if (any == nullptr || !is_ip) return {};
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* raw = nullptr;
  if (any->sa_family == AF_INET && info.src_addrlen >= sizeof(sockaddr_in)) {
    raw = &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr;
  } else if (any->sa_family == AF_INET6 && info.src_addrlen >= sizeof(sockaddr_in6)) {
    raw = &static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr;
  }
  return raw == nullptr ? "" : text_of(inet_ntop(any->sa_family, raw, text.data(), text.size()));
}

bool is_address(const std::string& text) {
  in6_addr any{};
  return inet_pton(AF_INET, text.c_str(), &any) == 1 || inet_pton(AF_INET6, text.c_str(), &any) == 1;
}

FabricNic describe(const FiInfo& info, const Topology& topology) {
  FabricNic nic;
  nic.provider = text_of(info.fabric_attr->prov_name);
  nic.protocol = nic.provider + " protocol " + std::to_string(info.ep_attr->protocol) + "." +
                 std::to_string(info.ep_attr->protocol_version);
  nic.domain = text_of(info.domain_attr->name);
  nic.address = address_of(info);
  if (info.nic == nullptr) {
    nic.pci = topology.pci_of_interface(nic.domain);
    nic.bits_per_s = topology.bits_per_s_of_interface(nic.domain);
  } else {
    if (info.nic->device_attr != nullptr) nic.device = text_of(info.nic->device_attr->name);
    if (info.nic->link_attr != nullptr) nic.bits_per_s = info.nic->link_attr->speed;
    if (const FiBusAttr* bus = info.nic->bus_attr; bus != nullptr && bus->bus_type == kFiBusPci) {
      std::array<char, 16> text{};
      static_cast<void>(std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", bus->pci_domain,
                                      bus->pci_bus, bus->pci_device, bus->pci_function));
      nic.pci = text.data();
    }
  }
  nic.numa_node = topology.numa_node_of(nic.pci);
  return nic;
}

bool is_down(const FiInfo& info) {
  return info.nic != nullptr && info.nic->link_attr != nullptr && info.nic->link_attr->state == kFiLinkDown;
}

/// EFA's second fabric, listed first where the device has it, sends messages of one packet only.
bool is_packets_only(const FiInfo& info) {
  return text_of(info.fabric_attr->name) == "efa-direct";
}

/// Entries of one provider and protocol.
std::vector<FiInfo*> of_one_provider(FiInfo* infos, const std::string& provider) {
  while (infos != nullptr && is_packets_only(*infos)) infos = infos->next;
  const FiInfo* first = provider.empty() ? nullptr : infos;
  for (std::size_t i = 0; i < kPreferred.size() && first == nullptr; ++i) {
    for (first = infos; first != nullptr && kPreferred[i] != first->fabric_attr->prov_name;) {
      first = first->next;
    }
  }
  std::vector<FiInfo*> found;
  for (FiInfo* info = infos; first != nullptr && info != nullptr; info = info->next) {
    if (!is_packets_only(*info) && text_of(info->fabric_attr->prov_name) == first->fabric_attr->prov_name &&
        info->ep_attr->protocol == first->ep_attr->protocol &&
        info->ep_attr->protocol_version == first->ep_attr->protocol_version) {
      found.push_back(info);
    }
  }
  return found;
}

/// The nearest, one entry of each.
std::vector<FiInfo*> nearest(const std::vector<FiInfo*>& infos, const std::string& gpu_pci,
                             const Topology& topology) {
  std::vector<FiInfo*> rails;
  std::size_t most_shared = 1;  // of no bridge in common nothing follows
  const int node = gpu_pci.empty() ? topology.numa_node_of_thread() : topology.numa_node_of(gpu_pci);
  const auto take = [&](auto is_near) {
    std::vector<std::string> domains;
    for (FiInfo* info : infos) {
      const FabricNic nic = describe(*info, topology);
      const bool is_new = std::find(domains.begin(), domains.end(), nic.domain) == domains.end();
      if (info->nic == nullptr || is_down(*info) || !is_new || !is_near(nic)) continue;
      domains.push_back(nic.domain);
      if (rails.size() < kFabricMaxRails) rails.push_back(info);
    }
  };
  for (const FiInfo* info : infos) {
    if (info->nic == nullptr) continue;
    most_shared = std::max(most_shared, topology.num_shared_bridges(describe(*info, topology).pci, gpu_pci));
  }
  take([&](const FabricNic& nic) { return topology.num_shared_bridges(nic.pci, gpu_pci) == most_shared; });
  if (rails.empty() && node >= 0) take([&](const FabricNic& nic) { return nic.numa_node == node; });
  if (rails.empty()) rails.push_back(infos.front());
  return rails;
}

std::string list_of(const std::vector<FiInfo*>& infos, const Topology& topology) {
  std::string list;
  for (const FiInfo* info : infos) {
    const FabricNic nic = describe(*info, topology);
    const std::string name = nic.domain + (nic.address.empty() ? "" : " (" + nic.address + ")");
    list += (list.empty() ? "" : ", ") + name;
  }
  return list;
}

Result<FabricInfo> copy_of(const FabricApi& api, const FiInfo* info) {
  FabricInfo copy(api.dupinfo(info), {&api});
  if (!copy) return Status(Code::kExhausted, "libfabric has no memory");
  return copy;
}

/// The entry that a configured rail names.
Result<FabricInfo> named(const FabricApi& api, const std::vector<FiInfo*>& infos, const std::string& name,
                         const FabricQuery& query, const Topology& topology) {
  for (const FiInfo* info : infos) {
    const FabricNic nic = describe(*info, topology);
    if (name == nic.domain || name == nic.device || name == nic.address) return copy_of(api, info);
  }
  const std::string provider = text_of(infos.front()->fabric_attr->prov_name);
  if (is_address(name)) {
    // Providers list one address per interface and net, and take more.
    const auto found =
        find_fabric_providers(api, {provider, query.delivery_complete, query.device_memory, name});
    if (!found.ok()) return found.status();
    const std::vector<FiInfo*> same = of_one_provider(found.value().get(), provider);
    return copy_of(api, same.front());
  }
  return Status(Code::kUnsupported, "fabric_rails: libfabric's " + provider + " has no '" + name +
                                        "' here; it has " + list_of(infos, topology));
}

Status check_entry(const FabricApi& api, const std::vector<FiInfo*>& infos) {
  if (infos.empty()) {
    return {Code::kUnsupported, "libfabric (" + api.path + ") has none of efa, verbs, tcp and net here"};
  }
  const FiInfo& info = *infos.front();
  if (info.ep_attr->max_msg_size >= kFabricBufferBytes) return {};
  return {Code::kUnsupported, std::string("libfabric's ") + info.fabric_attr->prov_name + " sends at most " +
                                  std::to_string(info.ep_attr->max_msg_size) + " bytes at once, needed are " +
                                  std::to_string(kFabricBufferBytes)};
}

}  // namespace

Result<FabricRailInfos> choose_fabric_nics(const FabricApi& api, const FabricChoice& choice, bool delivers) {
  const FabricQuery query{choice.provider, delivers, choice.device_memory, {}};
  const auto found = find_fabric_providers(api, query);
  if (!found.ok()) return found.status();
  const Topology topology(choice.sysfs);
  const std::vector<FiInfo*> infos = of_one_provider(found.value().get(), choice.provider);
  KVPUSH_TRY(check_entry(api, infos));
  FabricRailInfos rails;
  rails.delivers = delivers;
  const auto add = [&](Result<FabricInfo> info) -> Status {
    if (!info.ok()) return info.status();
    FabricNic nic = describe(*info.value(), topology);
    nic.chosen = true;
    for (const FabricNic& other : rails.nics) {
      if (other.protocol != nic.protocol) {
        return {Code::kUnsupported, "fabric_rails: " + other.protocol + " and " + nic.protocol};
      }
      if (other.domain == nic.domain && other.address == nic.address) {
        return {Code::kInvalidArgument, "fabric_rails: two of them are " + nic.domain + " " + nic.address};
      }
    }
    rails.infos.push_back(std::move(info).value());
    rails.nics.push_back(std::move(nic));
    return {};
  };
  for (const std::string& name : choice.rails) {
    KVPUSH_TRY(add(named(api, infos, name, query, topology)));
  }
  if (!choice.rails.empty()) return rails;
  for (const FiInfo* info : nearest(infos, choice.gpu_pci, topology)) KVPUSH_TRY(add(copy_of(api, info)));
  return rails;
}

Result<std::vector<FabricNic>> list_fabric_nics(const FabricApi& api, const FabricChoice& choice) {
  auto chosen = choose_fabric_nics(api, choice, true);
  if (!chosen.ok()) chosen = choose_fabric_nics(api, choice, false);
  if (!chosen.ok()) return chosen.status();
  std::vector<FabricNic> nics = std::move(chosen.value().nics);
  const auto found = find_fabric_providers(api, {choice.provider, false, choice.device_memory, {}});
  if (!found.ok()) return found.status();
  const Topology topology(choice.sysfs);
  for (const FiInfo* info = found.value().get(); info != nullptr; info = info->next) {
    const FabricNic nic = describe(*info, topology);
    const bool is_new = std::none_of(nics.begin(), nics.end(), [&](const FabricNic& other) {
      return other.protocol == nic.protocol && other.domain == nic.domain && other.address == nic.address;
    });
    if (is_new) nics.push_back(nic);
  }
  return nics;
}

}  // namespace kvpush
