// Stands in for this directory in a build without libfabric.
#include "transport/fabric/fabric_transport.hpp"

namespace kvpush {

Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& /*api*/,
                                                         const FabricOptions& /*options*/) {
  return Status(Code::kUnsupported, "this build has no fabric transport: configure with -DKVPUSH_FABRIC=ON");
}

Result<std::string> find_fabric_provider(const FabricApi& /*api*/, const std::string& /*provider*/) {
  return Status(Code::kUnsupported, "this build has no fabric transport: configure with -DKVPUSH_FABRIC=ON");
}

}  // namespace kvpush
