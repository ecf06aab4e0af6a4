// The description of a NIXL session: what passes is handed to a library that trusts it.
#include "sealed.hpp"
#include "transport/nixl/description.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush;
  fuzz::each_form(data, size, [](ByteView bytes) {
    const auto decoded = decode_nixl_description(bytes);
    if (!decoded.ok()) {
      fuzz::require(!decoded.status().message().empty(), "an error says what is wrong");
      return;
    }
    const NixlDescription& got = decoded.value();
    const std::uint64_t limit = std::uint64_t{1} << 63U;
    fuzz::require(got.landing.num_slots == 0 ||
                      got.landing.slot_bytes <= (limit - got.landing.base_address) / got.landing.num_slots,
                  "a landing lies within the address space");
    const Bytes form = fuzz::round_trip(decode_nixl_description, got, "a description survives its byte form");
    fuzz::require(fuzz::same(form, bytes), "a description has one byte form");
  });
  return 0;
}
