// Whether closing a registration ends the peers' access to its memory.
#pragma once

#include <string>
#include <string_view>

namespace kvpush {

struct FabricRevocation {
  bool revokes = false;  ///< once the close has returned, no write lands any more, whatever is under way
  std::string reason;
};

/// What is known of a provider, by libfabric's name of it, and of this process's environment.
[[nodiscard]] FabricRevocation fabric_revocation(std::string_view provider);

}  // namespace kvpush
