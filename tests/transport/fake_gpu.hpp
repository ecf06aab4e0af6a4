// GPUs of the fake driver, for the tests of what transports do with one.
#pragma once

#include <cstdlib>
#include <memory>

#include "check.hpp"
#include "fake_cuda.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush::conformance {

/// The fake with two devices.
inline const FakeCuda& fake() {
  static const Result<FakeCuda> loaded = [] {
    ::setenv("FAKE_CUDA_DEVICES", "2", 1);
    return FakeCuda::load(FAKE_CUDA_LIBRARY);
  }();
  return loaded.value();
}

/// Opened anew by each call: what is left of it when its users are gone is a leak.
inline std::shared_ptr<const CudaDevice> fake_gpu(int index = 0) {
  (void)fake();
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  if (!CHECK(driver.ok())) return nullptr;
  auto device = CudaDevice::open(driver.value(), index);
  return CHECK(device.ok()) ? device.value() : nullptr;
}

}  // namespace kvpush::conformance
