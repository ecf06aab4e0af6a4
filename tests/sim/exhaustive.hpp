// All lives of a small world.
#pragma once

#include <cstddef>

namespace kvpush::sim {

/// Explores every order of deliveries, calls and of one fault, and prints how many states there were.
/// At most `most` of each world. False when a promise did not hold.
bool explore_all(std::size_t most);

}  // namespace kvpush::sim
