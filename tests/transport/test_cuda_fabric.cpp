// The libfabric transport for engines whose caches are on (fake) GPUs, over a fake of libfabric.
#include <memory>
#include <string>

#include "conformance.hpp"
#include "fake_fabric.hpp"
#include "fake_gpu.hpp"
#include "transport/fabric/fabric_transport.hpp"

namespace kvpush {
namespace {

using conformance::fake;
using conformance::fake_gpu;

FabricOptions options_on(int gpu, bool device_slots) {
  FabricOptions options;
  options.incarnation = Incarnation{random_uuid()};
  options.device = fake_gpu(gpu);
  options.device_slots = device_slots;
  options.rails = {"nic0", "nic1"};
  options.min_stripe_bytes = 1000;
  return options;
}

conformance::Subject over(const std::string& label, bool device_slots) {
  conformance::Subject subject;
  subject.label = label;
  subject.make = [device_slots](const Incarnation& self) -> std::unique_ptr<Transport> {
    FabricOptions options = options_on(1, device_slots);
    options.incarnation = self;
    const auto network = fake_fabric::network({.max_write_bytes = 3000, .gpu = 1, .num_nics = 2});
    options.max_write_bytes = 3000;
    auto made = make_fabric_transport(network, options);
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}

conformance::Subject fabric_pinned() {
  return over("fabric_pinned", false);
}
conformance::Subject fabric_device() {
  return over("fabric_device", true);
}

// The CPU reaches the fake's memory too, so that the suite can look at it.
#define KVPUSH_GPU_CONFORMANCE(subject)                          \
  KVPUSH_CONFORMANCE_TEST(subject, set_up)                       \
  KVPUSH_CONFORMANCE_TEST(subject, post_sizes)                   \
  KVPUSH_CONFORMANCE_TEST(subject, close_with_outstanding_posts) \
  KVPUSH_CONFORMANCE_TEST(subject, closed_by_landing)            \
  KVPUSH_CONFORMANCE_TEST(subject, never_connected)
KVPUSH_GPU_CONFORMANCE(fabric_pinned)
KVPUSH_GPU_CONFORMANCE(fabric_device)

TEST(the_suites_above_left_nothing) {
  CHECK_EQ(fake().leaks(), 0);
}

TEST(slots_are_in_the_memory_that_was_asked_for) {
  for (const bool device_slots : {false, true}) {
    fake().reset();
    {
      auto made =
          make_fabric_transport(fake_fabric::network({.gpu = 0, .num_nics = 2}), options_on(0, device_slots));
      if (!CHECK(made.ok())) return;
      Transport& transport = *made.value();
      const SessionId session = conformance::new_session();
      CHECK(transport.open_landing(session, 5000, 4).ok());
      const auto staging = transport.allocate_staging(5000);
      if (!CHECK(staging.ok())) return;
      CHECK_EQ(fake().count("cuMemAlloc_v2"), device_slots ? 2 : 0);
      CHECK_EQ(fake().count("cuMemHostRegister_v2"), device_slots ? 0 : 2);
      // Zeroed by whoever reaches it.
      staging.value().data[9] = std::byte{1};
      CHECK(transport.clear_staging({staging.value().data, 10}).ok());
      CHECK(staging.value().data[9] == std::byte{0});
      CHECK_EQ(fake().count("cuMemsetD8Async"), device_slots ? 3 : 0);
      transport.release_staging(staging.value());
      transport.close_session(session);
      transport.release_landing(session);
    }
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(device_slots_need_a_device_and_a_provider_that_reaches_it) {
  FabricOptions options = options_on(0, true);
  const auto none = make_fabric_transport(fake_fabric::network({.num_nics = 2}), options);
  CHECK(none.status().code() == Code::kUnsupported);
  CHECK(none.status().message().find("for GPU memory") != std::string::npos);
  CHECK(none.status().message().find("KVPUSH_FABRIC_DEVICE_MEMORY") != std::string::npos);
  // A provider that has it for another kind of GPU.
  auto other = make_fabric_transport(fake_fabric::network({.gpu = 7, .num_nics = 2}), options);
  if (!CHECK(other.ok())) return;
  const Status refused = other.value()->allocate_staging(4096).status();
  CHECK(refused.code() == Code::kTransport);
  CHECK(refused.message().find("KVPUSH_FABRIC_DEVICE_MEMORY") != std::string::npos);
  options.device.reset();
  const auto nowhere = make_fabric_transport(fake_fabric::network({.num_nics = 2}), options);
  CHECK(nowhere.status().code() == Code::kInvalidArgument);
  CHECK(nowhere.status().message().find("KVPUSH_FABRIC_DEVICE_MEMORY") != std::string::npos);
}

TEST(a_gpu_tells_where_it_is) {
  fake().reset();
  CHECK(fake_gpu()->pci().empty());
  fake().set_attribute(kCudaAttributePciDomain, 1);
  fake().set_attribute(kCudaAttributePciBus, 0x3b);
  fake().set_attribute(kCudaAttributePciDevice, 2);
  CHECK_EQ(fake_gpu()->pci(), std::string("0001:3b:02.0"));
  fake().reset();
}

}  // namespace
}  // namespace kvpush
