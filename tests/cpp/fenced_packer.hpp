// A packer with fences that pass when the test says so, over one that copies.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "check.hpp"
#include "pack/packer.hpp"

namespace kvpush::fake {

/// An event is any number; it may be recorded anew for each capture(). Thread-safe where Packer is not.
class FencedPacker final : public Packer {
 public:
  explicit FencedPacker(std::unique_ptr<Packer> inner) : inner_(std::move(inner)) {}

  void start(PackJob job) override {
    inner_->start(std::move(job));
    ++num_started;
  }
  void poll(std::vector<PackDone>& done) override {
    if (!holds) inner_->poll(done);
  }
  [[nodiscard]] int wait_fd() const override { return inner_->wait_fd(); }

  Result<FenceId> capture(std::uint64_t event) override {
    if (event == 0) return FenceId{0};
    if (in_capture) in_capture();
    const std::lock_guard lock(mutex_);
    if (fails) return Status(Code::kTransport, "the device is gone");
    fences_[++last_] = event;
    return last_;
  }
  bool passed(FenceId fence) override {
    const std::lock_guard lock(mutex_);
    CHECK(fences_.contains(fence));  // asked for again, or after it was dropped
    ++num_asked;
    if (!passed_.contains(fence)) return false;
    fences_.erase(fence);
    return true;
  }
  void drop(FenceId fence) override {
    const std::lock_guard lock(mutex_);
    CHECK(fence == 0 || fences_.erase(fence) == 1U);
  }

  /// The work before these fences, captured of `event` so far, has ended.
  void pass(std::uint64_t event) {
    const std::lock_guard lock(mutex_);
    for (const auto& [fence, of] : fences_) {
      if (of == event) passed_.insert(fence);
    }
  }
  [[nodiscard]] std::size_t num_fences() const {
    const std::lock_guard lock(mutex_);
    return fences_.size();
  }

  std::function<void()> in_capture;  ///< what the driver does meanwhile; set while no call runs
  bool fails = false;                ///< capture() does; set while no call runs
  std::atomic<bool> holds = false;   ///< no job ends
  std::atomic<std::size_t> num_started = 0;
  std::size_t num_asked = 0;

 private:
  std::unique_ptr<Packer> inner_;
  mutable std::mutex mutex_;
  std::map<FenceId, std::uint64_t> fences_;  ///< the event of each
  std::set<FenceId> passed_;
  FenceId last_ = 0;
};

}  // namespace kvpush::fake
