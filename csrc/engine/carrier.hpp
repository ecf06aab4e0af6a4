// A transport, and what one engine keeps for it.
#pragma once

#include <cstddef>

#include "engine/leases.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// Each session lives on one. Buffers are allocated when first needed. Progress thread only.
struct Carrier {
  Carrier(Transport& its_transport, std::size_t lease_bytes, std::size_t num_leases)
      : transport(its_transport),
        capabilities(its_transport.capabilities()),
        leases(its_transport, lease_bytes, num_leases) {}

  Transport& transport;
  Capabilities capabilities;
  Leases leases;
};

}  // namespace kvpush
