// The native module: one bind function per area, nothing else.
#include "bindings/bindings.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native half of kvpush. Use the names that the kvpush package exports.";
  module.attr("__version__") = KVPUSH_VERSION;
  kvpush::bindings::bind_event(module);
  kvpush::bindings::bind_engine(module);
  kvpush::bindings::bind_bench(module);
  kvpush::bindings::bind_cuda(module);
  module.def("transports", &kvpush::bindings::transports, pybind11::arg("nixl_library") = "",
             pybind11::arg("fabric_libraries") = std::vector<std::string>{"libfabric.so.1"},
             pybind11::arg("fabric_provider") = "",
             "Which transports this build and machine can use: name to '' or to the reason why not.");
  module.def("paths", &kvpush::bindings::paths, pybind11::arg("config"),
             "What this configuration may choose from: (name, reach, 'host', 'rdma' or 'network').");
}
