// The driver's table and one device, on the fake driver; and what the fake itself promises.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>

#include "check.hpp"
#include "cuda_world.hpp"

using namespace kvpush;

namespace {

/// Runs `body` in a process of its own. Returns what waitpid() says.
template <typename Body>
int in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return status;
}

bool contains(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

}  // namespace

TEST(no_driver_is_unsupported_and_names_the_file) {
  const auto driver = load_cuda_driver("/nowhere/libcuda.so.1");
  CHECK_EQ(driver.status().code(), Code::kUnsupported);
  CHECK(contains(driver.status(), "/nowhere/libcuda.so.1"));
}

TEST(a_library_that_is_no_driver_is_unsupported_and_names_the_function) {
  const auto driver = load_cuda_driver("libm.so.6");
  CHECK_EQ(driver.status().code(), Code::kUnsupported);
  CHECK(contains(driver.status(), "cuInit"));
}

TEST(a_driver_that_does_not_start_is_unsupported) {
  fake().reset();
  fake().fail("cuInit", 1, 100);
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  CHECK_EQ(driver.status().code(), Code::kUnsupported);
  CHECK(contains(driver.status(), "CUDA_ERROR_NO_DEVICE"));
}

TEST(a_device_that_does_not_exist_is_unsupported) {
  fake().reset();
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  if (!CHECK(driver.ok())) return;
  for (const int index : {-1, 1, 7}) {
    const auto device = CudaDevice::open(driver.value(), index);
    CHECK_EQ(device.status().code(), Code::kUnsupported);
    CHECK(contains(device.status(), "CUDA device " + std::to_string(index)));
  }
  CHECK_EQ(fake().leaks(), 0);
}

TEST(a_device_says_what_it_is_and_gives_its_context_back) {
  fake().reset();
  auto device = open_device();
  CHECK_EQ(device->name(), "Fake GPU");
  CHECK_EQ(device->uuid(), "face0000000000000000000000000000");
  CHECK_EQ(device->compute(), 90);
  CHECK_EQ(device->num_sms(), 132);
  CHECK_EQ(fake().leaks(), 1);
  device.reset();
  CHECK_EQ(fake().leaks(), 0);
}

TEST(every_error_of_opening_a_device_is_a_status) {
  fake().reset();
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  if (!CHECK(driver.ok())) return;
  for (const char* symbol : {"cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetUuid_v2",
                             "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"}) {
    for (const int code : {1, 2, 719}) {
      fake().reset();
      fake().fail(symbol, 1, code);
      const auto device = CudaDevice::open(driver.value(), 0);
      CHECK_EQ(device.status().code(), code == 2 ? Code::kExhausted : Code::kTransport);
      CHECK_EQ(fake().leaks(), 0);
    }
  }
}

TEST(scope_leaves_what_was_current_before) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  int least = 0;
  int greatest = 0;
  CHECK_EQ(cuda.stream_priority_range(&least, &greatest), 201);
  {
    const CudaScope outer(*device);
    {
      fake().fail("cuCtxPushCurrent_v2", 1, 2);
      const CudaScope fails(*device);
    }
    // The scope that could not push did not pop either.
    CHECK_EQ(cuda.stream_priority_range(&least, &greatest), 0);
  }
  CHECK_EQ(cuda.stream_priority_range(&least, &greatest), 201);
}

TEST(scope_does_not_spoil_the_graph_that_another_thread_captures) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  constexpr int kGlobal = 0;
  const auto mode = [&cuda] {
    int before = kGlobal;
    CHECK_EQ(cuda.exchange_capture_mode(&before), 0);
    int here = before;
    CHECK_EQ(cuda.exchange_capture_mode(&here), 0);
    return before;
  };
  CHECK_EQ(mode(), kGlobal);
  {
    const CudaScope outer(*device);
    CHECK_EQ(mode(), kCudaCaptureModeRelaxed);
    {
      const CudaScope inner(*device);
    }
    CHECK_EQ(mode(), kCudaCaptureModeRelaxed);
  }
  CHECK_EQ(mode(), kGlobal);
}

TEST(device_memory_is_shared_with_another_process) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  const CudaScope scope(*device);
  CudaPointer memory = 0;
  if (!CHECK_EQ(cuda.mem_alloc(&memory, 5000), 0)) return;
  CudaIpcHandle handle{};
  CHECK_EQ(cuda.ipc_get_mem_handle(&handle, memory + 100), 0);
  CudaPointer own = 0;
  CHECK_EQ(cuda.ipc_open_mem_handle(&own, handle, kCudaIpcLazyPeerAccess), 201);

  // A forked process keeps the parent's table, but has another pid: enough to open the handle.
  const int used = in_child([&] {
    CudaPointer first = 0;
    CudaPointer second = 0;
    if (cuda.ipc_open_mem_handle(&first, handle, kCudaIpcLazyPeerAccess) != 0) return false;
    if (cuda.ipc_open_mem_handle(&second, handle, kCudaIpcLazyPeerAccess) != 0 || second != first)
      return false;
    std::memset(reinterpret_cast<void*>(first + 4999), 7, 1);
    return cuda.ipc_close_mem_handle(first) == 0 && cuda.ipc_close_mem_handle(first) == 0 &&
           cuda.ipc_close_mem_handle(first) == 1;
  });
  CHECK(WIFEXITED(used) && WEXITSTATUS(used) == 0);
  CHECK_EQ(*reinterpret_cast<const char*>(memory + 4999), 7);
  CHECK_EQ(cuda.mem_free(memory), 0);
  const int refused = in_child([&] {
    CudaPointer late = 0;
    return cuda.ipc_open_mem_handle(&late, handle, kCudaIpcLazyPeerAccess) != 0;
  });
  CHECK(WIFEXITED(refused) && WEXITSTATUS(refused) == 0);
}

TEST(host_memory_is_registered_once) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  const CudaScope scope(*device);
  std::array<std::byte, 256> bytes{};
  CHECK_EQ(cuda.mem_host_unregister(bytes.data()), 713);
  CHECK_EQ(cuda.mem_host_register(bytes.data(), bytes.size(), kCudaHostPortable), 0);
  CHECK_EQ(cuda.mem_host_register(bytes.data() + 255, 1, kCudaHostPortable),
           712);  // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
  CudaPointer seen = 0;
  CHECK_EQ(cuda.mem_host_get_device_pointer(&seen, bytes.data() + 8, 0), 0);
  CHECK_EQ(seen, reinterpret_cast<std::uintptr_t>(bytes.data() + 8));
  CHECK_EQ(cuda.mem_host_unregister(bytes.data()), 0);
  CHECK_EQ(cuda.mem_host_get_device_pointer(&seen, bytes.data(), 0), 1);
}

TEST(streams_run_in_order_and_wait_for_events_of_others) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  const CudaScope scope(*device);
  CudaStream first = nullptr;
  CudaStream second = nullptr;
  CudaEvent never = nullptr;
  CudaEvent held = nullptr;
  CudaEvent behind = nullptr;
  CHECK_EQ(cuda.stream_create(&first, kCudaStreamNonBlocking, 0), 0);
  CHECK_EQ(cuda.stream_create(&second, kCudaStreamNonBlocking, 0), 0);
  for (CudaEvent* event : {&never, &held, &behind}) {
    CHECK_EQ(cuda.event_create(event, kCudaEventDisableTiming), 0);
  }
  CHECK_EQ(cuda.event_query(never), 0);
  CHECK_EQ(cuda.stream_wait_event(second, never, 0), 0);
  fake().hold(first);
  CHECK_EQ(cuda.event_record(held, first), 0);
  CHECK_EQ(cuda.stream_wait_event(second, held, 0), 0);
  CHECK_EQ(cuda.event_record(behind, second), 0);
  for (int i = 0; i < 5; ++i) CHECK_EQ(cuda.event_query(behind), kCudaNotReady);
  fake().release(first);
  int queries = 1;
  while (cuda.event_query(behind) == kCudaNotReady) ++queries;
  CHECK(queries > 1);
  CHECK_EQ(cuda.event_query(held), 0);
  CHECK_EQ(cuda.stream_query(first), 0);
  for (const CudaEvent event : {never, held, behind}) CHECK_EQ(cuda.event_destroy(event), 0);
  for (const CudaStream stream : {first, second}) CHECK_EQ(cuda.stream_destroy(stream), 0);
}

TEST(counts_and_faults_are_those_of_the_symbol) {
  fake().reset();
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  const CudaScope scope(*device);
  fake().reset();
  fake().fail("cuEventCreate", 2, 2);
  CudaEvent event = nullptr;
  CHECK_EQ(cuda.event_create(&event, 0), 0);
  CHECK_EQ(cuda.event_destroy(event), 0);
  CHECK_EQ(cuda.event_create(&event, 0), 2);
  CHECK_EQ(cuda.event_create(&event, 0), 0);
  CHECK_EQ(fake().count("cuEventCreate"), 3);
  // A broken device stays so, and what is released on it is released.
  fake().fail("cuEventRecord", -1, 719);
  CHECK_EQ(cuda.event_record(event, nullptr), 719);
  CHECK_EQ(cuda.event_query(event), 719);
  (void)cuda.event_destroy(event);
  fake().reset();
  CHECK_EQ(fake().leaks(), 1);
}

TEST(a_launch_needs_a_context_and_memory_that_is_still_allocated) {
  fake().reset();
  std::mt19937_64 random(1);
  const auto device = open_device();
  const CudaDriver& cuda = device->driver();
  const GpuCache cache(device, {make_plane({4, 1, 1, 16}, kNestings[0])}, random);
  const std::vector<std::int32_t> ids{2};
  CHECK_EQ(cuda.launch_kernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr), 201);
  const int ended = in_child([&] {
    const auto packer = make_cuda_packer(cache.cache, device, fake_kernels(), {});
    auto slot = std::make_unique<GpuMemory>(device, 16, random);
    packer.value()->start({1, PackJob::Kind::kPack, cache.box(1), ids, slot->data()});
    slot.reset();
    (void)poll_for(*packer.value(), 1);
    return true;
  });
  CHECK(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGABRT);
}
