#include "transport/fabric/revocation.hpp"

#include <array>
#include <cstdlib>

namespace kvpush {
namespace {

struct Known {
  std::string_view provider;
  bool by_hardware;  ///< a closed registration is one that the NIC does not know any more
  std::string_view reason;
};

// Source: prov/*/src of libfabric 1.17 and 2.6.
constexpr std::array kKnown = {
    Known{"verbs;ofi_rxm", true, "the NIC refuses writes by the key of a closed registration"},
    Known{"efa", false, "writes that efa emulates check the key when they begin, and go on"},
    Known{"tcp", false, "a write that is being received goes on"},
    Known{"tcp;ofi_rxm", false, "a write that is being received goes on"},
    Known{"net", false, "a write that is being received goes on"},
    Known{"shm", false, "the peer copies by itself"},
};

// verbs keeps closed registrations, valid, in a cache; this turns the cache off for all kinds of memory.
constexpr const char* kNoCache = "FI_MR_CACHE_MAX_COUNT";

}  // namespace

FabricRevocation fabric_revocation(std::string_view provider) {
  for (const Known& known : kKnown) {
    if (known.provider != provider) continue;
    if (!known.by_hardware) return {false, std::string(known.reason)};
    const char* const count = std::getenv(kNoCache);
    if (count != nullptr && std::string_view(count) == "0") return {true, std::string(known.reason)};
    return {false, std::string("closed registrations stay valid in the provider's cache, unless ") +
                       kNoCache + "=0"};
  }
  return {false, "nothing is known of this provider"};
}

}  // namespace kvpush
