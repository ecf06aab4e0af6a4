// One GPU of this process, as the packer and the transports use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.hpp"
#include "shim/cuda_driver.hpp"

namespace kvpush {

/// What a kernel of the device sees of another device's writes (a NIC's) into its memory, once their end is
/// known on the host.
enum class CudaDirectWrites : std::uint8_t {
  kOrdered,    ///< all of it
  kFlushed,    ///< all of it after cuFlushGPUDirectRDMAWrites
  kUnordered,  ///< perhaps not all of it, and nothing can be done
};

/// Holds the device's primary context, the one that torch uses too. Thread-safe: every call below, and every
/// direct use of driver(), is made under a CudaScope.
class CudaDevice {
 public:
  /// Errors: Unsupported (no driver, no such device), Transport.
  static Result<std::shared_ptr<const CudaDevice>> open(std::shared_ptr<const CudaDriver> driver, int index);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  /// Releases the context, unless the driver is already going down.
  ~CudaDevice();

  [[nodiscard]] const CudaDriver& driver() const noexcept { return *driver_; }
  [[nodiscard]] int index() const noexcept { return index_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// 32 hex digits; the same in every process.
  [[nodiscard]] const std::string& uuid() const noexcept { return uuid_; }
  /// Where it is in the host, as sysfs spells it: "0000:3b:00.0"; empty if the driver does not tell.
  [[nodiscard]] const std::string& pci() const noexcept { return pci_; }
  [[nodiscard]] int num_sms() const noexcept { return num_sms_; }
  /// 10 * major + minor.
  [[nodiscard]] int compute() const noexcept { return compute_; }
  [[nodiscard]] CudaContext context() const noexcept { return context_; }
  [[nodiscard]] CudaDirectWrites direct_writes() const noexcept { return direct_writes_; }

 private:
  CudaDevice(std::shared_ptr<const CudaDriver> driver, int index)
      : driver_(std::move(driver)), index_(index) {}

  std::shared_ptr<const CudaDriver> driver_;
  int index_;
  CudaContext context_ = nullptr;
  std::string name_;
  std::string uuid_;
  std::string pci_;
  int num_sms_ = 0;
  int compute_ = 0;
  CudaDirectWrites direct_writes_ = CudaDirectWrites::kUnordered;
};

/// Makes a device's context current on this thread while it lives, and leaves what was current before. If
/// that fails, the calls made under it fail. Also lets this thread make any call while another one captures a
/// CUDA graph: an allocation or a query would otherwise spoil that graph, and fail.
class CudaScope {
 public:
  explicit CudaScope(const CudaDevice& device)
      : driver_(device.driver()), pushed_(driver_.context_push(device.context()) == kCudaOk) {
    (void)driver_.exchange_capture_mode(&capture_mode_);
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  ~CudaScope() {
    (void)driver_.exchange_capture_mode(&capture_mode_);
    CudaContext popped = nullptr;
    if (pushed_) (void)driver_.context_pop(&popped);
  }

 private:
  const CudaDriver& driver_;
  const bool pushed_;
  int capture_mode_ = kCudaCaptureModeRelaxed;  ///< and from then on what it was before
};

}  // namespace kvpush
