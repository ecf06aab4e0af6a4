// The packer by itself, and memory of a GPU, for `kvpush bench`.
#include <poll.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "base/clock.hpp"
#include "bindings/bindings.hpp"
#include "shim/device_memory.hpp"

namespace kvpush::bindings {
namespace {

/// Planes [begin, end) of group 0 at these blocks, and the address of the dense form.
using Part = std::tuple<std::uint32_t, std::uint32_t, std::vector<std::int32_t>, std::uintptr_t>;

class BenchPacker {
 public:
  BenchPacker(const py::dict& cache, const py::dict& config) : cache_(cache_from(cache)) {
    check(cache_->validate());
    packer_ = packer_from(config, *cache_, device_from(config, cache_->device));
  }

  /// Returns when all jobs have ended, with the first error of any. No more than `in_flight` run at a time.
  Status run(PackJob::Kind kind, const std::vector<Part>& parts, std::size_t in_flight) {
    Status first;
    std::vector<PackDone> done;
    std::size_t next = 0;
    for (std::size_t ended = 0; ended < parts.size();) {
      for (; next < parts.size() && next - ended < in_flight; ++next) start(kind, parts[next]);
      done.clear();
      packer_->poll(done);
      for (const PackDone& one : done) {
        if (first.ok()) first = one.status;
      }
      ended += done.size();
      if (!done.empty()) continue;
      pollfd readable{packer_->wait_fd(), POLLIN, 0};
      if (readable.fd >= 0) ::poll(&readable, 1, -1);
    }
    return first;
  }

 private:
  void start(PackJob::Kind kind, const Part& part) {
    const auto& [begin, end, ids, dense] = part;
    PackJob job;
    job.kind = kind;
    job.box.plane_begin = begin;
    job.box.plane_end = end;
    job.box.head_end = static_cast<std::uint32_t>(cache_->groups.front().planes.front().num_heads);
    job.box.pos_end = static_cast<std::uint32_t>(ids.size());
    job.block_ids = ids;
    job.dense = reinterpret_cast<std::byte*>(dense);  // NOLINT(performance-no-int-to-ptr): from Python
    packer_->start(job);
  }

  std::unique_ptr<const Cache> cache_;
  std::unique_ptr<Packer> packer_;  // works on cache_
};

TimeUs timed(BenchPacker& packer, bool unpack, const std::vector<Part>& parts, std::size_t in_flight) {
  if (in_flight == 0) raise({Code::kInvalidArgument, "in_flight is 0: nothing would ever start"});
  Status status;
  TimeUs taken = 0;
  {
    const py::gil_scoped_release release;
    const TimeUs begin = monotonic_us();
    status = packer.run(unpack ? PackJob::Kind::kUnpack : PackJob::Kind::kPack, parts, in_flight);
    taken = monotonic_us() - begin;
  }
  check(status);
  return taken;
}

/// Memory of device 0 and a stream of its own; every call returns when its copy has ended.
class BenchBuffer {
 public:
  BenchBuffer(std::size_t num_bytes, const py::dict& config)
      : device_(device_from(config, 0)),
        size_(num_bytes),
        memory_(check(DeviceMemory::allocate(device_, size_))) {
    const CudaScope scope(*device_);
    check(cuda().check(cuda().stream_create(&stream_, kCudaStreamNonBlocking, 0),
                       "cuStreamCreateWithPriority"));
  }
  BenchBuffer(const BenchBuffer&) = delete;
  BenchBuffer& operator=(const BenchBuffer&) = delete;
  ~BenchBuffer() {
    const CudaScope scope(*device_);
    (void)cuda().stream_destroy(stream_);
  }

  [[nodiscard]] std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_.data()); }
  [[nodiscard]] std::size_t num_bytes() const { return size_; }
  void upload(const py::buffer& content) { move(address(), address_of(content.request()), size_); }
  void download(const py::buffer& content) { move(address_of(content.request(true)), address(), size_); }
  void copy(std::size_t to, const BenchBuffer& source, std::size_t begin, std::size_t num_bytes) {
    if (num_bytes > size_ || to > size_ - num_bytes || num_bytes > source.size_ ||
        begin > source.size_ - num_bytes) {
      raise({Code::kInvalidArgument, std::to_string(num_bytes) + " bytes do not lie within both buffers"});
    }
    move(address() + to, source.address() + begin, num_bytes);
  }

 private:
  [[nodiscard]] const CudaDriver& cuda() const { return device_->driver(); }
  [[nodiscard]] std::uintptr_t address_of(const py::buffer_info& info) const {
    if (static_cast<std::size_t>(info.size * info.itemsize) != size_) {
      raise({Code::kInvalidArgument, "an array of " + std::to_string(info.size * info.itemsize) +
                                         " bytes for a buffer of " + std::to_string(size_)});
    }
    return reinterpret_cast<std::uintptr_t>(info.ptr);
  }
  void move(std::uintptr_t to, std::uintptr_t from, std::size_t num_bytes) {
    Status status;
    {
      const py::gil_scoped_release release;
      const CudaScope scope(*device_);
      status = cuda().check(cuda().memcpy_async(to, from, num_bytes, stream_), "cuMemcpyAsync");
      if (status.ok()) status = cuda().check(cuda().stream_synchronize(stream_), "cuStreamSynchronize");
    }
    check(status);
  }

  std::shared_ptr<const CudaDevice> device_;
  std::size_t size_;
  DeviceMemory memory_;
  CudaStream stream_ = nullptr;
};

}  // namespace

void bind_bench(py::module_& module) {
  py::class_<BenchPacker>(module, "BenchPacker",
                          R"(The packer by itself, for `kvpush bench pack`.

Takes kvpush.Cache.to_core() and kvpush.Config.to_core().)")
      .def(py::init<const py::dict&, const py::dict&>(), py::arg("cache"), py::arg("config"))
      .def(
          "run", &timed, py::arg("unpack"), py::arg("parts"), py::arg("in_flight"),
          R"(Packs, or unpacks, and returns the microseconds until the last part has ended; `in_flight` at a time.

A part is (first plane, last plane + 1, block ids, address of the dense form) of group 0, all heads. The caller
sees to it that the dense form has room. Raises InvalidArgument for a part that does not lie within the cache.)");
  py::class_<BenchBuffer>(module, "BenchBuffer", R"(Memory of CUDA device 0, for `kvpush bench` and tests.

Takes a number of bytes and kvpush.Config.to_core(). Every call returns when its copy has ended.)")
      .def(py::init<std::size_t, const py::dict&>(), py::arg("num_bytes"), py::arg("config"))
      .def_property_readonly("address", &BenchBuffer::address)
      .def_property_readonly("num_bytes", &BenchBuffer::num_bytes)
      .def("upload", &BenchBuffer::upload, py::arg("content"))
      .def("download", &BenchBuffer::download, py::arg("content"))
      .def("copy", &BenchBuffer::copy, py::arg("to"), py::arg("source"), py::arg("begin"),
           py::arg("num_bytes"));
}

}  // namespace kvpush::bindings
