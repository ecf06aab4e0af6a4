// The message codec: whatever decodes has one byte form.
#include "protocol/messages.hpp"
#include "sealed.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush;
  fuzz::each_form(data, size, [](ByteView bytes) {
    const auto decoded = protocol::decode(bytes);
    fuzz::require(bytes.size() <= protocol::kMaxMessageBytes || !decoded.ok(),
                  "a message has a largest size");
    if (!decoded.ok()) {
      fuzz::require(!decoded.status().message().empty(), "an error says what is wrong");
      return;
    }
    const Bytes form =
        fuzz::round_trip(protocol::decode, decoded.value(), "a message survives its byte form");
    // A FAIL code that this version does not know is read as a breach.
    const auto* fail = std::get_if<protocol::Fail>(&decoded.value().body);
    if (fail == nullptr || fail->code != FailCode::kBreach) {
      fuzz::require(fuzz::same(form, bytes), "a message has one byte form");
    }
  });
  return 0;
}
