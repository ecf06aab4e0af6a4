// Stands in for this directory in a build without libfabric.
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"
#include "transport/fabric/plain_writes.hpp"

namespace kvpush {
namespace {

Status not_built() {
  return {Code::kUnsupported, "this build has no fabric transport: configure with -DKVPUSH_FABRIC=ON"};
}

}  // namespace

Result<std::unique_ptr<Transport>> make_fabric_transport(const std::shared_ptr<const FabricApi>& /*api*/,
                                                         const FabricOptions& /*options*/) {
  return not_built();
}

Result<std::unique_ptr<PlainWrites>> make_plain_writes(const std::shared_ptr<const FabricApi>& /*api*/,
                                                       const std::string& /*provider*/, Region /*memory*/) {
  return not_built();
}

Result<std::vector<FabricNic>> list_fabric_nics(const FabricApi& /*api*/, const FabricChoice& /*choice*/) {
  return not_built();
}

}  // namespace kvpush
