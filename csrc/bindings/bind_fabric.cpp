// What libfabric has here, for `kvpush doctor`; and writes without the transport, for `kvpush bench`.
#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "shim/fabric_api.hpp"
#include "transport/fabric/plain_writes.hpp"

namespace kvpush::bindings {
namespace {

py::dict fabric_providers(const std::vector<std::string>& libraries) {
  const auto api = check(load_fabric_api(libraries));
  py::list providers;
  for (const FabricProvider& each : list_fabric_providers(*api)) {
    py::dict one;
    one["name"] = each.name;
    one["version"] = describe_fabric_version(each.version);
    one["protocol"] = std::to_string(each.protocol) + "." + std::to_string(each.protocol_version);
    one["delivery_complete"] = each.delivers;
    one["reason"] = each.reason;
    providers.append(std::move(one));
  }
  py::dict found;
  found["library"] = api->path;
  found["version"] = describe_fabric_version(api->version());
  found["providers"] = std::move(providers);
  return found;
}

/// Memory of the host, which the caller keeps.
class BenchWrites {
 public:
  BenchWrites(std::uintptr_t address, std::size_t num_bytes, const std::vector<std::string>& libraries,
              const std::string& provider)
      : writes_(check(make_plain_writes(
            check(load_fabric_api(libraries)), provider,
            {reinterpret_cast<std::byte*>(address), num_bytes}))),  // NOLINT(performance-no-int-to-ptr)
        num_bytes_(num_bytes) {}

  [[nodiscard]] std::string protocol() const { return writes_->protocol(); }

  [[nodiscard]] std::tuple<py::bytes, std::uint64_t, std::uint64_t> address() const {
    const PlainAddress own = writes_->address();
    return {py::bytes(reinterpret_cast<const char*>(own.endpoint.data()), own.endpoint.size()), own.base,
            own.key};
  }

  void connect(const py::bytes& endpoint, std::uint64_t base, std::uint64_t key) {
    const std::string_view view = endpoint;
    const auto raw = std::as_bytes(std::span(view.data(), view.size()));
    check(writes_->connect({{raw.begin(), raw.end()}, base, key}));
  }

  void write(const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& pieces,
             std::size_t write_bytes, std::size_t window) {
    std::vector<PlainPiece> wanted;
    for (const auto& [from, to, size] : pieces) {
      if (size == 0 || size > num_bytes_ || from > num_bytes_ - size || to > num_bytes_ - size) {
        raise({Code::kInvalidArgument, std::to_string(size) + " bytes do not lie within the memory"});
      }
      wanted.push_back({from, to, size});
    }
    Status status;
    {
      const py::gil_scoped_release release;
      status = writes_->write(wanted, write_bytes, window);
    }
    check(status);
  }

  std::vector<std::int64_t> wait(std::vector<std::size_t> counts) {
    Result<std::vector<std::int64_t>> ended = Status();
    {
      const py::gil_scoped_release release;
      ended = writes_->wait(std::move(counts));
    }
    return check(std::move(ended));
  }

 private:
  std::unique_ptr<PlainWrites> writes_;
  std::size_t num_bytes_;
};

}  // namespace

void bind_fabric(py::module_& module) {
  module.def("fabric_providers", &fabric_providers, py::arg("libraries"),
             R"(The library that loads first, its version, and all its providers on this machine.

A provider's "reason" says why kvpush cannot use it, "" if it can. Raises TransportError (none loads), Unsupported.)");
  py::class_<BenchWrites>(module, "BenchWrites", R"(fi_writedata by itself, for `kvpush bench transfer`.

Both sides have the same number of bytes, at an address of the host that stays theirs.)")
      .def(py::init<std::uintptr_t, std::size_t, const std::vector<std::string>&, const std::string&>(),
           py::arg("address"), py::arg("num_bytes"), py::arg("libraries"), py::arg("provider"))
      .def_property_readonly("protocol", &BenchWrites::protocol)
      .def("address", &BenchWrites::address, "What connect() of the other side takes.")
      .def("connect", &BenchWrites::connect, py::arg("endpoint"), py::arg("base"), py::arg("key"))
      .def("write", &BenchWrites::write, py::arg("pieces"), py::arg("write_bytes"), py::arg("window"),
           R"(Writes pieces (from, to, bytes) in parts of write_bytes, at most window of them under way.

Returns when all have completed. Waits for up to a minute.)")
      .def("wait", &BenchWrites::wait, py::arg("counts"),
           R"(Waits until counts[i] writes of piece i have arrived; returns when the last of each did.

Nanoseconds of CLOCK_MONOTONIC. Waits for up to a minute.)");
}

}  // namespace kvpush::bindings
