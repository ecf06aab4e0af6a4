#include "pack/cuda/cuda_fences.hpp"

#include <bit>
#include <string>

namespace kvpush {

CudaFences::~CudaFences() {
  const CudaScope scope(*device_);
  for (Pair& pair : pairs_) destroy(pair);
}

// Both calls leave it to the driver to end what is under way.
void CudaFences::destroy(Pair& pair) const {
  if (pair.event != nullptr) (void)device_->driver().event_destroy(pair.event);
  if (pair.stream != nullptr) (void)device_->driver().stream_destroy(pair.stream);
  pair = {};
}

std::size_t CudaFences::take() {
  if (free_.empty()) {
    std::erase_if(dropped_, [this](std::size_t index) {
      if (device_->driver().event_query(pairs_[index].event) == kCudaNotReady) return false;
      free_.push_back(index);
      return true;
    });
  }
  if (free_.empty()) {
    free_.push_back(pairs_.size());
    pairs_.emplace_back();
  }
  const std::size_t index = free_.back();
  free_.pop_back();
  return index;
}

Status CudaFences::wait_for(Pair& pair, CudaEvent event) const {
  const CudaDriver& cuda = device_->driver();
  if (pair.stream == nullptr) {
    KVPUSH_TRY(cuda.check(cuda.stream_create(&pair.stream, kCudaStreamNonBlocking, 0),
                          "cuStreamCreateWithPriority"));
  }
  if (pair.event == nullptr) {
    KVPUSH_TRY(cuda.check(cuda.event_create(&pair.event, kCudaEventDisableTiming), "cuEventCreate"));
  }
  KVPUSH_TRY(cuda.check(cuda.stream_wait_event(pair.stream, event, 0), "cuStreamWaitEvent"));
  return cuda.check(cuda.event_record(pair.event, pair.stream), "cuEventRecord");
}

Result<FenceId> CudaFences::capture(std::uint64_t event) {
  if (event == 0) return FenceId{0};
  const CudaScope scope(*device_);
  const std::lock_guard lock(mutex_);
  const std::size_t index = take();
  const Status status = wait_for(pairs_[index], std::bit_cast<CudaEvent>(event));
  if (status.ok()) return FenceId{index + 1};
  // Its stream may wait for something by now, for which the next fence must not wait.
  destroy(pairs_[index]);
  free_.push_back(index);
  return Status(status.code(), "after=" + std::to_string(event) + ": " + status.message());
}

bool CudaFences::passed(FenceId fence) {
  if (fence == 0) return true;
  const CudaScope scope(*device_);
  const std::lock_guard lock(mutex_);
  const std::size_t index = fence - 1;
  if (device_->driver().event_query(pairs_[index].event) == kCudaNotReady) return false;
  free_.push_back(index);
  return true;
}

void CudaFences::drop(FenceId fence) {
  if (fence == 0) return;
  const std::lock_guard lock(mutex_);
  dropped_.push_back(fence - 1);
}

}  // namespace kvpush
