// Waits for CUDA events of others without blocking a thread, and without holding their events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "pack/packer.hpp"
#include "shim/cuda_device.hpp"

namespace kvpush {

/// A fence is an event of ours, behind a wait for the caller's event on one stream for all: the caller's may
/// be recorded anew, and it takes one of the device's few hardware queues however many fences there are. So a
/// fence also waits for those before it, but one whose event has happened at the capture waits for nothing.
/// Events are kept and used again. Thread-safe; passed() and drop() wait for no call of the driver that
/// capture() makes.
class CudaFences {
 public:
  explicit CudaFences(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}
  CudaFences(const CudaFences&) = delete;
  CudaFences& operator=(const CudaFences&) = delete;
  ~CudaFences();

  /// As Packer's. Errors: what check() says of the driver's.
  Result<FenceId> capture(std::uint64_t handle);
  /// An error that does not end the context is asked for again: blocks must not be touched too early.
  bool passed(FenceId fence);
  void drop(FenceId fence);

 private:
  std::size_t take();
  CudaEvent event_of(std::size_t index);
  [[nodiscard]] bool happened(CudaEvent event) const;
  Status record_behind(CudaEvent event, CudaEvent& own);

  std::shared_ptr<const CudaDevice> device_;
  std::mutex capture_mutex_;  // of callers only; guards stream_
  CudaStream stream_ = nullptr;
  std::mutex mutex_;  // guards the three below; the driver is not called under it
  std::vector<CudaEvent> events_;
  std::vector<std::size_t> free_;
  std::vector<std::size_t> dropped_;  // their events may not have happened yet
};

}  // namespace kvpush
