// libfabric without a library or a network: the table of FabricApi filled with functions of this process. For
// what no provider here does: no order at all, narrow limits, refusals and errors at will.
#pragma once

#include <cstdint>
#include <memory>

#include "shim/fabric_api.hpp"

namespace kvpush::fake_fabric {

/// How the network behaves. Chances are in 256ths.
struct Policy {
  std::uint64_t seed = 1;
  const char* provider = "efa";
  bool closes_registrations = true;          ///< false: the next that is closed is not, with an error
  std::size_t max_message_bytes = SIZE_MAX;  ///< what it says; writes above max_write_bytes are refused
  std::size_t max_write_bytes = SIZE_MAX;
  std::size_t max_receives = 256;
  bool by_address = false;        ///< FI_MR_VIRT_ADDR and FI_MR_PROV_KEY, as hardware has them
  bool delivers = true;           ///< has FI_DELIVERY_COMPLETE
  bool shuffles = false;          ///< nothing arrives in order
  std::uint32_t again = 0;        ///< a call that starts something answers -FI_EAGAIN
  std::uint32_t repeats = 0;      ///< an immediate comes again, some entries later
  std::uint32_t short_reads = 0;  ///< a read of the queue returns one entry of many
  int gpu = -1;                   ///< FI_HMEM for the memory of this GPU; -1: none
  int num_nics = 1;               ///< "nic0", ... at PCI 0000:10:00.0, ...; each reaches all
  int stubborn_nic = -1;          ///< every call that starts a write or message answers -FI_EAGAIN
  int slow_nic = -1;              ///< what goes over it arrives last
};

/// A fresh network with this policy; endpoints of an earlier one must be gone.
[[nodiscard]] std::shared_ptr<const FabricApi> network(const Policy& policy);

/// The next `count` writes end at P with an error, and nothing is written.
void fail_writes(std::uint32_t count);
/// All queues, or those of one NIC, report one error that belongs to no operation.
void overrun(int nic = -1);
/// What is under way over these NICs ends with an error, as does all that is started until mend_nic(). Half
/// of the writes among it land later nevertheless, as a network may.
void break_nic(int nic);
/// What is under way over this NIC, and all that is started until mend_nic(), does not move.
void silence_nic(int nic);
void mend_nic(int nic);
/// Writes that were started over this NIC since network().
[[nodiscard]] std::size_t num_writes(int nic);
/// Objects of libfabric that are open.
[[nodiscard]] std::size_t num_open();

}  // namespace kvpush::fake_fabric
