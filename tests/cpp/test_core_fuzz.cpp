// Random lives of whole engines: bytes, ownership, one end each, and nothing left over.
#include <cstdlib>
#include <string>

#include "core_fuzz.hpp"

using namespace kvpush;

// KVPUSH_FUZZ_SEED replays one seed; KVPUSH_FUZZ_SEEDS runs that many.
TEST(random_lives) {
  const auto number = [](const char* name, std::uint64_t otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  const std::uint64_t first = number("KVPUSH_FUZZ_SEED", 1);
  const std::uint64_t num = std::getenv("KVPUSH_FUZZ_SEED") != nullptr ? 1 : number("KVPUSH_FUZZ_SEEDS", 300);
  std::uint64_t num_received = 0;
  std::uint64_t num_sent = 0;
  for (std::uint64_t seed = first; seed < first + num; ++seed) {
    fake::Fuzz fuzz(seed);
    fuzz.run(300);
    num_received += fuzz.num_received;
    num_sent += fuzz.num_sent;
    if (!fuzz.ok) {
      check::fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
  if (num > 50) CHECK(num_received > 5 * num && num_sent > 3 * num);
}
