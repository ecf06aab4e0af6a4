#include "transport/nixl/description.hpp"

#include <algorithm>
#include <utility>

namespace kvpush {
namespace {

constexpr std::uint32_t kMagic = 0x4c58494e;  // "NIXL"
constexpr std::uint16_t kVersion = 2;
constexpr std::size_t kMaxMetadataBytes = std::size_t{256} << 10U;
constexpr std::size_t kMaxBackendsBytes = 256;

void put_uuid(ByteWriter& out, const Uuid& id) {
  out.put_raw(std::as_bytes(std::span(id.bytes)));
}

template <typename Id>
Id get_uuid(ByteReader& in) {
  Id id;
  const ByteView raw = in.get_raw(id.bytes.size());
  if (raw.size() == id.bytes.size()) std::memcpy(id.bytes.data(), raw.data(), raw.size());
  return id;
}

Bytes get_metadata(ByteReader& in) {
  const ByteView raw = in.get_blob(kMaxMetadataBytes);
  return {raw.begin(), raw.end()};
}

Status refused(const std::string& why) {
  return {Code::kHandshake, "nixl description: " + why};
}

Status check_landing(const NixlLandingInfo& landing) {
  const NixlMemoryPlace& place = landing.place;
  if (place.type != kNixlVram && (place.type != kNixlDram || place.device != 0)) {
    return refused("memory of type " + std::to_string(place.type) + ", device " +
                   std::to_string(place.device));
  }
  if (landing.base_address == 0) {
    const bool empty = place.type == kNixlDram && landing.slot_bytes == 0 && landing.num_slots == 0 &&
                       landing.access.empty();
    return empty ? Status() : refused("a landing without an address");
  }
  if (landing.slot_bytes == 0 || landing.num_slots == 0 || landing.access.empty()) {
    return refused("an empty landing");
  }
  // Sizes of any honest landing are far below 2^63, so neither product nor end can wrap unnoticed.
  const std::uint64_t limit = std::uint64_t{1} << 63U;
  if (landing.base_address >= limit ||
      landing.slot_bytes > (limit - landing.base_address) / landing.num_slots) {
    return refused("the landing does not fit the address space");
  }
  return {};
}

}  // namespace

std::string nixl_agent_name(const Incarnation& incarnation) {
  return "kvpush-" + to_string(incarnation);
}

Bytes encode(const NixlDescription& description) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  put_uuid(out, description.session);
  put_uuid(out, description.incarnation);
  out.put_text(description.backends);
  put_identity(out, description.process);
  out.put_blob(description.connection);
  out.put(description.landing.base_address);
  out.put(description.landing.slot_bytes);
  out.put(description.landing.num_slots);
  out.put(static_cast<std::uint8_t>(description.landing.place.type));
  out.put(description.landing.place.device);
  out.put_blob(description.landing.access);
  out.put(fnv1a(out.bytes()));
  return std::move(out).take();
}

Result<NixlDescription> decode_nixl_description(ByteView bytes) {
  ByteReader in(bytes);
  if (in.get<std::uint32_t>() != kMagic || !in.ok()) return refused("not one of the nixl transport");
  const auto version = in.get<std::uint16_t>();
  if (version != kVersion) {
    return refused("version " + std::to_string(version) + ", expected " + std::to_string(kVersion));
  }
  NixlDescription result;
  result.session = get_uuid<SessionId>(in);
  result.incarnation = get_uuid<Incarnation>(in);
  result.backends = in.get_text(kMaxBackendsBytes);
  result.process = get_identity(in);
  result.connection = get_metadata(in);
  result.landing.base_address = in.get<std::uint64_t>();
  result.landing.slot_bytes = in.get<std::uint64_t>();
  result.landing.num_slots = in.get<std::uint32_t>();
  result.landing.place.type = in.get<std::uint8_t>();
  result.landing.place.device = in.get<std::uint32_t>();
  result.landing.access = get_metadata(in);
  const auto checksum = in.get<std::uint64_t>();
  if (!in.done()) return refused("truncated or overlong (" + std::to_string(bytes.size()) + " bytes)");
  if (checksum != fnv1a(bytes.first(bytes.size() - sizeof(checksum)))) return refused("damaged (checksum)");
  if (result.connection.empty()) return refused("no connection metadata");
  const bool printable =
      std::all_of(result.backends.begin(), result.backends.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!printable) return refused("unprintable backend names");
  KVPUSH_TRY(check_landing(result.landing));
  return result;
}

}  // namespace kvpush
