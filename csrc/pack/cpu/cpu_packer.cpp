#include "pack/cpu/cpu_packer.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "pack/check_job.hpp"
#include "pack/cpu/copy_box.hpp"

namespace kvpush {
namespace {

/// num_threads == 0: everything on the caller's thread.
class InlinePacker final : public Packer {
 public:
  explicit InlinePacker(const Cache& cache) : cache_(cache) {}

  void start(PackJob job) override { waiting_.push_back(job); }
  // One at a time: the peer need not wait for the last box to begin with the first.
  void poll(std::vector<PackDone>& done) override {
    if (waiting_.empty()) return;
    done.push_back(run_pack_job(cache_, waiting_.front()));
    waiting_.pop_front();
  }

 private:
  const Cache& cache_;
  std::deque<PackJob> waiting_;
};

class PoolPacker final : public Packer {
 public:
  PoolPacker(const Cache& cache, unsigned num_threads)
      : cache_(cache), event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    threads_.reserve(num_threads);
    for (unsigned i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  PoolPacker(const PoolPacker&) = delete;
  PoolPacker& operator=(const PoolPacker&) = delete;

  ~PoolPacker() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    if (event_fd_ >= 0) ::close(event_fd_);
  }

  void start(PackJob job) override {
    const std::size_t bytes = box_fits(cache_, job.box) ? packed_bytes(cache_, job.box) : 0;
    if (bytes <= inline_left_) {
      inline_left_ -= bytes;
      done_inline_.push_back(run_pack_job(cache_, job));
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(job);
    }
    wake_.notify_one();
  }

  void poll(std::vector<PackDone>& done) override {
    inline_left_ = kInlinePackBytes;
    for (PackDone& one : done_inline_) done.push_back(std::move(one));
    done_inline_.clear();
    const std::lock_guard lock(mutex_);
    if (done_.empty()) return;
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_fd_, &count, sizeof(count));
    for (PackDone& one : done_) done.push_back(std::move(one));
    done_.clear();
  }

  // Without a descriptor (none left in this process) the caller polls.
  int wait_fd() const override { return event_fd_; }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || next_waiting_ < waiting_.size(); });
      if (stopping_) return;
      const PackJob job = waiting_[next_waiting_++];
      // Memory that is kept: a deque would allocate and free as it wanders.
      if (2 * next_waiting_ >= waiting_.size()) {
        waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(next_waiting_));
        next_waiting_ = 0;
      }
      lock.unlock();
      PackDone one = run_pack_job(cache_, job);
      lock.lock();
      const bool first = done_.empty();
      done_.push_back(std::move(one));
      if (first) {
        const std::uint64_t count = 1;
        [[maybe_unused]] const ssize_t put = ::write(event_fd_, &count, sizeof(count));
      }
    }
  }

  const Cache& cache_;
  const int event_fd_;
  // Of the thread that calls start() and poll().
  std::size_t inline_left_ = kInlinePackBytes;
  std::vector<PackDone> done_inline_;
  std::mutex mutex_;  // guards the five below
  std::condition_variable wake_;
  std::vector<PackJob> waiting_;  // from next_waiting_ on
  std::size_t next_waiting_ = 0;
  std::vector<PackDone> done_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

PackDone run_pack_job(const Cache& cache, const PackJob& job, const LineCopier& copier) {
  PackDone done;
  done.ticket = job.ticket;
  done.status = check_job(cache, job);
  if (!done.status.ok()) return done;
  const TimeUs begun = monotonic_us();
  done.checksum = copy_box(cache, job, copier);
  done.copy_us = monotonic_us() - begun;
  return done;
}

std::unique_ptr<Packer> make_cpu_packer(const Cache& cache, unsigned num_threads) {
  if (num_threads == 0) return std::make_unique<InlinePacker>(cache);
  return std::make_unique<PoolPacker>(cache, num_threads);
}

}  // namespace kvpush
