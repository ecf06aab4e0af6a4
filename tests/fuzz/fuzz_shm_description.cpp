// The description of a shared-memory session, read with every field expected as it was sent, or not.
#include "sealed.hpp"
#include "transport/shm/description.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush;
  fuzz::each_form(data, size, [](ByteView bytes) {
    for (const auto kind : {shm::DescriptionKind::kOffer, shm::DescriptionKind::kAnswer}) {
      // What the corpus' descriptions hold: so that mutations of other fields come through.
      shm::Description expected;
      expected.kind = kind;
      expected.host = "host/net:1";
      expected.session.bytes.fill(7);
      expected.slot_bytes = 4096;
      expected.num_slots = 8;
      const auto decode = [&expected](ByteView form) { return shm::decode_matching(form, expected); };
      const auto decoded = decode(bytes);
      if (!decoded.ok()) {
        fuzz::require(!decoded.status().message().empty(), "an error says what is wrong");
        continue;
      }
      const shm::Description& got = decoded.value();
      fuzz::require(got.kind == kind && got.host == expected.host && got.session == expected.session &&
                        got.slot_bytes == expected.slot_bytes && got.num_slots == expected.num_slots,
                    "what was expected is what was read");
      const bool offers_device = kind == shm::DescriptionKind::kOffer && got.on_device;
      fuzz::require(offers_device == !got.device.gpu.empty() && offers_device == (got.device.address != 0),
                    "device memory is described when it is offered");
      const Bytes form = fuzz::round_trip(decode, got, "a description survives its byte form");
      fuzz::require(fuzz::same(form, bytes), "a description has one byte form");
    }
  });
  return 0;
}
