// The packer by itself, for `kvpush bench pack`.
#include <poll.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "base/clock.hpp"
#include "bindings/bindings.hpp"
#include "pack/cpu/cpu_packer.hpp"

namespace kvpush::bindings {
namespace {

/// Planes [begin, end) of group 0 at these blocks, and the address of the dense form.
using Part = std::tuple<std::uint32_t, std::uint32_t, std::vector<std::int32_t>, std::uintptr_t>;

class BenchPacker {
 public:
  BenchPacker(const py::dict& cache, unsigned num_threads) : cache_(cache_from(cache)) {
    check(cache_->validate());
    if (cache_->device >= 0) raise({Code::kUnsupported, "the packer of host memory cannot reach a device"});
    packer_ = make_cpu_packer(*cache_, num_threads);
  }

  /// Returns when all jobs have ended, with the first error of any.
  Status run(PackJob::Kind kind, const std::vector<Part>& parts) {
    for (const auto& [begin, end, ids, dense] : parts) {
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
    Status first;
    std::vector<PackDone> done;
    for (std::size_t left = parts.size(); left > 0;) {
      done.clear();
      packer_->poll(done);
      for (const PackDone& one : done) {
        if (first.ok()) first = one.status;
      }
      left -= done.size();
      if (left == 0) break;
      pollfd readable{packer_->wait_fd(), POLLIN, 0};
      if (readable.fd >= 0) ::poll(&readable, 1, -1);
    }
    return first;
  }

 private:
  std::unique_ptr<const Cache> cache_;
  std::unique_ptr<Packer> packer_;  // works on cache_
};

TimeUs timed(BenchPacker& packer, bool unpack, const std::vector<Part>& parts) {
  Status status;
  TimeUs taken = 0;
  {
    const py::gil_scoped_release release;
    const TimeUs begin = monotonic_us();
    status = packer.run(unpack ? PackJob::Kind::kUnpack : PackJob::Kind::kPack, parts);
    taken = monotonic_us() - begin;
  }
  check(status);
  return taken;
}

}  // namespace

void bind_bench(py::module_& module) {
  py::class_<BenchPacker>(module, "BenchPacker",
                          R"(The packer of host memory by itself, for `kvpush bench pack`.

Takes kvpush.Cache.to_core() and the number of threads that copy (0: the caller's).)")
      .def(py::init<const py::dict&, unsigned>(), py::arg("cache"), py::arg("num_threads"))
      .def("run", &timed, py::arg("unpack"), py::arg("parts"),
           R"(Packs, or unpacks, and returns the microseconds until the last part has ended.

A part is (first plane, last plane + 1, block ids, address of the dense form) of group 0, all heads. The caller
sees to it that the dense form has room. Raises InvalidArgument for a part that does not lie within the cache.)");
}

}  // namespace kvpush::bindings
