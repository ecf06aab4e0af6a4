// A cache in the memory of the fake GPU, and what tests of the CUDA packer do with it.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "fake_cuda.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "pack/cuda/cuda_packer.hpp"
#include "planes.hpp"

namespace kvpush {

inline const FakeCuda& fake() {
  static const Result<FakeCuda> loaded = FakeCuda::load(FAKE_CUDA_LIBRARY);
  return loaded.value();
}

inline std::shared_ptr<const CudaDevice> open_device() {
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  if (!driver.ok()) return nullptr;
  const auto device = CudaDevice::open(driver.value(), 0);
  return device.ok() ? device.value() : nullptr;
}

inline std::span<const std::byte> fake_kernels() {
  static constexpr char kImage[] = "fake kernels";
  return std::as_bytes(std::span(kImage));
}

/// Device memory, random at first. Ends before the device.
class GpuMemory {
 public:
  GpuMemory(std::shared_ptr<const CudaDevice> device, std::size_t size, std::mt19937_64& random)
      : device_(std::move(device)), size_(size) {
    const CudaScope scope(*device_);
    CHECK_EQ(device_->driver().mem_alloc(&address_, size), kCudaOk);
    for (std::byte& byte : bytes()) byte = static_cast<std::byte>(random());
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() {
    const CudaScope scope(*device_);
    (void)device_->driver().mem_free(address_);
  }

  [[nodiscard]] std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  [[nodiscard]] std::span<std::byte> bytes() const { return {data(), size_}; }
  [[nodiscard]] std::vector<std::byte> copy() const { return {bytes().begin(), bytes().end()}; }

 private:
  std::shared_ptr<const CudaDevice> device_;
  std::size_t size_;
  CudaPointer address_ = 0;
};

/// A stream and an event of a caller.
struct GpuStream {
  explicit GpuStream(std::shared_ptr<const CudaDevice> on) : device(std::move(on)) {
    const CudaScope scope(*device);
    CHECK_EQ(device->driver().stream_create(&stream, kCudaStreamNonBlocking, 0), kCudaOk);
    CHECK_EQ(device->driver().event_create(&event, kCudaEventDisableTiming), kCudaOk);
  }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  ~GpuStream() {
    const CudaScope scope(*device);
    (void)device->driver().event_destroy(event);
    (void)device->driver().stream_destroy(stream);
  }

  void record() const {
    const CudaScope scope(*device);
    CHECK_EQ(device->driver().event_record(event, stream), kCudaOk);
  }
  [[nodiscard]] std::uint64_t handle() const { return reinterpret_cast<std::uintptr_t>(event); }

  std::shared_ptr<const CudaDevice> device;
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
};

/// One group; each plane `shift` bytes behind an aligned address.
struct GpuCache {
  GpuCache(const std::shared_ptr<const CudaDevice>& device, const std::vector<Plane>& planes,
           std::mt19937_64& random, std::size_t shift = 0) {
    cache.groups = {{16, planes}};
    for (Plane& plane : cache.groups[0].planes) {
      const auto size = static_cast<std::size_t>(extent_bytes(plane)) + shift;
      plane.base = memory.emplace_back(std::make_unique<GpuMemory>(device, size, random))->data() + shift;
    }
  }
  [[nodiscard]] Box box(std::size_t num_positions) const {
    const Group& group = cache.groups[0];
    return {0,
            0,
            static_cast<std::uint32_t>(group.planes.size()),
            0,
            static_cast<std::uint32_t>(group.planes[0].num_heads),
            0,
            static_cast<std::uint32_t>(num_positions)};
  }

  Cache cache;
  std::vector<std::unique_ptr<GpuMemory>> memory;
};

/// Polls until `num_jobs` have ended, or gives up.
inline std::vector<PackDone> poll_for(Packer& packer, std::size_t num_jobs) {
  std::vector<PackDone> done;
  for (int i = 0; i < 10'000 && done.size() < num_jobs; ++i) packer.poll(done);
  CHECK_EQ(done.size(), num_jobs);
  return done;
}

inline std::unique_ptr<Packer> make_packer(const Cache& cache,
                                           const std::shared_ptr<const CudaDevice>& device,
                                           unsigned num_sms = 0) {
  auto packer = make_cuda_packer(cache, device, fake_kernels(), {num_sms, true});
  if (!CHECK(packer.ok())) throw check::Skipped{packer.status().message()};
  return std::move(packer).value();
}

/// A small cache, four jobs of it, a packer.
struct Bench {
  explicit Bench(const std::vector<Plane>& planes = {make_plane({8, 2, 4, 32}, kNestings[0])})
      : device(open_device()), cache(device, planes, random), packer(make_packer(cache.cache, device)) {
    for (auto& slot : slots) slot = std::make_unique<GpuMemory>(device, slot_bytes(), random);
  }
  [[nodiscard]] std::size_t slot_bytes() const { return packed_bytes(cache.cache, cache.box(8)); }
  PackJob job(std::size_t i, PackJob::Kind kind = PackJob::Kind::kPack) const {
    return {i, kind, cache.box(ids.size()), ids, slots.at(i)->data()};
  }

  std::mt19937_64 random{7};
  std::shared_ptr<const CudaDevice> device;
  GpuCache cache;
  std::unique_ptr<Packer> packer;
  std::array<std::unique_ptr<GpuMemory>, 4> slots;
  std::vector<std::int32_t> ids{3, 0, 6};
};

}  // namespace kvpush
