#include "base/ids.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace kvpush {

Uuid random_uuid() {
  Uuid id;
  std::size_t have = 0;
  while (have < id.bytes.size()) {
    const ssize_t got = getrandom(id.bytes.data() + have, id.bytes.size() - have, 0);
    if (got > 0) {
      have += static_cast<std::size_t>(got);
    } else if (errno != EINTR) {
      std::abort();  // no random source: identities would collide
    }
  }
  return id;
}

std::string to_string(const Uuid& id) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * id.bytes.size());
  for (const std::uint8_t byte : id.bytes) {
    text.push_back(kHex[byte >> 4U]);
    text.push_back(kHex[byte & 15U]);
  }
  return text;
}

}  // namespace kvpush

std::size_t std::hash<kvpush::Uuid>::operator()(const kvpush::Uuid& id) const noexcept {
  std::size_t word = 0;
  std::memcpy(&word, id.bytes.data(), sizeof(word));
  return word;
}
