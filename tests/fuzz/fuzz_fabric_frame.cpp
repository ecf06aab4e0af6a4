// A message as libfabric hands it over, from whoever knows the endpoint; and what a notice's numbers do to
// the arrivals of a session.
#include "sealed.hpp"
#include "transport/fabric/arrivals.hpp"
#include "transport/fabric/operations.hpp"

namespace {

using namespace kvpush;

/// The writes of a box that is believed complete it, and nothing else is delivered.
void arrive(const FabricFrame& frame) {
  FabricArrivals arrivals;
  if (!arrivals.add_notice(frame.first_write, frame.num_writes, frame.payload)) {
    fuzz::require(arrivals.is_broken() && !arrivals.take(), "a first notice is refused for a lie");
    return;
  }
  const std::uint64_t end = frame.first_write + frame.num_writes;
  fuzz::require(frame.first_write < end && end <= FabricArrivals::kWindow, "the writes are in the window");
  for (std::uint64_t write = frame.first_write; write < end; ++write) {
    fuzz::require(!arrivals.take(), "a box waits for its last write");
    fuzz::require(arrivals.add_write(static_cast<std::uint16_t>(write)), "a write of the box is news");
  }
  const auto notice = arrivals.take();
  fuzz::require(notice && fuzz::same(*notice, frame.payload), "the box is delivered with its notice");
  fuzz::require(!arrivals.take(), "and once");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ByteView bytes = std::as_bytes(std::span(data, size));
  const auto frame = decode_fabric_frame(bytes);
  if (!frame) return 0;
  ByteWriter again;
  again.put_raw(std::as_bytes(std::span(frame->session.bytes)));
  again.put(static_cast<std::uint8_t>(frame->kind));
  again.put(frame->num_writes);
  again.put(frame->first_write);
  again.put_raw(frame->payload);
  fuzz::require(fuzz::same(again.bytes(), bytes), "a frame has one byte form");
  if (frame->kind == FabricKind::kNotice) arrive(*frame);
  return 0;
}
