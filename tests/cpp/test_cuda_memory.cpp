// What a DeviceMemory owns on the fake driver, and that it gives all of it back.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "check.hpp"
#include "fake_cuda.hpp"
#include "shim/device_memory.hpp"

using namespace kvpush;

namespace {

constexpr std::size_t kBlockBytes = std::size_t{2} << 20U;
constexpr TimeUs kNoLimit = std::numeric_limits<TimeUs>::max();

const FakeCuda& fake() {
  static const Result<FakeCuda> loaded = FakeCuda::load(FAKE_CUDA_LIBRARY);
  return loaded.value();
}

std::shared_ptr<const CudaDevice> open_device() {
  fake().reset();
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  if (!CHECK(driver.ok())) return nullptr;
  auto device = CudaDevice::open(driver.value(), 0);
  return CHECK(device.ok()) ? device.value() : nullptr;
}

/// Pages of the host.
struct Pages {
  explicit Pages(std::size_t size_bytes)
      : size(size_bytes),
        data(static_cast<std::byte*>(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~Pages() { ::munmap(data, size); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::size_t size;
  std::byte* data;
};

bool contains(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

}  // namespace

TEST(allocated_memory_is_whole_blocks_and_goes_back) {
  {
    auto memory = DeviceMemory::allocate(open_device(), 100);
    if (!CHECK(memory.ok())) return;
    const std::byte* const data = memory.value().data();
    CHECK(std::all_of(data, data + kBlockBytes, [](std::byte byte) { return byte == std::byte{0}; }));
    std::fill_n(memory.value().data(), kBlockBytes, std::byte{7});
    CHECK(memory.value().clear(3).ok());
    CHECK(memory.value().data()[2] == std::byte{0});
    CHECK(memory.value().data()[3] == std::byte{7});
    DeviceMemory moved = std::move(memory).value();
    CHECK(moved.ok());
    moved = DeviceMemory();
    CHECK_EQ(fake().count("cuMemFree_v2"), 1);
  }
  CHECK_EQ(fake().leaks(), 0);
  CHECK(DeviceMemory::allocate(open_device(), 0).status().code() == Code::kInvalidArgument);
}

TEST(no_memory_says_how_much_was_asked_of_which_gpu) {
  const auto device = open_device();
  fake().fail("cuMemAlloc_v2", 1, kCudaOutOfMemory);
  const Status status = DeviceMemory::allocate(device, 1).status();
  CHECK(status.code() == Code::kExhausted);
  CHECK(contains(status, std::to_string(kBlockBytes)));
  CHECK(contains(status, device->name()));
  CHECK(contains(status, "num_slots"));
}

TEST(a_handle_of_this_process_is_refused_as_by_the_real_driver) {
  const auto device = open_device();
  const auto memory = DeviceMemory::allocate(device, 1);
  const auto handle = memory.value().share();
  if (!CHECK(handle.ok())) return;
  const Status status = DeviceMemory::import(device, handle.value(), 1).status();
  CHECK(status.code() == Code::kTransport);
  CHECK(contains(status, "cuIpcOpenMemHandle"));
}

TEST(memory_that_is_smaller_than_agreed_is_not_opened) {
  const auto memory = DeviceMemory::allocate(open_device(), 1);
  const auto handle = memory.value().share();
  if (!CHECK(handle.ok())) return;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto device = open_device();
    const long before = fake().leaks();
    const Status status = DeviceMemory::import(device, handle.value(), kBlockBytes + 1).status();
    bool good = contains(status, std::to_string(kBlockBytes + 1)) && fake().leaks() == before;
    good = good && DeviceMemory::import(device, handle.value(), kBlockBytes).ok();
    fake().fail("cuPointerGetAttribute", 2, 1);
    good = good && !DeviceMemory::import(device, handle.value(), 1).ok() && fake().leaks() == before;
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

TEST(pinned_pages_are_released_step_by_step) {
  const Pages pages(std::size_t{130} << 20U);
  {
    auto pinned = DeviceMemory::pin(open_device(), pages.data, pages.size, kNoLimit);
    CHECK(pinned.ok());
    CHECK_EQ(fake().count("cuMemHostRegister_v2"), 3);
    CHECK(pinned.value().data() == pages.data);
  }
  CHECK_EQ(fake().count("cuMemHostUnregister"), 3);
  CHECK_EQ(fake().leaks(), 0);
}

TEST(pinning_stops_when_its_time_is_over_and_leaves_nothing_pinned) {
  const Pages pages(std::size_t{130} << 20U);
  const Status status = DeviceMemory::pin(open_device(), pages.data, pages.size, -1).status();
  CHECK(status.code() == Code::kExhausted);
  CHECK(contains(status, "pinned 67108864 of 136314880 bytes"));
  CHECK_EQ(fake().leaks(), 0);
}

TEST(pages_that_are_registered_already_are_an_error_and_stay_so) {
  const Pages pages(4096);
  const auto device = open_device();
  auto first = DeviceMemory::pin(device, pages.data, pages.size, kNoLimit);
  CHECK(first.ok());
  const Status status = DeviceMemory::pin(device, pages.data, pages.size, kNoLimit).status();
  CHECK(status.code() == Code::kTransport);
  CHECK(contains(status, "712"));
  CHECK_EQ(fake().count("cuMemHostUnregister"), 0);
}

TEST(every_call_that_fails_is_named_and_leaves_nothing) {
  const Pages pages(4096);
  for (const char* symbol :
       {"cuCtxPushCurrent_v2", "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2", "cuStreamCreateWithPriority", "cuMemsetD8Async",
        "cuStreamSynchronize", "cuMemFree_v2", "cuMemHostUnregister", "cuStreamDestroy_v2"}) {
    {
      const auto device = open_device();
      fake().fail(symbol, 1, 1);
      std::string errors;
      const auto memory = DeviceMemory::allocate(device, 1);
      errors += memory.status().message();
      if (memory.ok()) {
        errors += memory.value().share().status().message();
        errors += memory.value().clear(1).message();
      }
      errors += DeviceMemory::pin(device, pages.data, pages.size, kNoLimit).status().message();
      const bool is_release = std::string(symbol).find("Free") != std::string::npos ||
                              std::string(symbol).find("Unregister") != std::string::npos ||
                              std::string(symbol).find("Destroy") != std::string::npos;
      CHECK_EQ(errors.empty(), is_release);
    }
    fake().reset();
    CHECK_EQ(fake().leaks(), 0);
  }
}

TEST(leaked_memory_keeps_its_context) {
  {
    auto memory = DeviceMemory::allocate(open_device(), 1);
    memory.value().leak();
    CHECK(!memory.value().ok());
  }
  CHECK_EQ(fake().count("cuMemFree_v2"), 0);
  CHECK_EQ(fake().count("cuDevicePrimaryCtxRelease_v2"), 0);
}
