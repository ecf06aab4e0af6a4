// What the targets have in common: inputs behind a hash that fits, and round trips.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "base/bytes.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvpush::fuzz {

/// Fails the run, in every build.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

/// Calls visit(bytes) with the input as it is, and with its hash put right: nearly every mutated input would
/// end at the hash.
template <typename Visit>
void each_form(const std::uint8_t* data, std::size_t size, Visit visit) {
  const ByteView raw = std::as_bytes(std::span(data, size));
  visit(raw);
  if (size < sizeof(std::uint64_t)) return;
  ByteWriter sealed;
  sealed.put_raw(raw.first(size - sizeof(std::uint64_t)));
  sealed.put(fnv1a(sealed.bytes()));
  visit(ByteView(sealed.bytes()));
}

/// What was decoded has one byte form, and that form decodes to itself.
template <typename Decode, typename T>
Bytes round_trip(Decode decode, const T& value, const char* what) {
  const Bytes once = encode(value);
  const auto again = decode(ByteView(once));
  require(again.ok(), what);
  require(encode(again.value()) == once, what);
  return once;
}

inline bool same(ByteView a, ByteView b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

}  // namespace kvpush::fuzz
