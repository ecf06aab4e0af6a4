// Stands in for this directory in a build without NIXL.
#include "transport/nixl/nixl_transport.hpp"

namespace kvpush {

Result<std::unique_ptr<Transport>> make_nixl_transport(const NixlOptions& /*options*/) {
  return Status(Code::kUnsupported, "this build has no nixl transport: configure with -DKVPUSH_NIXL=ON");
}

}  // namespace kvpush
