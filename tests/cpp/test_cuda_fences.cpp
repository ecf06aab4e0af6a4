// Fences over events of the caller's streams, on the fake driver.
#include <map>
#include <mutex>
#include <thread>

#include "check.hpp"
#include "cuda_world.hpp"

using namespace kvpush;

TEST(a_fence_passes_when_what_was_recorded_has_happened) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  CHECK_EQ(bench.packer->capture(0).value(), 0);
  CHECK(bench.packer->passed(0));
  const auto passes = [&bench](FenceId fence) {
    for (int i = 0; i < 10; ++i) {
      if (bench.packer->passed(fence)) return true;
    }
    return false;
  };
  // Never recorded: there is nothing to wait for.
  CHECK(passes(bench.packer->capture(user.handle()).value()));

  fake().hold(user.stream);
  user.record();
  const FenceId first = bench.packer->capture(user.handle()).value();
  CHECK(!passes(first));
  // Recorded anew behind more work: the first fence does not wait for that.
  fake().hold(user.stream);
  user.record();
  const FenceId second = bench.packer->capture(user.handle()).value();
  CHECK(first != second);
  fake().release(user.stream);
  CHECK(passes(first));
  CHECK(!passes(second));
  fake().release(user.stream);
  CHECK(passes(second));
}

TEST(fences_do_not_wait_for_each_other_and_outlive_the_callers_event) {
  fake().reset();
  const Bench bench;
  auto held = std::make_unique<GpuStream>(bench.device);
  const GpuStream other(bench.device);
  const CudaStream held_stream = held->stream;
  fake().hold(held_stream);
  held->record();
  const FenceId waits = bench.packer->capture(held->handle()).value();
  other.record();
  const FenceId passes = bench.packer->capture(other.handle()).value();
  bool passed = false;
  for (int i = 0; i < 10 && !passed; ++i) passed = bench.packer->passed(passes);
  CHECK(passed);
  CHECK(!bench.packer->passed(waits));
  // Packs go on beside a forward that runs.
  bench.packer->start(bench.job(0));
  CHECK(poll_for(*bench.packer, 1).at(0).status.ok());
  {
    const CudaScope scope(*bench.device);
    CHECK_EQ(bench.device->driver().event_destroy(held->event), 0);
    CHECK_EQ(bench.device->driver().event_create(&held->event, 0), 0);
  }
  CHECK(!bench.packer->passed(waits));
  fake().release(held_stream);
  passed = false;
  for (int i = 0; i < 10 && !passed; ++i) passed = bench.packer->passed(waits);
  CHECK(passed);
}

TEST(a_capture_that_fails_leaves_nothing_to_wait_for) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  fake().hold(user.stream);
  user.record();
  fake().fail("cuEventRecord", 1, kCudaOutOfMemory);
  const Status status = bench.packer->capture(user.handle()).status();
  CHECK_EQ(status.code(), Code::kExhausted);
  CHECK(status.message().find("after=" + std::to_string(user.handle())) != std::string::npos);
  const GpuStream other(bench.device);
  const FenceId fence = bench.packer->capture(other.handle()).value();
  bool passed = false;
  for (int i = 0; i < 10 && !passed; ++i) passed = bench.packer->passed(fence);
  CHECK(passed);
  fake().release(user.stream);
}

TEST(dropped_fences_are_used_again_once_they_have_passed) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  fake().hold(user.stream);
  user.record();
  const FenceId dropped = bench.packer->capture(user.handle()).value();
  bench.packer->drop(dropped);
  const GpuStream other(bench.device);
  other.record();
  const FenceId second = bench.packer->capture(other.handle()).value();
  CHECK(second != dropped);
  bench.packer->drop(second);
  fake().release(user.stream);
  fake().reset();
  for (int i = 0; i < 50; ++i) {
    other.record();
    bench.packer->drop(bench.packer->capture(other.handle()).value());
  }
  // Each capture finds an older one that has passed, but for the few whose streams are still a step behind.
  CHECK(fake().count("cuStreamCreateWithPriority") <= 4);
}

TEST(many_fences_take_one_stream) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  fake().hold(user.stream);
  user.record();
  const long before = fake().count("cuStreamCreateWithPriority");
  std::vector<FenceId> fences;
  for (int i = 0; i < 64; ++i) fences.push_back(bench.packer->capture(user.handle()).value());
  CHECK_EQ(fake().count("cuStreamCreateWithPriority"), before + 1);
  fake().release(user.stream);
  for (int i = 0; i < 1000; ++i) {
    std::erase_if(fences, [&](FenceId fence) { return bench.packer->passed(fence); });
  }
  CHECK(fences.empty());
}

TEST(a_fence_that_cannot_be_asked_does_not_pass) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  fake().hold(user.stream);
  user.record();
  const FenceId fence = bench.packer->capture(user.handle()).value();
  fake().fail("cuEventQuery", 1, 400);
  CHECK(!bench.packer->passed(fence));
  fake().release(user.stream);
  bool passed = false;
  for (int i = 0; i < 10 && !passed; ++i) passed = bench.packer->passed(fence);
  CHECK(passed);
}

TEST(captures_of_many_threads) {
  fake().reset();
  const Bench bench;
  std::vector<FenceId> fences;
  std::mutex mutex;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const GpuStream user(bench.device);
      for (int i = 0; i < 30; ++i) {
        user.record();
        const Result<FenceId> fence = bench.packer->capture(user.handle());
        CHECK(fence.ok());
        const std::lock_guard lock(mutex);
        fences.push_back(fence.value());
      }
    });
  }
  std::size_t num_passed = 0;
  std::size_t num_jobs = 0;
  std::vector<PackDone> done;
  for (int i = 0; num_passed < 90 && i < 1'000'000; ++i) {
    if (num_jobs == done.size()) bench.packer->start(bench.job(num_jobs++ % 4));
    bench.packer->poll(done);
    const std::lock_guard lock(mutex);
    num_passed += std::erase_if(fences, [&](FenceId fence) { return bench.packer->passed(fence); });
    if (fences.empty()) std::this_thread::yield();
  }
  CHECK_EQ(num_passed, 90);
  CHECK_EQ(done.size() + poll_for(*bench.packer, num_jobs - done.size()).size(), num_jobs);
}
