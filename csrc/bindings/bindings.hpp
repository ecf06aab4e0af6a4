// What the files of the native module share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "base/status.hpp"
#include "cache/cache.hpp"
#include "engine/engine.hpp"
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

/// The device that a cache is on, of the driver at `library` (empty: the default). Unsupported says why not.
Result<std::shared_ptr<const CudaDevice>> open_cuda_device(const std::string& library, int index);
/// `kernels` is the file that has them. Unsupported says what is missing and how to get it.
Result<std::unique_ptr<Packer>> make_cuda_packer(const Cache& cache, std::shared_ptr<const CudaDevice> device,
                                                 const std::string& kernels, unsigned num_sms);

/// Transport name to "", or to why it cannot be used here.
py::dict transports(const std::string& nixl_library);

void bind_event(py::module_& module);
void bind_engine(py::module_& module);
void bind_bench(py::module_& module);
void bind_cuda(py::module_& module);

}  // namespace kvpush::bindings
