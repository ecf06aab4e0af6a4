// The CUDA packer on the fake driver, against the CPU packer.
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "check.hpp"
#include "cuda_world.hpp"
#include "pack/cuda/copy_args.hpp"

using namespace kvpush;

namespace {

/// All there are, in the order of creation.
std::vector<CudaStream> all_streams() {
  std::vector<CudaStream> streams;
  while (CudaStream stream = fake().stream(static_cast<int>(streams.size()))) streams.push_back(stream);
  return streams;
}

/// Packs and unpacks with both packers, and compares dense forms, checksums and caches.
void check_round_trip(const std::shared_ptr<const CudaDevice>& device, const std::vector<Plane>& planes,
                      const std::vector<std::int32_t>& ids, std::mt19937_64& random, unsigned num_sms,
                      std::size_t shift = 0, std::size_t dense_shift = 0) {
  const GpuCache source(device, planes, random, shift);
  const GpuCache target(device, planes, random, shift);
  const Box box = source.box(ids.size());
  const std::size_t size = packed_bytes(source.cache, box);
  const GpuMemory slot(device, size + dense_shift, random);
  std::byte* const dense = slot.data() + dense_shift;
  std::vector<std::byte> expected(size);
  const PackDone by_cpu = run_pack_job(source.cache, {1, PackJob::Kind::kPack, box, ids, expected.data()});

  const auto packer = make_packer(source.cache, device, num_sms);
  packer->start({5, PackJob::Kind::kPack, box, ids, dense});
  const PackDone packed = poll_for(*packer, 1).at(0);
  CHECK(packed.status.ok());
  CHECK_EQ(packed.ticket, 5);
  CHECK_EQ(packed.checksum, by_cpu.checksum);
  CHECK(std::equal(expected.begin(), expected.end(), dense));

  // The CPU unpacks into the target first, to have what it must be, then all is put back.
  std::vector<std::vector<std::byte>> before;
  std::vector<std::vector<std::byte>> after;
  for (const auto& memory : target.memory) before.push_back(memory->copy());
  CHECK(run_pack_job(target.cache, {2, PackJob::Kind::kUnpack, box, ids, expected.data()}).status.ok());
  for (std::size_t i = 0; i < before.size(); ++i) {
    after.push_back(target.memory[i]->copy());
    std::copy(before[i].begin(), before[i].end(), target.memory[i]->data());
  }
  const auto unpacker = make_packer(target.cache, device, num_sms);
  unpacker->start({6, PackJob::Kind::kUnpack, box, ids, dense});
  const PackDone unpacked = poll_for(*unpacker, 1).at(0);
  CHECK(unpacked.status.ok());
  CHECK_EQ(unpacked.checksum, by_cpu.checksum);
  for (std::size_t i = 0; i < after.size(); ++i) CHECK(target.memory[i]->copy() == after[i]);
}

}  // namespace

TEST(random_planes_move_as_on_the_cpu) {
  fake().reset();
  const auto device = open_device();
  std::mt19937_64 random(11);
  const auto below = [&random](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  for (int round = 0; round < 60; ++round) {
    const std::int64_t num_blocks = 1 + below(20);
    const std::int64_t num_heads = 1 + below(3);
    const std::int64_t unit = std::int64_t{1} << below(5);
    std::vector<Plane> planes;
    for (std::int64_t p = 1 + below(3); p > 0; --p) {
      Nesting nesting = kNestings[random() % kNestings.size()];
      nesting = {nesting.order, unit * nesting.gap_b, unit * nesting.gap_h, unit * nesting.gap_n};
      planes.push_back(make_plane({num_blocks, num_heads, 1 + below(5), unit * (1 + below(20))}, nesting));
    }
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(static_cast<std::size_t>(1 + below(num_blocks)));
    check_round_trip(device, planes, ids, random, static_cast<unsigned>(below(4)),
                     static_cast<std::size_t>(unit * below(3)), static_cast<std::size_t>(below(40)));
  }
}

TEST(each_stride_alone_limits_the_chunks) {
  fake().reset();
  const auto device = open_device();
  std::mt19937_64 random(14);
  for (const Nesting& nesting : {Nesting{"bhn", 4, 0, 0}, {"bhn", 0, 4, 0}, {"bhn", 0, 0, 4}}) {
    check_round_trip(device, {make_plane({5, 2, 4, 64}, nesting)}, {1, 4, 3}, random, 0);
  }
}

TEST(long_rows_take_the_bulk_kernels_where_that_is_wanted_and_there_are_any) {
  for (const int major : {8, 9}) {
    fake().reset();
    fake().set_attribute(kCudaAttributeComputeMajor, major);
    const auto device = open_device();
    std::mt19937_64 random(12);
    const Plane rows = make_plane({5, 2, 4, kMinBulkRowBytes}, kNestings[4]);
    const Plane dense = make_plane({5, 2, 4, 512}, kNestings[0]);
    const Plane narrow = make_plane({5, 2, 4, kMinBulkRowBytes - 16}, kNestings[4]);
    check_round_trip(device, {rows, dense}, {4, 0, 1}, random, 0);
    const long num_bulk = fake().count(kPackBulkKernel) + fake().count(kUnpackBulkKernel);
    CHECK_EQ(num_bulk, major == 9 ? 2 : 0);
    check_round_trip(device, {rows, narrow}, {4, 0, 1}, random, 0);
    check_round_trip(device, {rows, dense}, {4, 0, 1}, random, 0, 8);
    check_round_trip(device, {rows, dense}, {4, 0, 1}, random, 0, 0, 8);
    CHECK_EQ(fake().count(kPackBulkKernel) + fake().count(kUnpackBulkKernel), num_bulk);
  }
}

TEST(boxes_of_some_planes_and_of_several_groups) {
  fake().reset();
  const auto device = open_device();
  std::mt19937_64 random(13);
  GpuCache all(device,
               {make_plane({6, 2, 3, 40}, kNestings[0]), make_plane({6, 2, 5, 7}, kNestings[3]),
                make_plane({6, 2, 2, 64}, kNestings[4]), make_plane({6, 2, 1, 96}, kNestings[6])},
               random);
  auto& groups = all.cache.groups;
  groups.push_back({16, {groups[0].planes[2], groups[0].planes[3]}});
  groups[0].planes.resize(2);
  const auto packer = make_packer(all.cache, device);
  const std::vector<std::int32_t> ids{5, 1, 2, 0};
  for (const Box& box : {Box{0, 0, 2, 0, 2, 3, 7}, Box{0, 1, 2, 0, 2, 0, 4}, Box{1, 0, 1, 0, 2, 0, 4},
                         Box{1, 1, 2, 0, 2, 0, 4}, Box{1, 0, 2, 0, 2, 0, 4}}) {
    const std::size_t size = packed_bytes(all.cache, box);
    const GpuMemory slot(device, size, random);
    std::vector<std::byte> expected(size);
    const PackDone by_cpu = run_pack_job(all.cache, {1, PackJob::Kind::kPack, box, ids, expected.data()});
    packer->start({1, PackJob::Kind::kPack, box, ids, slot.data()});
    const PackDone done = poll_for(*packer, 1).at(0);
    CHECK_EQ(done.checksum, by_cpu.checksum);
    CHECK(slot.copy() == expected);
  }
}

TEST(dense_form_in_pinned_host_memory) {
  fake().reset();
  Bench bench;
  std::vector<std::byte> dense(bench.slot_bytes());
  {
    const CudaScope scope(*bench.device);
    CHECK_EQ(bench.device->driver().mem_host_register(dense.data(), dense.size(), kCudaHostPortable), 0);
  }
  PackJob job = bench.job(0);
  job.dense = dense.data();
  bench.packer->start(job);
  const PackDone done = poll_for(*bench.packer, 1).at(0);
  std::vector<std::byte> expected(dense.size());
  job.dense = expected.data();
  CHECK_EQ(done.checksum, run_pack_job(bench.cache.cache, job).checksum);
  expected.resize(packed_bytes(bench.cache.cache, job.box));
  CHECK(std::equal(expected.begin(), expected.end(), dense.begin()));
  const CudaScope scope(*bench.device);
  CHECK_EQ(bench.device->driver().mem_host_unregister(dense.data()), 0);
}

TEST(jobs_outside_the_cache_end_with_an_error) {
  fake().reset();
  const Bench bench;
  const std::vector<std::int32_t> outside{3, 8, 0};
  PackJob bad_id = bench.job(0);
  bad_id.block_ids = outside;
  PackJob bad_box = bench.job(1);
  bad_box.box.plane_end = 2;
  PackJob no_memory = bench.job(2);
  no_memory.dense = nullptr;
  for (const PackJob& job : {bad_id, bad_box, no_memory}) bench.packer->start(job);
  bench.packer->start(bench.job(3));
  for (const PackDone& done : poll_for(*bench.packer, 4)) {
    CHECK_EQ(done.status.code(), done.ticket == 3 ? Code::kOk : Code::kInvalidArgument);
  }
  CHECK_EQ(fake().count("cuLaunchKernel"), 1);
}

TEST(a_pack_is_not_done_before_its_event) {
  fake().reset();
  const Bench bench;
  const auto before = bench.slots[1]->copy();
  for (CudaStream stream : all_streams()) fake().hold(stream);
  for (std::size_t i = 0; i < 3; ++i) bench.packer->start(bench.job(i));
  std::vector<PackDone> done;
  for (int i = 0; i < 20; ++i) bench.packer->poll(done);
  CHECK(done.empty());
  CHECK(bench.slots[1]->copy() == before);
  for (CudaStream stream : all_streams()) fake().release(stream);
  done = poll_for(*bench.packer, 3);
  for (const PackDone& one : done) {
    CHECK(one.status.ok());
    CHECK(one.copy_us >= 0);
  }
  const std::size_t size = packed_bytes(bench.cache.cache, bench.job(0).box);
  CHECK(std::equal(bench.slots[0]->data(), bench.slots[0]->data() + size, bench.slots[1]->data()));
}

TEST(a_box_that_takes_long_delays_those_of_its_stream_only) {
  fake().reset();
  const Bench bench;
  const CudaStream slow = fake().stream(0);
  fake().hold(slow);
  // Jobs 0 and 3 are on the slow stream.
  for (std::size_t i = 0; i < 4; ++i) bench.packer->start(bench.job(i));
  std::set<TicketId> ended;
  for (const PackDone& done : poll_for(*bench.packer, 2)) ended.insert(done.ticket);
  CHECK(ended == (std::set<TicketId>{1, 2}));
  std::vector<PackDone> more;
  for (int i = 0; i < 20; ++i) bench.packer->poll(more);
  CHECK(more.empty());
  fake().release(slow);
  const std::vector<PackDone> late = poll_for(*bench.packer, 2);
  CHECK_EQ(late.at(0).ticket, 0);
  CHECK_EQ(late.at(1).ticket, 3);
}

TEST(streams_that_end_in_any_order_move_the_same_bytes) {
  fake().reset();
  std::mt19937_64 random(21);
  const auto device = open_device();
  constexpr std::size_t kNumSlots = 10;
  // Packs read the first 8 blocks; each slot unpacks into two of its own.
  const GpuCache cache(device, {make_plane({8 + 2 * kNumSlots, 2, 3, 48}, kNestings[4])}, random);
  struct Slot {
    std::unique_ptr<GpuMemory> memory;
    std::vector<std::int32_t> ids;
    PackJob job;
    bool busy = false;
  };
  std::array<Slot, kNumSlots> slots;
  const Box box = cache.box(2);
  const std::size_t size = packed_bytes(cache.cache, box);
  for (Slot& slot : slots) slot.memory = std::make_unique<GpuMemory>(device, size, random);
  const long before = fake().leaks();
  auto packer = make_packer(cache.cache, device);
  const std::vector<CudaStream> streams = all_streams();
  CHECK(streams.size() >= 2);
  std::vector<bool> held(streams.size());

  TicketId last_ended = 0;
  std::size_t num_ended = 0;
  std::size_t num_overtaken = 0;
  std::vector<PackDone> done;
  for (TicketId ticket = 1; num_ended < 400;) {
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (random() % 8 != 0) continue;
      held[i] ? fake().release(streams[i]) : fake().hold(streams[i]);
      held[i] = !held[i];
    }
    const std::size_t at = random() % kNumSlots;
    Slot& slot = slots.at(at);
    if (!slot.busy && ticket <= 400) {
      const bool packs = random() % 2 == 0;
      const auto own = static_cast<std::int32_t>(8 + 2 * at);
      const auto first = static_cast<std::int32_t>(random() % 7);
      slot.ids = packs ? std::vector{first + 1, first} : std::vector{own + 1, own};
      for (std::byte& byte : slot.memory->bytes()) byte = static_cast<std::byte>(random());
      slot.job = {ticket++, packs ? PackJob::Kind::kPack : PackJob::Kind::kUnpack, box, slot.ids,
                  slot.memory->data()};
      slot.busy = true;
      packer->start(slot.job);
    }
    done.clear();
    packer->poll(done);
    for (const PackDone& one : done) {
      const auto found = std::find_if(slots.begin(), slots.end(), [&one](const Slot& some) {
        return some.busy && some.job.ticket == one.ticket;
      });
      if (!CHECK(found != slots.end())) return;
      found->busy = false;
      // Either way the slot now holds what the blocks do.
      std::vector<std::byte> blocks(size);
      PackJob again = found->job;
      again.kind = PackJob::Kind::kPack;
      again.dense = blocks.data();
      CHECK_EQ(run_pack_job(cache.cache, again).checksum, one.checksum);
      CHECK(found->memory->copy() == blocks);
      num_overtaken += one.ticket < last_ended ? 1 : 0;
      last_ended = one.ticket;
      ++num_ended;
    }
  }
  CHECK(num_overtaken > 20);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    if (held[i]) fake().release(streams[i]);
  }
  packer.reset();
  CHECK_EQ(fake().leaks(), before);
}

TEST(a_box_takes_the_sms_that_others_leave) {
  for (const unsigned num_sms : {1U, 2U, 6U}) {
    fake().reset();
    std::mt19937_64 random(22);
    const auto device = open_device();
    // 16 batches a box.
    const GpuCache cache(device, {make_plane({4, 1, 1, 16384}, kNestings[0])}, random);
    const std::vector<std::int32_t> ids{3, 0, 1, 2};
    const Box box = cache.box(ids.size());
    const GpuMemory slot(device, packed_bytes(cache.cache, box), random);
    const auto packer = make_cuda_packer(cache.cache, device, fake_kernels(), {num_sms, false});
    if (!CHECK(packer.ok())) return;
    const auto start = [&](TicketId ticket) {
      const long before = fake().count("blocks");
      packer.value()->start({ticket, PackJob::Kind::kPack, box, ids, slot.data()});
      return static_cast<unsigned>(fake().count("blocks") - before);
    };
    const unsigned part = num_sms / std::min(num_sms, 3U);
    CHECK_EQ(start(0), num_sms);
    CHECK_EQ(start(1), part);
    CHECK_EQ(start(2), part);
    poll_for(*packer.value(), 3);
    CHECK_EQ(start(3), num_sms);
    poll_for(*packer.value(), 1);
  }
}

TEST(a_job_whose_event_could_not_be_recorded_ends_after_its_copy) {
  fake().reset();
  const Bench bench;
  const auto before = bench.slots[0]->copy();
  for (CudaStream stream : all_streams()) fake().hold(stream);
  fake().fail("cuEventRecord", 1, kCudaOutOfMemory);
  bench.packer->start(bench.job(0));
  bench.packer->start(bench.job(1));
  std::vector<PackDone> done;
  for (int i = 0; i < 20; ++i) bench.packer->poll(done);
  CHECK(done.empty());
  CHECK(bench.slots[0]->copy() == before);
  for (CudaStream stream : all_streams()) fake().release(stream);
  for (const PackDone& one : poll_for(*bench.packer, 2)) {
    CHECK_EQ(one.status.code(), one.ticket == 0 ? Code::kExhausted : Code::kOk);
  }
  CHECK(bench.slots[0]->copy() != before);
}

TEST(one_launch_per_box_and_no_allocation_in_the_steady_state) {
  fake().reset();
  const Bench bench;
  const auto run = [&bench](int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (std::size_t i = 0; i < 4; ++i) {
        bench.packer->start(bench.job(i, i % 2 == 0 ? PackJob::Kind::kPack : PackJob::Kind::kUnpack));
      }
      for (const PackDone& done : poll_for(*bench.packer, 4)) CHECK(done.status.ok());
    }
  };
  run(1);
  fake().reset();
  run(20);
  CHECK_EQ(fake().count("cuLaunchKernel"), 80);
  CHECK_EQ(fake().count("cuEventRecord"), 80);
  for (const char* symbol : {"cuMemAlloc_v2", "cuMemHostAlloc", "cuMemFree_v2", "cuMemFreeHost",
                             "cuEventCreate", "cuStreamCreateWithPriority", "cuStreamSynchronize",
                             "cuMemcpyAsync", "cuMemsetD8Async", "cuFlushGPUDirectRDMAWrites"}) {
    CHECK_EQ(fake().count(symbol), 0);
  }
}

TEST(more_positions_than_before_get_more_pinned_memory) {
  fake().reset();
  std::mt19937_64 random(3);
  const auto device = open_device();
  const GpuCache cache(device, {make_plane({5000, 1, 1, 4}, kNestings[0])}, random);
  const long before = fake().leaks();
  auto packer = make_packer(cache.cache, device);
  for (const std::size_t num_positions : {1U, 1024U, 1025U, 5000U, 7U, 5000U}) {
    std::vector<std::int32_t> ids(num_positions);
    std::iota(ids.rbegin(), ids.rend(), 0);
    const Box box = cache.box(num_positions);
    const GpuMemory slot(device, packed_bytes(cache.cache, box), random);
    packer->start({1, PackJob::Kind::kPack, box, ids, slot.data()});
    const PackDone done = poll_for(*packer, 1).at(0);
    std::vector<std::byte> expected(packed_bytes(cache.cache, box));
    CHECK_EQ(done.checksum,
             run_pack_job(cache.cache, {1, PackJob::Kind::kPack, box, ids, expected.data()}).checksum);
    CHECK(slot.copy() == expected);
  }
  CHECK_EQ(fake().count("cuMemHostAlloc"), 3);
  packer.reset();
  CHECK_EQ(fake().leaks(), before);
}

TEST(unpacks_of_device_memory_are_flushed_where_a_nics_writes_are_not_ordered) {
  struct Case {
    int ordering;
    int options;
    long num_flushes;
  };
  for (const Case& c : {Case{0, 1, 1}, Case{100, 1, 0}, Case{200, 1, 0}, Case{0, 0, 0}}) {
    fake().reset();
    fake().set_attribute(kCudaAttributeGpuDirectWritesOrdering, c.ordering);
    fake().set_attribute(kCudaAttributeGpuDirectFlushOptions, c.options);
    const Bench bench;
    std::vector<std::byte> host(bench.slot_bytes());
    const CudaScope scope(*bench.device);
    const CudaDriver& cuda = bench.device->driver();
    CHECK_EQ(cuda.mem_host_register(host.data(), host.size(), kCudaHostPortable), 0);
    PackJob from_host = bench.job(2, PackJob::Kind::kUnpack);
    from_host.dense = host.data();
    bench.packer->start(bench.job(0));
    bench.packer->start(bench.job(1, PackJob::Kind::kUnpack));
    bench.packer->start(from_host);
    for (const PackDone& done : poll_for(*bench.packer, 3)) CHECK(done.status.ok());
    CHECK_EQ(fake().count("cuFlushGPUDirectRDMAWrites"), c.num_flushes);
    CHECK_EQ(cuda.mem_host_unregister(host.data()), 0);
  }
}

TEST(kernels_that_do_not_fit_are_refused) {
  fake().reset();
  const Bench bench;
  const auto refuse = [&bench](std::span<const std::byte> kernels) {
    return make_cuda_packer(bench.cache.cache, bench.device, kernels, {}).status();
  };
  CHECK_EQ(refuse({}).code(), Code::kInvalidArgument);
  constexpr char kGarbage[] = "garbage";
  CHECK_EQ(refuse(std::as_bytes(std::span(kGarbage))).code(), Code::kTransport);
  fake().fail("cuModuleLoadData", 1, kCudaNoBinaryForGpu);
  const Status status = refuse(fake_kernels());
  CHECK_EQ(status.code(), Code::kUnsupported);
  CHECK(status.message().find("Fake GPU, compute capability 9.0") != std::string::npos);
}

TEST(planes_that_are_not_on_the_device_are_refused) {
  fake().reset();
  const auto device = open_device();
  std::mt19937_64 random(15);
  const GpuCache on_device(device, {make_plane({4, 1, 1, 64}, kNestings[0])}, random);
  std::vector<std::byte> host(4 * 64);
  Cache cache = on_device.cache;
  cache.groups[0].planes[0].base = host.data();
  cache.groups[0].planes[0].name = "layer 7";
  const long before = fake().leaks();
  const Status unknown = make_cuda_packer(cache, device, fake_kernels(), {}).status();
  CHECK_EQ(unknown.code(), Code::kInvalidArgument);
  CHECK(unknown.message().find("'layer 7' is said to be on CUDA device 0, but the driver does not know") !=
        std::string::npos);
  CHECK_EQ(fake().leaks(), before);
}

TEST(a_lost_device_ends_every_job_and_refuses_later_ones) {
  fake().reset();
  const Bench bench;
  const GpuStream user(bench.device);
  for (CudaStream stream : all_streams()) fake().hold(stream);
  user.record();
  const FenceId fence = bench.packer->capture(user.handle()).value();
  for (std::size_t i = 0; i < 3; ++i) bench.packer->start(bench.job(i));
  std::vector<PackDone> done;
  bench.packer->poll(done);
  CHECK(done.empty());
  fake().fail("cuEventQuery", 1, 719);
  for (const PackDone& one : poll_for(*bench.packer, 3)) {
    CHECK_EQ(one.status.code(), Code::kTransport);
    CHECK(one.status.message().find("CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
  }
  CHECK(bench.packer->passed(fence));
  const long num_launches = fake().count("cuLaunchKernel");
  bench.packer->start(bench.job(3));
  const PackDone late = poll_for(*bench.packer, 1).at(0);
  CHECK_EQ(late.ticket, 3);
  CHECK_EQ(late.status.code(), Code::kTransport);
  CHECK_EQ(fake().count("cuLaunchKernel"), num_launches);
}

TEST(an_error_that_leaves_the_device_alive_fails_one_job_after_its_copy) {
  fake().reset();
  const Bench bench;
  const auto before = bench.slots[0]->copy();
  for (CudaStream stream : all_streams()) fake().hold(stream);
  bench.packer->start(bench.job(0));
  fake().fail("cuEventQuery", 1, 1);
  fake().fail("cuStreamQuery", 1, 400);
  std::vector<PackDone> done;
  for (int i = 0; i < 3; ++i) bench.packer->poll(done);
  CHECK(done.empty());
  CHECK(bench.slots[0]->copy() == before);
  for (CudaStream stream : all_streams()) fake().release(stream);
  done = poll_for(*bench.packer, 1);
  CHECK_EQ(done.at(0).status.code(), Code::kTransport);
  CHECK(done.at(0).status.message().find("CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  CHECK(bench.slots[0]->copy() != before);
  bench.packer->start(bench.job(1));
  CHECK(poll_for(*bench.packer, 1).at(0).status.ok());
}

TEST(a_packer_that_ends_before_its_kernels_keeps_what_they_use) {
  fake().reset();
  Bench bench;
  const auto before = bench.slots[1]->copy();
  for (std::size_t i = 0; i < 2; ++i) bench.packer->start(bench.job(i));
  fake().reset();
  bench.packer.reset();
  for (const char* symbol : {"cuMemFree_v2", "cuMemFreeHost", "cuStreamDestroy_v2", "cuModuleUnload",
                             "cuStreamSynchronize", "cuDevicePrimaryCtxRelease_v2"}) {
    CHECK_EQ(fake().count(symbol), 0);
  }
  // The fake dies where a kernel touches memory that is gone.
  const GpuStream user(bench.device);
  const CudaScope scope(*bench.device);
  for (int i = 0; i < 10; ++i) (void)bench.device->driver().event_query(user.event);
  CHECK(bench.slots[1]->copy() != before);
}

// Once per symbol, per call of it, and per code: the packer is not made, or every job ends once; and all is
// given back.
TEST(every_failing_call_ends_in_a_status_and_leaks_nothing) {
  std::vector<std::string> symbols;
#define KVPUSH_TEST_SYMBOL(symbol, name, type) symbols.emplace_back(#symbol);
  KVPUSH_CUDA_FUNCTIONS(KVPUSH_TEST_SYMBOL)
#undef KVPUSH_TEST_SYMBOL
  fake().reset();
  std::mt19937_64 random(17);
  const auto driver = load_cuda_driver(FAKE_CUDA_LIBRARY);
  const auto device = open_device();
  const GpuCache cache(device, {make_plane({8, 2, 4, 32}, kNestings[0])}, random);
  const std::vector<std::int32_t> ids{1, 7};
  const Box box = cache.box(ids.size());
  std::vector<std::unique_ptr<GpuMemory>> slots;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(std::make_unique<GpuMemory>(device, packed_bytes(cache.cache, box), random));
  }
  const GpuStream user(device);

  const auto run = [&] {
    const auto own = CudaDevice::open(driver.value(), 0);
    if (!own.ok()) return false;
    const auto packer = make_cuda_packer(cache.cache, own.value(), fake_kernels(), {});
    if (!packer.ok()) return false;
    bool all_ok = true;
    std::map<TicketId, int> ends;
    for (TicketId round = 0; round < 2; ++round) {
      // Its record may meet the fault.
      fake().hold(user.stream);
      {
        const CudaScope scope(*device);
        all_ok = device->driver().event_record(user.event, user.stream) == kCudaOk && all_ok;
      }
      const Result<FenceId> waited = packer.value()->capture(user.handle());
      const Result<FenceId> dropped = packer.value()->capture(user.handle());
      fake().release(user.stream);
      all_ok = all_ok && waited.ok() && dropped.ok();
      for (TicketId i = 0; i < 3; ++i) {
        const auto kind = i == 1 ? PackJob::Kind::kUnpack : PackJob::Kind::kPack;
        packer.value()->start({3 * round + i, kind, box, ids, slots[i]->data()});
      }
      for (const PackDone& done : poll_for(*packer.value(), 3)) {
        ++ends[done.ticket];
        all_ok = all_ok && done.status.ok();
      }
      if (dropped.ok()) packer.value()->drop(dropped.value());
      bool passed = !waited.ok();
      for (int i = 0; i < 20 && !passed; ++i) passed = packer.value()->passed(waited.value());
      CHECK(passed);
    }
    std::vector<PackDone> more;
    packer.value()->poll(more);
    CHECK(more.empty());
    CHECK_EQ(ends.size(), 6);
    for (const auto& [ticket, count] : ends) CHECK_EQ(count, 1);
    return all_ok;
  };

  const auto unordered = [] { fake().set_attribute(kCudaAttributeGpuDirectWritesOrdering, 0); };
  unordered();
  CHECK(run());
  std::size_t num_faults = 0;
  for (const std::string& symbol : symbols) {
    // These say what an error is called; the error itself is injected elsewhere.
    if (symbol == "cuGetErrorName" || symbol == "cuGetErrorString") continue;
    for (const int code : {2, 1, 719}) {
      for (int nth = 1; nth < 1000; ++nth) {
        fake().reset();
        unordered();
        const long before = fake().leaks();
        fake().fail(symbol.c_str(), nth, code);
        const bool all_ok = run();
        if (fake().count(symbol.c_str()) < nth) {
          CHECK(all_ok);
          break;
        }
        ++num_faults;
        // Without the context nothing can be given back, if it is the destructor that does not get it.
        if (symbol != "cuCtxPushCurrent_v2" && !CHECK_EQ(fake().leaks(), before)) {
          check::fail(symbol.c_str(), nth, "leaks after code " + std::to_string(code));
        }
      }
    }
  }
  CHECK(num_faults > 300);
  fake().reset();
}
