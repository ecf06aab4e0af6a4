#include "transport/fabric/description.hpp"

#include <algorithm>
#include <utility>

namespace kvpush {
namespace {

constexpr std::uint32_t kMagic = 0x52424146;  // "FABR"
constexpr std::uint16_t kVersion = 1;
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

Status refused(const std::string& why) {
  return {Code::kHandshake, "fabric description: " + why};
}

Status check_landing(const FabricLandingInfo& landing) {
  if (landing.num_slots == 0) {
    const bool empty = landing.base == 0 && landing.key == 0 && landing.slot_bytes == 0 && landing.index == 0;
    return empty ? Status() : refused("a landing without slots");
  }
  if (landing.slot_bytes == 0) return refused("slots of no bytes");
  // Sizes of any honest landing are far below 2^63, so neither product nor end can wrap unnoticed.
  const std::uint64_t limit = std::uint64_t{1} << 63U;
  if (landing.base >= limit || landing.slot_bytes > (limit - landing.base) / landing.num_slots) {
    return refused("the landing does not fit the address space");
  }
  return {};
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
  out.put_blob(description.endpoint);
  out.put(description.landing.base);
  out.put(description.landing.key);
  out.put(description.landing.slot_bytes);
  out.put(description.landing.num_slots);
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
  const ByteView endpoint = in.get_blob(kMaxNameBytes);
  result.endpoint.assign(endpoint.begin(), endpoint.end());
  result.landing.base = in.get<std::uint64_t>();
  result.landing.key = in.get<std::uint64_t>();
  result.landing.slot_bytes = in.get<std::uint64_t>();
  result.landing.num_slots = in.get<std::uint32_t>();
  result.landing.index = in.get<std::uint16_t>();
  const auto checksum = in.get<std::uint64_t>();
  if (!in.done()) return refused("truncated or overlong (" + std::to_string(bytes.size()) + " bytes)");
  if (checksum != fnv1a(bytes.first(bytes.size() - sizeof(checksum)))) return refused("damaged (checksum)");
  if (result.endpoint.empty()) return refused("no address");
  const bool printable = std::all_of(result.protocol.begin(), result.protocol.end(),
                                     [](char c) { return c >= ' ' && c <= '~'; });
  if (!printable) return refused("an unprintable protocol");
  KVPUSH_TRY(check_landing(result.landing));
  return result;
}

}  // namespace kvpush
