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

/// A fence is a stream of its own that waits for the caller's event, and an event of ours behind that: the
/// caller's may be recorded anew, and no fence waits for another. Pairs are kept and used again.
/// Thread-safe.
class CudaFences {
 public:
  explicit CudaFences(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}
  CudaFences(const CudaFences&) = delete;
  CudaFences& operator=(const CudaFences&) = delete;
  ~CudaFences();

  /// As Packer's. Errors: what check() says of the driver's.
  Result<FenceId> capture(std::uint64_t event);
  bool passed(FenceId fence);
  void drop(FenceId fence);

 private:
  struct Pair {
    CudaStream stream = nullptr;
    CudaEvent event = nullptr;
  };

  std::size_t take();
  Status wait_for(Pair& pair, CudaEvent event) const;
  void destroy(Pair& pair) const;

  std::shared_ptr<const CudaDevice> device_;
  std::mutex mutex_;  // guards the three below
  std::vector<Pair> pairs_;
  std::vector<std::size_t> free_;
  std::vector<std::size_t> dropped_;  // their events may not have happened yet
};

}  // namespace kvpush
