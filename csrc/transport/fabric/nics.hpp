// Which NICs libfabric has here, and which of them become rails.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "shim/fabric_api.hpp"

namespace kvpush {

inline constexpr std::size_t kFabricMaxRails = 16;

/// A NIC, or one address of it, as one provider offers it.
struct FabricNic {
  std::string provider;
  std::string protocol;  ///< provider and protocol with its version: two engines talk only if these are equal
  std::string domain;    ///< libfabric's name of it; of TCP providers the interface
  std::string device;    ///< the hardware's name; may be empty
  std::string address;   ///< IP address; empty where addresses are no such thing
  std::string pci;       ///< as "0000:3b:00.0"; may be empty
  int numa_node = -1;    ///< -1: unknown
  std::uint64_t bits_per_s = 0;  ///< 0: unknown
  bool chosen = false;           ///< becomes a rail
};

/// What NICs are chosen by.
struct FabricChoice {
  std::string provider;            ///< empty: the first that is there of efa, verbs, tcp, net
  std::vector<std::string> rails;  ///< domains, devices or addresses, one rail each; empty: the nearest
  std::string gpu_pci;             ///< the GPU to be near to; empty: none
  bool device_memory = false;      ///< NICs that read and write the GPU's memory
  std::string sysfs = "/sys";
};

/// The chosen NICs' entries, one list of one entry each.
struct FabricRailInfos {
  std::vector<FabricInfo> infos;
  std::vector<FabricNic> nics;  ///< the same
  bool delivers = false;        ///< they tell when a write has arrived
};

/// Every rail of the same provider and protocol. By nearness are chosen, among NICs that name their PCI
/// device: those that share most bridges with the GPU, else those on its NUMA node or, without a GPU, on this
/// thread's; else the first. Errors: Unsupported (no such provider or rail, or it takes
/// only smaller messages than are sent), InvalidArgument (two rails are one).
/// Threads: any. Waits: as find_fabric_providers().
Result<FabricRailInfos> choose_fabric_nics(const FabricApi& api, const FabricChoice& choice, bool delivers);

/// All NICs that could be used; those that an engine would use now are chosen. Errors: Unsupported (none).
Result<std::vector<FabricNic>> list_fabric_nics(const FabricApi& api, const FabricChoice& choice);

}  // namespace kvpush
