// The native module: one bind function per area, nothing else.
#include "bindings/bindings.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native half of kvpush. Use the names that the kvpush package exports.";
  module.attr("__version__") = KVPUSH_VERSION;
  kvpush::bindings::bind_event(module);
  kvpush::bindings::bind_engine(module);
  kvpush::bindings::bind_bench(module);
  kvpush::bindings::bind_cuda(module);
  kvpush::bindings::bind_fabric(module);
  module.def("transports", &kvpush::bindings::transports, pybind11::arg("nixl_library") = "",
             pybind11::arg("fabric_libraries") = std::vector<std::string>{"libfabric.so.1"},
             pybind11::arg("fabric_provider") = "",
             pybind11::arg("fabric_rails") = std::vector<std::string>{},
             "Which transports this build and machine can use: name to '' or to the reason why not.");
  module.def("fabric_rails", &kvpush::bindings::fabric_rails, pybind11::arg("libraries"),
             pybind11::arg("provider") = "", pybind11::arg("rails") = std::vector<std::string>{},
             pybind11::arg("gpu_pci") = "",
             "The NICs that libfabric has, and which of them become an engine's rails.");
  module.def("paths", &kvpush::bindings::paths, pybind11::arg("config"),
             "What this configuration may choose from: (name, reach, 'host', 'rdma' or 'network').");
}
