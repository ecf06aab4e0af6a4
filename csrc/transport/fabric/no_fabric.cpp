// Stands in for this directory in a build without libfabric.
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"

namespace kvpush {

Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& /*api*/,
                                                         const FabricOptions& /*options*/) {
  return Status(Code::kUnsupported, "this build has no fabric transport: configure with -DKVPUSH_FABRIC=ON");
}

Result<std::vector<FabricNic>> list_fabric_nics(const FabricApi& /*api*/, const FabricChoice& /*choice*/) {
  return Status(Code::kUnsupported, "this build has no fabric transport: configure with -DKVPUSH_FABRIC=ON");
}

}  // namespace kvpush
