// Events and statistics as Python sees them.

#include "bindings/bindings.hpp"

namespace kvpush::bindings {
namespace {

using protocol::Event;

const char* kind_name(const Event& event) {
  switch (event.kind) {
    case Event::Kind::kSent: return "sent";
    case Event::Kind::kReceived: return "received";
    case Event::Kind::kFailed: return "failed";
    case Event::Kind::kLost: break;
  }
  return "lost";
}

const char* side_name(const Event& event) {
  switch (event.side) {
    case Event::Side::kPush: return "push";
    case Event::Side::kReceive: return "receive";
    case Event::Side::kNone: break;
  }
  return "";
}

std::string repr(const Event& event) {
  std::string text = std::string("Event(kind='") + kind_name(event) + "', key='" + event.key + "', status='" +
                     std::string(to_string(event.status)) + "', bytes=" + std::to_string(event.bytes);
  if (!event.detail.empty()) text += ", detail='" + event.detail + "'";
  return text + ")";
}

}  // namespace

void bind_event(py::module_& module) {
  py::class_<Event>(module, "Event", R"(One thing that happened, as Engine.poll() returns it.

kind is 'sent' (a push is packed: its blocks are the caller's), 'received' (all wanted positions are in the
destination blocks), 'failed' (with the reason in status and detail), or 'lost' (a session ended; its
transfers have failed before).)")
      .def_property_readonly("kind", &kind_name, "'sent', 'received', 'failed' or 'lost'.")
      .def_property_readonly("side", &side_name, "'push', 'receive', or '' when lost.")
      .def_readonly("handle", &Event::handle, "The handle of the Push or Receive; 0 when lost.")
      .def_readonly("key", &Event::key)
      .def_readonly("transfer", &Event::transfer,
                    "D's id of the transfer; 0 for a push that was never paired.")
      .def_property_readonly(
          "peer",
          [](const Event& event) { return event.session == SessionId{} ? "" : to_string(event.session); },
          "The session, as establish() named it; '' for a push that was never paired.")
      .def_property_readonly(
          "status", [](const Event& event) { return std::string(to_string(event.status)); },
          "'ok', or a code of docs/errors.md.")
      .def_readonly("detail", &Event::detail, "One line for a person.")
      .def_readonly("bytes", &Event::bytes, "KV bytes moved.")
      .def_readonly("boxes", &Event::boxes, "Boxes, each one network operation.")
      .def_readonly("timings", &Event::timings, "Stage to microseconds.")
      .def("__repr__", &repr);
}

}  // namespace kvpush::bindings
