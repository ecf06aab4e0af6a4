// Offers, answers and hellos.
#include "engine/handshake.hpp"
#include "sealed.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvpush;
  fuzz::each_form(data, size, [](ByteView bytes) {
    const auto offer = decode_offer(bytes);
    if (offer.ok()) {
      const Bytes form = fuzz::round_trip(decode_offer, offer.value(), "an offer survives its byte form");
      fuzz::require(fuzz::same(form, bytes), "an offer has one byte form");
    }
    const auto answer = decode_answer(bytes);
    if (answer.ok()) {
      const Bytes form = fuzz::round_trip(decode_answer, answer.value(), "an answer survives its byte form");
      fuzz::require(fuzz::same(form, bytes), "an answer has one byte form");
    }
    const auto hello = decode_hello(bytes);
    if (hello.ok()) {
      const Bytes form = fuzz::round_trip(decode_hello, hello.value(), "a hello survives its byte form");
      fuzz::require(fuzz::same(form, bytes), "a hello has one byte form");
    }
    fuzz::require(int{offer.ok()} + int{answer.ok()} + int{hello.ok()} <= 1, "bytes are one of the three");
  });
  return 0;
}
