// From status to Python exception: the only place that knows both.
#include "bindings/bindings.hpp"

namespace kvpush::bindings {
namespace {

const char* exception_name(Code code) {
  switch (code) {
    case Code::kOk: break;
    case Code::kInvalidArgument: return "InvalidArgument";
    case Code::kDuplicateKey: return "DuplicateKey";
    case Code::kQueueFull: return "QueueFull";
    case Code::kClosed: return "ClosedError";
    case Code::kHandshake: return "HandshakeError";
    case Code::kPeerLost: return "PeerLost";
    case Code::kExhausted: return "Exhausted";
    case Code::kUnsupported: return "Unsupported";
    case Code::kTransport: return "TransportError";
  }
  return "KvpushError";
}

}  // namespace

void raise(const Status& status) {
  const py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("kvpush.errors").attr(exception_name(status.code()));
  // A message may quote a peer, whose bytes need not be text.
  const std::string& message = status.message();
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(message.data(), static_cast<py::ssize_t>(message.size()), "replace"));
  if (!text) throw py::error_already_set();
  PyErr_SetObject(type.ptr(), text.ptr());
  throw py::error_already_set();
}

}  // namespace kvpush::bindings
