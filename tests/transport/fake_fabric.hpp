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
  std::size_t max_message_bytes = SIZE_MAX;  ///< what it says; writes above max_write_bytes are refused
  std::size_t max_write_bytes = SIZE_MAX;
  std::size_t max_receives = 256;
  bool by_address = false;        ///< FI_MR_VIRT_ADDR and FI_MR_PROV_KEY, as hardware has them
  bool delivers = true;           ///< has FI_DELIVERY_COMPLETE
  bool shuffles = false;          ///< nothing arrives in order
  std::uint32_t again = 0;        ///< a call that starts something answers -FI_EAGAIN
  std::uint32_t repeats = 0;      ///< an immediate comes again, some entries later
  std::uint32_t short_reads = 0;  ///< a read of the queue returns one entry of many
};

/// A fresh network with this policy; endpoints of an earlier one must be gone.
[[nodiscard]] std::shared_ptr<const FabricApi> network(const Policy& policy);

/// The next `count` writes end at P with an error, and nothing is written.
void fail_writes(std::uint32_t count);
/// All queues report one error that belongs to no operation.
void overrun();
/// Objects of libfabric that are open.
[[nodiscard]] std::size_t num_open();

}  // namespace kvpush::fake_fabric
