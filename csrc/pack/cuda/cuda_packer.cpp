#include "pack/cuda/cuda_packer.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pack/check_job.hpp"
#include "pack/cuda/copy_walk.hpp"
#include "pack/cuda/cuda_fences.hpp"

namespace kvpush {
namespace {

constexpr unsigned kMaxChunkBytes = 16;
constexpr std::size_t kMinIds = 1024;
/// Boxes that run at a time. A launch takes the host about half as long as a small box takes from its launch
/// to its end, so two would do if nothing were ever late.
constexpr unsigned kMaxStreams = 3;
/// In the pinned memory of a launch: the checksum, then the ids on a line of their own.
constexpr std::size_t kIdsOffset = 64;
/// In the device memory of a launch: the partial sum, then the number of blocks that have arrived.
constexpr std::size_t kArrivedOffset = 8;
constexpr std::size_t kCounterBytes = 16;

std::uint64_t address_bits(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

/// The lowest bit that is set here is the most that divides every address and row of the plane.
std::uint64_t alignment_bits(const Plane& plane, const UnitLayout& unit) {
  std::uint64_t bits = address_bits(plane.base) | static_cast<std::uint64_t>(unit.content_bytes);
  if (plane.num_blocks > 1) bits |= static_cast<std::uint64_t>(unit.block_stride_bytes);
  if (unit.num_heads > 1) bits |= static_cast<std::uint64_t>(unit.head_stride_bytes);
  if (unit.num_tokens > 1) bits |= static_cast<std::uint64_t>(unit.token_stride_bytes);
  return bits;
}

/// For the life of the process. Never destroyed: engines may be closed by other statics' destructors.
void keep(std::shared_ptr<const CudaDevice> device) {
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const CudaDevice>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(device));
}

class CudaPacker final : public Packer {
 public:
  CudaPacker(const Cache& cache, std::shared_ptr<const CudaDevice> device)
      : cache_(cache), device_(std::move(device)), cuda_(device_->driver()), fences_(device_) {}
  CudaPacker(const CudaPacker&) = delete;
  CudaPacker& operator=(const CudaPacker&) = delete;
  ~CudaPacker() override;

  Status init(std::span<const std::byte> kernels, const CudaPackerOptions& options);

  void start(PackJob job) override;
  void poll(std::vector<PackDone>& done) override;
  Result<FenceId> capture(std::uint64_t event) override { return fences_.capture(event); }
  bool passed(FenceId fence) override { return fences_.passed(fence); }
  void drop(FenceId fence) override { fences_.drop(fence); }

 private:
  /// What one launch needs from its start to its end; used again and again.
  struct Launch {
    unsigned stream = 0;  ///< index of its stream; always the same
    unsigned num_blocks = 0;
    TicketId ticket = 0;
    TimeUs started_at = 0;
    Status recorded;  ///< of `ended`, and whether it can be asked
    CudaEvent ended = nullptr;
    CudaPointer counters = 0;
    std::byte* pinned = nullptr;
    std::size_t max_ids = 0;
  };
  struct Stream {
    CudaStream handle = nullptr;
    TimeUs last_end = 0;  ///< when the end of its last launch was seen
  };
  struct PlaneInfo {
    std::uint64_t alignment_bits = 0;
    bool bulk = false;  ///< rows long enough for those kernels
  };

  Status load_kernels(std::span<const std::byte> kernels, bool bulk);
  Status check_planes() const;
  Status upload_planes();
  Status prepare(Launch& launch, std::size_t num_ids);
  Status flush_direct_writes(const PackJob& job);
  Status launch(const PackJob& job);
  Status launch_with(Launch& launch, const PackJob& job);
  bool takes_bulk(const PackJob& job, const CopyArgs& args) const;
  unsigned blocks_to_take() const;
  CudaStream stream_of(const Launch& launch) const { return streams_[launch.stream].handle; }

  const Cache& cache_;
  std::shared_ptr<const CudaDevice> device_;
  const CudaDriver& cuda_;
  CudaFences fences_;

  CudaModule module_ = nullptr;
  std::array<CudaFunction, 2> kernels_{};       // by Kind
  std::array<CudaFunction, 2> bulk_kernels_{};  // null where they are not used
  std::vector<Stream> streams_;
  unsigned max_blocks_ = 0;
  unsigned busy_blocks_ = 0;              // of what is in flight
  CudaPointer table_ = 0;                 // PlaneEntry of all groups, one after the other
  std::vector<std::size_t> first_plane_;  // by group: of its part of the table
  std::vector<PlaneInfo> planes_;         // as in the table

  std::vector<std::unique_ptr<Launch>> launches_;
  std::deque<Launch*> free_;        // the longest free first, so that streams take turns
  std::vector<Launch*> in_flight_;  // in the order of start
  std::size_t max_ids_ = kMinIds;
  std::vector<PackDone> failed_;  // in start()
  Status lost_;
};

Status CudaPacker::init(std::span<const std::byte> kernels, const CudaPackerOptions& options) {
  const CudaScope scope(*device_);
  const auto num_sms = static_cast<unsigned>(device_->num_sms());
  // An eighth of a GPU's memory bandwidth is more than its links take, and the forward keeps the rest.
  const unsigned wanted = options.num_sms != 0 ? options.num_sms : std::max(2U, num_sms / 8);
  max_blocks_ = std::clamp(wanted, 1U, std::max(1U, num_sms));

  KVPUSH_TRY(check_planes());
  KVPUSH_TRY(load_kernels(kernels, options.bulk));
  int least = 0;
  int greatest = 0;
  KVPUSH_TRY(cuda_.check(cuda_.stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  for (unsigned i = std::min(kMaxStreams, max_blocks_); i > 0; --i) {
    CudaStream stream = nullptr;
    KVPUSH_TRY(cuda_.check(cuda_.stream_create(&stream, kCudaStreamNonBlocking, greatest),
                           "cuStreamCreateWithPriority"));
    streams_.push_back({stream});
  }
  return upload_planes();
}

Status CudaPacker::load_kernels(std::span<const std::byte> kernels, bool bulk) {
  if (kernels.empty()) return {Code::kInvalidArgument, "there are no copy kernels: the image is empty"};
  const CudaCode code = cuda_.module_load_data(&module_, kernels.data());
  if (code == kCudaNoBinaryForGpu) {
    return {Code::kUnsupported, "the copy kernels do not run on " + device_->name() +
                                    ", compute capability " + std::to_string(device_->compute() / 10) + "." +
                                    std::to_string(device_->compute() % 10)};
  }
  KVPUSH_TRY(cuda_.check(code, "cuModuleLoadData"));
  const auto find = [this](CudaFunction& function, const char* name) {
    return cuda_.check(cuda_.module_get_function(&function, module_, name), name);
  };
  KVPUSH_TRY(find(kernels_[0], kPackKernel));
  KVPUSH_TRY(find(kernels_[1], kUnpackKernel));
  if (!bulk || device_->compute() < 90) return {};
  KVPUSH_TRY(find(bulk_kernels_[0], kPackBulkKernel));
  return find(bulk_kernels_[1], kUnpackBulkKernel);
}

/// A kernel that follows a pointer which is not its device's ends the context, for torch too.
Status CudaPacker::check_planes() const {
  for (const Group& group : cache_.groups) {
    for (const Plane& plane : group.planes) {
      int at = -1;
      const CudaCode code =
          cuda_.pointer_get_attribute(&at, kCudaPointerDeviceOrdinal, address_bits(plane.base));
      if (code == kCudaOk && at == device_->index()) continue;
      if (code != kCudaOk && code != kCudaInvalidValue) return cuda_.check(code, "cuPointerGetAttribute");
      return {Code::kInvalidArgument,
              "plane '" + plane.name + "' is said to be on CUDA device " + std::to_string(device_->index()) +
                  ", but the driver " +
                  (code == kCudaOk ? "has it on device " + std::to_string(at) : "does not know its address") +
                  "; name the array's device, as torch and cupy do"};
    }
  }
  return {};
}

Status CudaPacker::upload_planes() {
  std::vector<PlaneEntry> table;
  for (const Group& group : cache_.groups) {
    first_plane_.push_back(table.size());
    std::int64_t unit_bytes_before = 0;
    for (const Plane& plane : group.planes) {
      const UnitLayout unit =
          collapse({plane.num_heads, plane.num_tokens, plane.content_bytes, plane.block_stride_bytes,
                    plane.head_stride_bytes, plane.token_stride_bytes});
      table.push_back({plane.base, unit, unit_bytes_before});
      planes_.push_back({alignment_bits(plane, unit), unit.content_bytes >= kMinBulkRowBytes});
      unit_bytes_before += unit.unit_bytes();
    }
  }
  if (table.empty()) return {};
  const std::size_t bytes = table.size() * sizeof(PlaneEntry);
  KVPUSH_TRY(cuda_.check(cuda_.mem_alloc(&table_, bytes), "cuMemAlloc"));
  const CudaStream stream = streams_.front().handle;
  KVPUSH_TRY(
      cuda_.check(cuda_.memcpy_async(table_, address_bits(table.data()), bytes, stream), "cuMemcpyAsync"));
  return cuda_.check(cuda_.stream_synchronize(stream), "cuStreamSynchronize");
}

// At the end of a process the driver may be gone: then these calls do nothing, and there is nothing to do.
CudaPacker::~CudaPacker() {
  std::vector<PackDone> ended;
  CudaPacker::poll(ended);
  // Its kernels still use what they were given, and freeing that would wait for them.
  if (!in_flight_.empty()) {
    keep(device_);
    return;
  }
  const CudaScope scope(*device_);
  for (const auto& launch : launches_) {
    if (launch->ended != nullptr) (void)cuda_.event_destroy(launch->ended);
    if (launch->counters != 0) (void)cuda_.mem_free(launch->counters);
    if (launch->pinned != nullptr) (void)cuda_.mem_free_host(launch->pinned);
  }
  if (table_ != 0) (void)cuda_.mem_free(table_);
  for (const Stream& stream : streams_) (void)cuda_.stream_destroy(stream.handle);
  if (module_ != nullptr) (void)cuda_.module_unload(module_);
}

void CudaPacker::start(PackJob job) {
  Status status = lost_.ok() ? check_job(cache_, job) : lost_;
  if (status.ok()) status = launch(job);
  if (!status.ok()) failed_.push_back({job.ticket, 0, 0, std::move(status)});
}

Status CudaPacker::launch(const PackJob& job) {
  const CudaScope scope(*device_);
  if (free_.empty()) {
    free_.push_back(launches_.emplace_back(std::make_unique<Launch>()).get());
    free_.back()->stream = static_cast<unsigned>((launches_.size() - 1) % streams_.size());
  }
  Launch& launch = *free_.front();
  KVPUSH_TRY(prepare(launch, job.block_ids.size()));
  KVPUSH_TRY(flush_direct_writes(job));
  KVPUSH_TRY(launch_with(launch, job));
  // From here on the device may touch the job's memory: only its end ends the job.
  launch.recorded = cuda_.check(cuda_.event_record(launch.ended, stream_of(launch)), "cuEventRecord");
  free_.pop_front();
  in_flight_.push_back(&launch);
  busy_blocks_ += launch.num_blocks;
  return {};
}

/// Makes what the launch lacks. What it got stays with it, also if something fails.
Status CudaPacker::prepare(Launch& launch, std::size_t num_ids) {
  if (launch.ended == nullptr) {
    KVPUSH_TRY(cuda_.check(cuda_.event_create(&launch.ended, kCudaEventDisableTiming), "cuEventCreate"));
  }
  if (launch.counters == 0) {
    CudaPointer counters = 0;
    KVPUSH_TRY(cuda_.check(cuda_.mem_alloc(&counters, kCounterBytes), "cuMemAlloc"));
    const Status zeroed =
        cuda_.check(cuda_.memset_async(counters, 0, kCounterBytes, stream_of(launch)), "cuMemsetD8Async");
    if (!zeroed.ok()) {
      (void)cuda_.mem_free(counters);
      return zeroed;
    }
    launch.counters = counters;
  }
  if (launch.pinned != nullptr && launch.max_ids >= num_ids) return {};
  max_ids_ = std::max(max_ids_, std::bit_ceil(num_ids));
  void* pinned = nullptr;
  KVPUSH_TRY(cuda_.check(cuda_.mem_host_alloc(&pinned, kIdsOffset + max_ids_ * sizeof(std::int32_t),
                                              kCudaHostPortable | kCudaHostDeviceMap),
                         "cuMemHostAlloc"));
  if (launch.pinned != nullptr) (void)cuda_.mem_free_host(launch.pinned);
  launch.pinned = static_cast<std::byte*>(pinned);
  launch.max_ids = max_ids_;
  return {};
}

/// What a NIC wrote into this GPU's memory may still be on its way there when the notice is here.
Status CudaPacker::flush_direct_writes(const PackJob& job) {
  if (device_->direct_writes() != CudaDirectWrites::kFlushed || job.kind != PackJob::Kind::kUnpack) return {};
  unsigned type = 0;
  KVPUSH_TRY(cuda_.check(cuda_.pointer_get_attribute(&type, kCudaPointerMemoryType, address_bits(job.dense)),
                         "cuPointerGetAttribute"));
  if (type != kCudaMemoryTypeDevice) return {};
  return cuda_.check(cuda_.flush_gpu_direct_writes(kCudaFlushTargetCurrentContext, kCudaFlushToOwner),
                     "cuFlushGPUDirectRDMAWrites");
}

bool CudaPacker::takes_bulk(const PackJob& job, const CopyArgs& args) const {
  const auto first =
      planes_.begin() + static_cast<std::ptrdiff_t>(first_plane_[job.box.group] + args.plane_begin);
  return bulk_kernels_[static_cast<std::size_t>(job.kind)] != nullptr && args.chunk_bytes == kMaxChunkBytes &&
         std::all_of(first, first + args.num_planes, [](const PlaneInfo& plane) { return plane.bulk; });
}

/// What boxes in flight have left of the SMs; a stream's part at least, so that each has a turn.
unsigned CudaPacker::blocks_to_take() const {
  const unsigned part = max_blocks_ / static_cast<unsigned>(streams_.size());
  return std::max(part, max_blocks_ - std::min(max_blocks_, busy_blocks_));
}

Status CudaPacker::launch_with(Launch& launch, const PackJob& job) {
  auto* const ids = reinterpret_cast<std::int32_t*>(launch.pinned + kIdsOffset);
  std::copy(job.block_ids.begin(), job.block_ids.end(), ids);
  const std::size_t first = first_plane_[job.box.group];
  std::uint64_t bits = kMaxChunkBytes | address_bits(job.dense);
  for (std::uint32_t p = job.box.plane_begin; p < job.box.plane_end; ++p)
    bits |= planes_[first + p].alignment_bits;

  CopyArgs args;
  args.planes = std::bit_cast<const PlaneEntry*>(table_) + first;
  args.block_ids = ids;
  args.dense = job.dense;
  args.partial_sum = std::bit_cast<std::uint64_t*>(launch.counters);
  args.num_arrived = std::bit_cast<std::uint32_t*>(launch.counters + kArrivedOffset);
  args.checksum = reinterpret_cast<std::uint64_t*>(launch.pinned);
  args.plane_begin = job.box.plane_begin;
  args.num_planes = job.box.num_planes();
  args.num_positions = job.box.num_positions();
  args.chunk_bytes = static_cast<std::uint32_t>(bits & (~bits + 1));

  const bool bulk = takes_bulk(job, args);
  const CudaFunction kernel = (bulk ? bulk_kernels_ : kernels_)[static_cast<std::size_t>(job.kind)];
  const LaunchShape shape = launch_shape(packed_bytes(cache_, job.box) / args.chunk_bytes, blocks_to_take(),
                                         bulk ? kBulkThreadsPerBlock : kCopyThreadsPerBlock);
  args.batches_per_warp = shape.batches_per_warp;
  void* parameters[] = {&args};
  launch.num_blocks = shape.num_blocks;
  launch.ticket = job.ticket;
  launch.started_at = monotonic_us();
  return cuda_.check(cuda_.launch_kernel(kernel, shape.num_blocks, 1, 1, shape.num_threads, 1, 1, 0,
                                         stream_of(launch), parameters, nullptr),
                     "cuLaunchKernel");
}

void CudaPacker::poll(std::vector<PackDone>& done) {
  for (PackDone& one : failed_) done.push_back(std::move(one));
  failed_.clear();
  if (in_flight_.empty()) return;
  const CudaScope scope(*device_);
  unsigned waiting = 0;  // bits of streams that have not come further
  std::erase_if(in_flight_, [&](Launch* launch) {
    const unsigned bit = 1U << launch->stream;
    if (!lost_.ok() || (waiting & bit) != 0) return false;
    Stream& stream = streams_[launch->stream];
    // Without its event: when the stream has nothing to do any more, so later jobs only delay it.
    const CudaCode code =
        launch->recorded.ok() ? cuda_.event_query(launch->ended) : cuda_.stream_query(stream.handle);
    if (ends_context(code)) {
      lost_ = cuda_.check(code, "the CUDA device failed: cuEventQuery");
      return false;
    }
    if (code != kCudaOk) {
      // After an error the copy goes on: it has failed, but ends with what the stream still does.
      if (code != kCudaNotReady && launch->recorded.ok())
        launch->recorded = cuda_.check(code, "cuEventQuery");
      waiting |= bit;
      return false;
    }
    std::uint64_t checksum = 0;
    std::memcpy(&checksum, launch->pinned, sizeof(checksum));
    const TimeUs now = monotonic_us();
    done.push_back(
        {launch->ticket, checksum, now - std::max(launch->started_at, stream.last_end), launch->recorded});
    stream.last_end = now;
    busy_blocks_ -= launch->num_blocks;
    free_.push_back(launch);
    return true;
  });
  if (lost_.ok()) return;
  // After an error of the device none of its work runs any more.
  for (Launch* launch : in_flight_) {
    done.push_back({launch->ticket, 0, 0, lost_});
    free_.push_back(launch);
  }
  in_flight_.clear();
  busy_blocks_ = 0;
}

}  // namespace

Result<std::unique_ptr<Packer>> make_cuda_packer(const Cache& cache, std::shared_ptr<const CudaDevice> device,
                                                 std::span<const std::byte> kernels,
                                                 const CudaPackerOptions& options) {
  auto packer = std::make_unique<CudaPacker>(cache, std::move(device));
  KVPUSH_TRY(packer->init(kernels, options));
  return std::unique_ptr<Packer>(std::move(packer));
}

}  // namespace kvpush
