#include "transport/fabric/description.hpp"

#include <algorithm>
#include <utility>

#include "transport/fabric/nics.hpp"

namespace kvpush {
namespace {

constexpr std::uint32_t kMagic = 0x52424146;  // "FABR"
constexpr std::uint16_t kVersion = 2;
constexpr std::size_t kMaxNameBytes = 256;
constexpr std::size_t kMaxProtocolBytes = 256;

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

/// False: its flag is none.
bool get_rail(ByteReader& in, FabricRailInfo& rail) {
  const ByteView endpoint = in.get_blob(kMaxNameBytes);
  rail.endpoint.assign(endpoint.begin(), endpoint.end());
  const auto alive = in.get<std::uint8_t>();
  rail.alive = alive == 1;
  rail.base = in.get<std::uint64_t>();
  rail.key = in.get<std::uint64_t>();
  return alive <= 1;
}

Status refused(const std::string& why) {
  return {Code::kHandshake, "fabric description: " + why};
}

Status check_landing(const FabricDescription& description) {
  const FabricLandingInfo& landing = description.landing;
  if (landing.num_slots == 0) {
    bool empty = landing.slot_bytes == 0 && landing.index == 0 && landing.max_writes == 0;
    for (const FabricRailInfo& rail : description.rails) empty &= rail.base == 0 && rail.key == 0;
    return empty ? Status() : refused("a landing without slots");
  }
  if (landing.slot_bytes == 0 || landing.max_writes == 0) return refused("slots of no bytes or writes");
  // Sizes of any honest landing are far below 2^63, so neither product nor end can wrap unnoticed.
  const std::uint64_t limit = std::uint64_t{1} << 63U;
  for (const FabricRailInfo& rail : description.rails) {
    if (rail.base >= limit || landing.slot_bytes > (limit - rail.base) / landing.num_slots) {
      return refused("the landing does not fit the address space");
    }
  }
  return {};
}

Status check_rails(const FabricDescription& description) {
  bool alive = false;
  for (const FabricRailInfo& rail : description.rails) {
    if (rail.endpoint.empty()) return refused("a rail without an address");
    alive |= rail.alive;
  }
  return alive ? Status() : refused("no rail");
}

}  // namespace

Bytes encode(const FabricDescription& description) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  put_uuid(out, description.session);
  put_uuid(out, description.incarnation);
  out.put_text(description.protocol);
  put_identity(out, description.process);
  out.put(static_cast<std::uint8_t>(description.rails.size()));
  for (const FabricRailInfo& rail : description.rails) {
    out.put_blob(rail.endpoint);
    out.put(static_cast<std::uint8_t>(rail.alive));
    out.put(rail.base);
    out.put(rail.key);
  }
  out.put(description.landing.slot_bytes);
  out.put(description.landing.num_slots);
  out.put(description.landing.max_writes);
  out.put(description.landing.index);
  out.put(fnv1a(out.bytes()));
  return std::move(out).take();
}

Result<FabricDescription> decode_fabric_description(ByteView bytes) {
  ByteReader in(bytes);
  if (in.get<std::uint32_t>() != kMagic || !in.ok()) return refused("not one of the fabric transport");
  const auto version = in.get<std::uint16_t>();
  if (version != kVersion) {
    return refused("version " + std::to_string(version) + ", expected " + std::to_string(kVersion));
  }
  FabricDescription result;
  result.session = get_uuid<SessionId>(in);
  result.incarnation = get_uuid<Incarnation>(in);
  result.protocol = in.get_text(kMaxProtocolBytes);
  result.process = get_identity(in);
  const auto num_rails = in.get<std::uint8_t>();
  if (num_rails > kFabricMaxRails) {
    return refused(std::to_string(num_rails) + " rails, the limit is " + std::to_string(kFabricMaxRails));
  }
  bool plausible = true;
  for (std::uint8_t i = 0; i < num_rails; ++i) plausible &= get_rail(in, result.rails.emplace_back());
  result.landing.slot_bytes = in.get<std::uint64_t>();
  result.landing.num_slots = in.get<std::uint32_t>();
  result.landing.max_writes = in.get<std::uint32_t>();
  result.landing.index = in.get<std::uint16_t>();
  const auto checksum = in.get<std::uint64_t>();
  if (!in.done()) return refused("truncated or overlong (" + std::to_string(bytes.size()) + " bytes)");
  if (checksum != fnv1a(bytes.first(bytes.size() - sizeof(checksum)))) return refused("damaged (checksum)");
  if (!plausible) return refused("a rail that is neither alive nor dead");
  KVPUSH_TRY(check_rails(result));
  const bool printable = std::all_of(result.protocol.begin(), result.protocol.end(),
                                     [](char c) { return c >= ' ' && c <= '~'; });
  if (!printable) return refused("an unprintable protocol");
  KVPUSH_TRY(check_landing(result));
  return result;
}

}  // namespace kvpush
