// What the files of the native module share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "cache/cache.hpp"
#include "engine/engine.hpp"
#include "pack/cuda/cuda_packer.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush::bindings {

namespace py = pybind11;

/// Raises the Python exception of this status's code (kvpush.errors).
[[noreturn]] void raise(const Status& status);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}
template <typename T>
T check(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

/// kvpush.Cache.to_core()
std::unique_ptr<const Cache> cache_from(const py::dict& description);
/// kvpush.Config.to_core(), and the parts that it names.
EngineConfig config_from(const py::dict& description);
EngineParts parts_from(const py::dict& description, const Cache& cache);

/// The CUDA device with this index, by the driver that the configuration names; null for -1.
std::shared_ptr<const CudaDevice> device_from(const py::dict& description, int index);
/// The packer of a cache on `device`; `kernels` is the file of the copy kernels.
Result<std::unique_ptr<Packer>> make_cuda_packer(const Cache& cache, std::shared_ptr<const CudaDevice> device,
                                                 const std::string& kernels,
                                                 const CudaPackerOptions& options);
/// The packer of a cache as the configuration wants it; `device` is the cache's.
std::unique_ptr<Packer> packer_from(const py::dict& description, const Cache& cache,
                                    std::shared_ptr<const CudaDevice> device);

/// Transport name to "", or to why it cannot be used here.
py::dict transports(const std::string& nixl_library, const std::vector<std::string>& fabric_libraries,
                    const std::string& fabric_provider, const std::vector<std::string>& fabric_rails);

/// The NICs that libfabric has for transport fabric, and which of them an engine with these settings takes.
py::list fabric_rails(const std::vector<std::string>& libraries, const std::string& provider,
                      const std::vector<std::string>& rails, const std::string& gpu_pci);

/// Without making any: (name, reach, "host", "rdma" or "network"), in the order in which "auto" takes equals.
py::list paths(const py::dict& description);

void bind_event(py::module_& module);
void bind_engine(py::module_& module);
void bind_bench(py::module_& module);
void bind_cuda(py::module_& module);
void bind_fabric(py::module_& module);

}  // namespace kvpush::bindings
