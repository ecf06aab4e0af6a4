// Identifiers, each its own type so that one cannot pass for another.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace kvpush {

/// 128 random bits. Names an engine's life (incarnation) or one session.
struct Uuid {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Uuid&) const = default;
};

/// A fresh one from the kernel's random source. Thread-safe.
[[nodiscard]] Uuid random_uuid();
/// 32 lower-case hex digits.
[[nodiscard]] std::string to_string(const Uuid& id);

/// One engine, from construction to close; random.
struct Incarnation : Uuid {};
/// One P worker and one D worker that have exchanged offer and answer; random, chosen by D.
struct SessionId : Uuid {};

/// One claim of one request over one session. D issues them in increasing order, never twice.
using TransferId = std::uint64_t;
/// A push or receive of this engine, as the caller sees it. Counts from 1.
using HandleId = std::uint64_t;
/// One outstanding post or pack of this engine.
using TicketId = std::uint64_t;

}  // namespace kvpush

template <>
struct std::hash<kvpush::Uuid> {
  std::size_t operator()(const kvpush::Uuid& id) const noexcept;
};
template <>
struct std::hash<kvpush::SessionId> : std::hash<kvpush::Uuid> {};
