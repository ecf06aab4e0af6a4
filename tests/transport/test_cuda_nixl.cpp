// NIXL's memory for engines whose caches are on (fake) GPUs. What opens an agent needs KVPUSH_NIXL_LIBRARY
// and is skipped without it.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "conformance.hpp"
#include "fake_gpu.hpp"
#include "transport/nixl/nixl_transport.hpp"
#include "transport/nixl/retired_memory.hpp"
#include "transport/remote_memory.hpp"

namespace kvpush {
namespace {

using conformance::fake;
using conformance::fake_gpu;

constexpr TimeUs kNoLimit = std::numeric_limits<TimeUs>::max();

NixlOptions options(const Incarnation& incarnation = Incarnation{random_uuid()}) {
  const char* path = std::getenv("KVPUSH_NIXL_LIBRARY");
  if (path == nullptr || *path == '\0') SKIP("KVPUSH_NIXL_LIBRARY is not set");
  NixlOptions result;
  result.incarnation = incarnation;
  result.library_path = path;
  result.device = fake_gpu();
  return result;
}

conformance::Subject nixl_pinned() {
  conformance::Subject subject;
  subject.label = "nixl_pinned";
  subject.make = [](const Incarnation& self) -> std::unique_ptr<Transport> {
    auto made = make_nixl_transport(options(self));
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}
KVPUSH_CONFORMANCE_TEST(nixl_pinned, set_up)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, post_sizes)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, close_with_outstanding_posts)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, closed_by_landing)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, never_connected)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, process_source)
KVPUSH_CONFORMANCE_TEST(nixl_pinned, child_entry)

TEST(the_suite_above_left_nothing) {
  CHECK_EQ(fake().leaks(), 0);
}

TEST(pages_are_pinned_while_they_are_used) {
  for (const bool retires : {false, true}) {
    fake().reset();
    {
      auto memory = RemoteMemory::map(5000, fake_gpu(), kNoLimit);
      if (!CHECK(memory.ok())) return;
      CHECK_EQ(fake().count("cuMemHostRegister_v2"), 1);
      memory.value().region().data[4999] = std::byte{1};
      CHECK(memory.value().clear(5000).ok());
      CHECK(memory.value().region().data[4999] == std::byte{0});
      if (retires) memory.value().retire();
      if (retires) CHECK_EQ(fake().count("cuMemHostUnregister"), 1);
    }
    CHECK_EQ(fake().count("cuMemHostUnregister"), 1);
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(device_memory_is_zeroed_and_freed) {
  for (const bool retires : {false, true}) {
    fake().reset();
    {
      auto memory = RemoteMemory::allocate(5000, fake_gpu());
      if (!CHECK(memory.ok())) return;
      CHECK_EQ(fake().count("cuMemsetD8Async"), 1);
      CHECK(memory.value().clear(100).ok());
      if (retires) memory.value().retire();
    }
    CHECK_EQ(fake().count("cuMemFree_v2"), 1);
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(an_ended_landings_device_memory_is_kept_back_up_to_a_limit) {
  fake().reset();
  {
    RetiredMemory retired(10'000);
    for (int i = 0; i < 4; ++i) {
      auto memory = RemoteMemory::allocate(5000, fake_gpu());
      if (!CHECK(memory.ok())) return;
      retired.add(std::move(memory).value());
      CHECK_EQ(fake().count("cuMemFree_v2"), std::max(0, i - 1));
    }
    CHECK_EQ(retired.bytes(), 10'000);
    CHECK(retired.free_oldest());
    CHECK(retired.free_oldest());
    CHECK(!retired.free_oldest());
    CHECK_EQ(retired.bytes(), 0);
    CHECK_EQ(fake().count("cuMemFree_v2"), 4);
  }
  CHECK_EQ(fake().leaks(), 0);
}

TEST(memory_that_cannot_be_pinned_is_an_error) {
  for (const char* symbol : {"cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"}) {
    fake().reset();
    const auto device = fake_gpu();
    fake().fail(symbol, 1, kCudaOutOfMemory);
    CHECK(RemoteMemory::map(5000, device, kNoLimit).status().code() == Code::kExhausted);
  }
  for (const char* symbol : {"cuMemAlloc_v2", "cuStreamCreateWithPriority", "cuMemsetD8Async"}) {
    fake().reset();
    const auto device = fake_gpu();
    fake().fail(symbol, 1, kCudaOutOfMemory);
    CHECK(RemoteMemory::allocate(5000, device).status().code() == Code::kExhausted);
  }
  CHECK_EQ(fake().leaks(), 0);
}

TEST(staging_that_cannot_be_pinned_is_an_error_of_the_transport) {
  auto transport = make_nixl_transport(options());
  if (!CHECK(transport.ok())) return;
  fake().reset();
  fake().fail("cuMemHostRegister_v2", -1, 1);
  CHECK(transport.value()->allocate_staging(4096).status().code() == Code::kTransport);
  CHECK(transport.value()->open_landing(SessionId{random_uuid()}, 4096, 2).status().code() ==
        Code::kTransport);
  fake().reset();
  const auto staging = transport.value()->allocate_staging(4096);
  if (!CHECK(staging.ok())) return;
  staging.value().data[0] = std::byte{1};
  CHECK(transport.value()->clear_staging({staging.value().data, 1}).ok());
  CHECK(staging.value().data[0] == std::byte{0});
  transport.value()->release_staging(staging.value());
  CHECK_EQ(fake().count("cuMemHostUnregister"), fake().count("cuMemHostRegister_v2"));
}

TEST(pinning_has_a_time_limit) {
  NixlOptions with = options();
  with.pin_budget_us = -1;
  auto transport = make_nixl_transport(with);
  if (!CHECK(transport.ok())) return;
  const Status status = transport.value()->allocate_staging(std::size_t{65} << 20U).status();
  CHECK(status.code() == Code::kExhausted);
  CHECK(status.message().find("pinned 67108864 of") != std::string::npos);
}

TEST(device_slots_are_refused_on_a_gpu_that_may_show_a_nics_writes_too_late) {
  fake().reset();
  fake().set_attribute(kCudaAttributeGpuDirectWritesOrdering, 0);
  fake().set_attribute(kCudaAttributeGpuDirectFlushOptions, 0);
  NixlOptions with;
  with.device = fake_gpu();
  with.device_slots = true;
  const Status status = make_nixl_transport(with).status();
  fake().reset();
  CHECK_EQ(status.code(), Code::kUnsupported);
  CHECK(status.message().find("KVPUSH_NIXL_DEVICE_MEMORY") != std::string::npos);
}

TEST(device_slots_need_a_device_and_say_how_to_turn_them_off) {
  NixlOptions with;
  with.device_slots = true;
  const Status status = make_nixl_transport(with).status();
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(status.message().find("KVPUSH_NIXL_DEVICE_MEMORY") != std::string::npos);
}

TEST(device_memory_that_nixl_refuses_is_an_error_that_says_how_to_turn_it_off) {
  NixlOptions with = options();
  with.device_slots = true;
  {
    auto transport = make_nixl_transport(with);
    if (!CHECK(transport.ok())) return;
    // No UCX takes the fake's memory for a GPU's.
    const Status status = transport.value()->allocate_staging(4096).status();
    CHECK(status.code() == Code::kTransport);
    CHECK(status.message().find("KVPUSH_NIXL_DEVICE_MEMORY") != std::string::npos);
  }
  with.device.reset();
  CHECK_EQ(fake().leaks(), 0);
}

}  // namespace
}  // namespace kvpush
