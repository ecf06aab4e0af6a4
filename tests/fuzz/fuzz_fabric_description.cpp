// The description of a libfabric session: what passes is handed to providers that trust it.
#include "sealed.hpp"
#include "transport/fabric/description.hpp"
#include "transport/fabric/nics.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush;
  fuzz::each_form(data, size, [](ByteView bytes) {
    const auto decoded = decode_fabric_description(bytes);
    if (!decoded.ok()) {
      fuzz::require(!decoded.status().message().empty(), "an error says what is wrong");
      return;
    }
    const FabricDescription& got = decoded.value();
    const std::uint64_t limit = std::uint64_t{1} << 63U;
    fuzz::require(!got.rails.empty() && got.rails.size() <= kFabricMaxRails, "there are rails, not too many");
    for (const FabricRailInfo& rail : got.rails) {
      fuzz::require(!rail.endpoint.empty(), "every rail has an address");
      fuzz::require(got.landing.num_slots == 0 ||
                        (got.landing.slot_bytes != 0 &&
                         got.landing.slot_bytes <= (limit - rail.base) / got.landing.num_slots),
                    "a landing lies within the address space");
    }
    const Bytes form =
        fuzz::round_trip(decode_fabric_description, got, "a description survives its byte form");
    fuzz::require(fuzz::same(form, bytes), "a description has one byte form");
  });
  return 0;
}
