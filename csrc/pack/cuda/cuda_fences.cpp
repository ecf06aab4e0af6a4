#include "pack/cuda/cuda_fences.hpp"

#include <bit>
#include <string>

namespace kvpush {

// The driver ends by itself what is under way.
CudaFences::~CudaFences() {
  const CudaScope scope(*device_);
  for (const CudaEvent event : events_) {
    if (event != nullptr) (void)device_->driver().event_destroy(event);
  }
  if (stream_ != nullptr) (void)device_->driver().stream_destroy(stream_);
}

std::size_t CudaFences::take() {
  std::vector<std::size_t> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) dropped.swap(dropped_);
  }
  std::vector<std::size_t> ended;
  std::erase_if(dropped, [&](std::size_t index) {
    if (!happened(event_of(index))) return false;
    ended.push_back(index);
    return true;
  });
  const std::lock_guard lock(mutex_);
  dropped_.insert(dropped_.end(), dropped.begin(), dropped.end());
  free_.insert(free_.end(), ended.begin(), ended.end());
  if (free_.empty()) {
    free_.push_back(events_.size());
    events_.push_back(nullptr);
  }
  const std::size_t index = free_.back();
  free_.pop_back();
  return index;
}

CudaEvent CudaFences::event_of(std::size_t index) {
  const std::lock_guard lock(mutex_);
  return events_[index];
}

bool CudaFences::happened(CudaEvent event) const {
  const CudaCode code = device_->driver().event_query(event);
  return code == kCudaOk || ends_context(code);
}

Status CudaFences::record_behind(CudaEvent event, CudaEvent& own) {
  const CudaDriver& cuda = device_->driver();
  if (stream_ == nullptr) {
    KVPUSH_TRY(
        cuda.check(cuda.stream_create(&stream_, kCudaStreamNonBlocking, 0), "cuStreamCreateWithPriority"));
  }
  if (own == nullptr) {
    KVPUSH_TRY(cuda.check(cuda.event_create(&own, kCudaEventDisableTiming), "cuEventCreate"));
  }
  KVPUSH_TRY(cuda.check(cuda.stream_wait_event(stream_, event, 0), "cuStreamWaitEvent"));
  return cuda.check(cuda.event_record(own, stream_), "cuEventRecord");
}

Result<FenceId> CudaFences::capture(std::uint64_t handle) {
  if (handle == 0) return FenceId{0};
  const CudaDriver& cuda = device_->driver();
  const auto event = std::bit_cast<CudaEvent>(handle);
  const CudaScope scope(*device_);
  const CudaCode code = cuda.event_query(event);
  if (code == kCudaOk) return FenceId{0};
  const std::string what = "after=" + std::to_string(handle) + ": ";
  if (code != kCudaNotReady) {
    const Status status = cuda.check(code, "cuEventQuery");
    return Status(status.code(), what + status.message());
  }
  const std::lock_guard capturing(capture_mutex_);
  const std::size_t index = take();
  CudaEvent own = event_of(index);
  const Status status = record_behind(event, own);
  if (!status.ok() && stream_ != nullptr) {
    // It may wait for something by now, for which the next fence need not wait.
    (void)cuda.stream_destroy(stream_);
    stream_ = nullptr;
  }
  const std::lock_guard lock(mutex_);
  events_[index] = own;
  if (status.ok()) return FenceId{index + 1};
  free_.push_back(index);
  return Status(status.code(), what + status.message());
}

bool CudaFences::passed(FenceId fence) {
  if (fence == 0) return true;
  const CudaScope scope(*device_);
  const std::size_t index = fence - 1;
  if (!happened(event_of(index))) return false;
  const std::lock_guard lock(mutex_);
  free_.push_back(index);
  return true;
}

void CudaFences::drop(FenceId fence) {
  if (fence == 0) return;
  const std::lock_guard lock(mutex_);
  dropped_.push_back(fence - 1);
}

}  // namespace kvpush
