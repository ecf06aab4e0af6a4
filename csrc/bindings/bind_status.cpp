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
  PyErr_SetString(type.ptr(), status.message().c_str());
  throw py::error_already_set();
}

}  // namespace kvpush::bindings
