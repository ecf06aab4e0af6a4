// CUDA as Python sees it: which devices there are, and the packer of a cache on one.
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "base/ids.hpp"
#include "bindings/bindings.hpp"
#include "pack/cuda/cuda_packer.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush::bindings {
namespace {

Result<std::shared_ptr<const CudaDriver>> driver_at(const std::string& library) {
  return library.empty() ? load_cuda_driver() : load_cuda_driver(library);
}

struct Found {
  std::string name;
  Uuid uuid;
  int num_sms = 0;
  int major = 0;
  int minor = 0;
};

/// Without a context on it: a device that others have to themselves is found too.
Status look_at(const CudaDriver& cuda, int index, Found& found) {
  char name[256] = {};
  KVPUSH_TRY(cuda.check(cuda.device_get_name(name, sizeof(name), index), "cuDeviceGetName"));
  found.name = name;
  CudaUuid uuid{};
  KVPUSH_TRY(cuda.check(cuda.device_get_uuid(&uuid, index), "cuDeviceGetUuid"));
  static_assert(sizeof(uuid.bytes) == sizeof(found.uuid.bytes));
  std::memcpy(found.uuid.bytes.data(), uuid.bytes, sizeof(uuid.bytes));
  const auto attribute = [&](int which, int* value) {
    return cuda.check(cuda.device_get_attribute(value, which, index), "cuDeviceGetAttribute");
  };
  KVPUSH_TRY(attribute(kCudaAttributeNumSms, &found.num_sms));
  KVPUSH_TRY(attribute(kCudaAttributeComputeMajor, &found.major));
  return attribute(kCudaAttributeComputeMinor, &found.minor);
}

struct Survey {
  int driver_version = 0;
  std::vector<Found> devices;
};

Result<Survey> survey(const std::string& library) {
  const auto driver = driver_at(library);
  if (!driver.ok()) return driver.status();
  const CudaDriver& cuda = *driver.value();
  Survey survey;
  KVPUSH_TRY(cuda.check(cuda.driver_get_version(&survey.driver_version), "cuDriverGetVersion"));
  int count = 0;
  KVPUSH_TRY(cuda.check(cuda.device_get_count(&count), "cuDeviceGetCount"));
  survey.devices.resize(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) KVPUSH_TRY(look_at(cuda, i, survey.devices[static_cast<std::size_t>(i)]));
  return survey;
}

py::list cuda_devices(const std::string& library) {
  const auto found = [&] {
    const py::gil_scoped_release release;
    return survey(library);
  }();
  const Survey result = check(found);
  py::list devices;
  for (const Found& one : result.devices) {
    py::dict device;
    device["index"] = devices.size();
    device["name"] = one.name;
    device["uuid"] = to_string(one.uuid);
    device["compute"] = std::to_string(one.major) + "." + std::to_string(one.minor);
    device["num_sms"] = one.num_sms;
    device["driver"] = std::to_string(result.driver_version / 1000) + "." +
                       std::to_string(result.driver_version % 1000 / 10);
    devices.append(device);
  }
  return devices;
}

Result<Bytes> read_kernels(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> raw{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (raw.empty()) {
    return Status(Code::kUnsupported,
                  "the cache is on a CUDA device, but this installation was built without CUDA kernels (no " +
                      path + "): build with nvcc on PATH (KVPUSH_NVCC)");
  }
  const auto bytes = std::as_bytes(std::span(raw));
  return Bytes(bytes.begin(), bytes.end());
}

}  // namespace

std::shared_ptr<const CudaDevice> device_from(const py::dict& description, int index) {
  if (index < 0) return nullptr;
  auto driver = check(driver_at(description["cuda_library"].cast<std::string>()));
  return check(CudaDevice::open(std::move(driver), index));
}

Result<std::unique_ptr<Packer>> make_cuda_packer(const Cache& cache, std::shared_ptr<const CudaDevice> device,
                                                 const std::string& kernels,
                                                 const CudaPackerOptions& options) {
  const Result<Bytes> bytes = read_kernels(kernels);
  if (!bytes.ok()) return bytes.status();
  return kvpush::make_cuda_packer(cache, std::move(device), bytes.value(), options);
}

void bind_cuda(py::module_& module) {
  module.def("cuda_devices", &cuda_devices, py::arg("library") = "",
             R"(The CUDA devices of this process: dicts of index, name, uuid, compute, num_sms, driver.

driver is the CUDA version that the driver supports. library: path of the driver, "" for libcuda.so.1. No context is
made. Errors: Unsupported says why there are none.)");
}

}  // namespace kvpush::bindings
