#include "fake_state.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fake_cuda.hpp"
#include "play_copy.hpp"

namespace kvpush::fake {
namespace {

bool needs_are_met(Call::Needs needs) {
  if (needs == Call::Needs::kNothing) return true;
  return state().initialized && (needs != Call::Needs::kContext || current_context() != nullptr);
}

/// After these a context is of no use (cuda.h: "the context cannot be used").
bool breaks_device(CudaCode code) {
  return code == 214 || code == 220 || code == 226 || code == 700 || code == 702 || code == 709 ||
         code == 710 || (code >= 714 && code <= 719) || code == 721;
}

CudaCode fault_of(const char* symbol, Call::Needs needs) {
  State& s = state();
  ++s.counts[symbol];
  if (!needs_are_met(needs)) return s.initialized ? kInvalidContext : kNotInitialized;
  if (s.broken != kCudaOk && needs >= Call::Needs::kDevice) return s.broken;
  const auto found = s.faults.find(symbol);
  if (found == s.faults.end()) return kCudaOk;
  if (found->second.nth > 0 && --found->second.nth > 0) return kCudaOk;
  const CudaCode code = found->second.code;
  if (found->second.nth == 0) s.faults.erase(found);
  if (breaks_device(code)) s.broken = code;
  return code;
}

bool divides(std::uint32_t chunk_bytes, std::int64_t value) {
  return value % chunk_bytes == 0;
}

}  // namespace

State& state() {
  // Never destroyed: other libraries' exit handlers may still call.
  static auto* const s = [] {
    auto* made = new State;
    for (int i = 0; i < kMaxDevices; ++i) {
      CudaContextObject& context = made->contexts[static_cast<std::size_t>(i)];
      context.device = i;
      made->default_streams[static_cast<std::size_t>(i)].context = &context;
    }
    return made;
  }();
  return *s;
}

void die(const std::string& what) {
  std::fprintf(stderr, "fake CUDA driver: %s\n", what.c_str());
  std::abort();
}

Call::Call(const char* symbol, Needs needs)
    : lock_(state().mutex), refused(!needs_are_met(needs)), code(fault_of(symbol, needs)) {}

std::vector<CudaContext>& context_stack() {
  thread_local std::vector<CudaContext> stack;
  return stack;
}

CudaContext current_context() {
  return context_stack().empty() ? nullptr : context_stack().back();
}

CudaStreamObject* find_stream(CudaStream stream) {
  State& s = state();
  if (stream == nullptr) {
    const CudaContext context = current_context();
    return context == nullptr ? nullptr : &s.default_streams[static_cast<std::size_t>(context->device)];
  }
  for (const auto& one : s.streams) {
    if (one.get() == stream) return stream;
  }
  return nullptr;
}

void advance(bool all) {
  State& s = state();
  if (s.broken != kCudaOk) return;
  bool moved = false;
  const auto step = [&moved](CudaStreamObject& stream) {
    if (stream.ops.empty() || !stream.ops.front()()) return;
    stream.ops.pop_front();
    moved = true;
  };
  do {
    moved = false;
    for (CudaStreamObject& stream : s.default_streams) step(stream);
    for (const auto& stream : s.streams) step(*stream);
    for (const auto& stream : s.destroyed) step(*stream);
  } while (all && moved);
  std::erase_if(s.destroyed, [](const auto& stream) { return stream->ops.empty(); });
}

const Memory* find_memory(std::uintptr_t address, std::size_t size) {
  const auto& memory = state().memory;
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return nullptr;
  --after;
  const std::size_t offset = address - after->first;
  return offset < after->second.size && size <= after->second.size - offset ? &after->second : nullptr;
}

void require_memory(const void* address, std::size_t size, const char* what) {
  if (find_memory(reinterpret_cast<std::uintptr_t>(address), size) != nullptr) return;
  char text[128];
  std::snprintf(text, sizeof(text),
                "a kernel touches %zu bytes at %p, which are not allocated (any more): ", size, address);
  die(std::string(text) + what);
}

void run_copy(const CudaFunctionObject& function, const CopyArgs& args, unsigned num_blocks,
              unsigned threads_per_block) {
  require_memory(args.planes, (args.plane_begin + args.num_planes) * sizeof(PlaneEntry), "table of planes");
  require_memory(args.block_ids, args.num_positions * sizeof(*args.block_ids), "block ids");
  require_memory(args.partial_sum, sizeof(*args.partial_sum), "partial sum");
  require_memory(args.num_arrived, sizeof(*args.num_arrived), "number arrived");
  require_memory(args.checksum, sizeof(*args.checksum), "checksum");
  if (*args.partial_sum != 0 || *args.num_arrived != 0) die("counters of a launch are not 0");
  const std::uint32_t chunk = args.chunk_bytes;
  if (chunk == 0 || chunk > 16 || (chunk & (chunk - 1)) != 0) die("chunk_bytes is " + std::to_string(chunk));
  std::int64_t dense_bytes = 0;
  for (std::uint32_t p = args.plane_begin; p < args.plane_begin + args.num_planes; ++p) {
    const PlaneEntry& plane = args.planes[p];
    const UnitLayout& unit = plane.layout;
    if (function.bulk && (chunk != 16 || unit.content_bytes < kMinBulkRowBytes)) {
      die("the bulk kernels do not take rows of " + std::to_string(unit.content_bytes) +
          " bytes in chunks of " + std::to_string(chunk));
    }
    const std::size_t extent = static_cast<std::size_t>(
        paged_offset(unit, 0, unit.num_heads - 1, unit.num_tokens - 1) + unit.content_bytes);
    for (std::uint32_t i = 0; i < args.num_positions; ++i) {
      const std::byte* block = plane.base + args.block_ids[i] * unit.block_stride_bytes;
      require_memory(block, extent, "a block");
      if (!divides(chunk, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(block))))
        die("misaligned block");
    }
    if (!divides(chunk, unit.content_bytes) ||
        (unit.num_heads > 1 && !divides(chunk, unit.head_stride_bytes)) ||
        (unit.num_tokens > 1 && !divides(chunk, unit.token_stride_bytes))) {
      die("chunks of " + std::to_string(chunk) + " bytes do not divide the rows or strides of a plane");
    }
    dense_bytes += unit.unit_bytes() * args.num_positions;
  }
  require_memory(args.dense, static_cast<std::size_t>(dense_bytes), "dense form");
  if (!divides(chunk, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(args.dense))))
    die("misaligned dense form");
  play_copy(args, function.packing, function.bulk, num_blocks, threads_per_block);
  if (*args.partial_sum != 0 || *args.num_arrived != 0) die("a launch leaves counters that are not 0");
}

}  // namespace kvpush::fake

using namespace kvpush;
using namespace kvpush::fake;

FAKE_CUDA_EXPORT void fake_cuda_fail(const char* symbol, int nth, int code) {
  const std::lock_guard lock(state().mutex);
  if (nth == 0) {
    state().faults.erase(symbol);
  } else {
    state().faults[symbol] = {nth, code};
  }
}

FAKE_CUDA_EXPORT long fake_cuda_count(const char* symbol) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().counts.find(symbol);
  return found == state().counts.end() ? 0 : found->second;
}

FAKE_CUDA_EXPORT long fake_cuda_leaks() {
  const std::lock_guard lock(state().mutex);
  const State& s = state();
  std::size_t count = s.memory.size() + s.modules.size() + s.events.size() + s.streams.size();
  for (const CudaContextObject& context : s.contexts) count += static_cast<std::size_t>(context.references);
  return static_cast<long>(count);
}

FAKE_CUDA_EXPORT void fake_cuda_reset() {
  const std::lock_guard lock(state().mutex);
  State& s = state();
  s.faults.clear();
  s.counts.clear();
  s.attributes.clear();
  if (s.broken == kCudaOk) return;
  s.broken = kCudaOk;
  s.destroyed.clear();
  for (CudaStreamObject& stream : s.default_streams) stream.ops.clear();
  for (const auto& stream : s.streams) stream->ops.clear();
}

FAKE_CUDA_EXPORT void fake_cuda_set_attribute(int attribute, int value) {
  const std::lock_guard lock(state().mutex);
  state().attributes[attribute] = value;
}

FAKE_CUDA_EXPORT CudaStream fake_cuda_stream(int nth) {
  const std::lock_guard lock(state().mutex);
  const auto& streams = state().streams;
  const auto index = static_cast<std::size_t>(nth);
  return index < streams.size() ? streams[index].get() : nullptr;
}

FAKE_CUDA_EXPORT void fake_cuda_hold(CudaStream stream) {
  const std::lock_guard lock(state().mutex);
  CudaStreamObject* const found = find_stream(stream);
  if (found == nullptr) die("fake_cuda_hold: no such stream");
  const auto released = std::make_shared<bool>(false);
  found->holds.push_back(released);
  found->ops.emplace_back([released] { return *released; });
}

FAKE_CUDA_EXPORT void fake_cuda_release(CudaStream stream) {
  const std::lock_guard lock(state().mutex);
  CudaStreamObject* const found = find_stream(stream);
  if (found == nullptr || found->holds.empty()) die("fake_cuda_release: nothing holds this stream");
  *found->holds.front() = true;
  found->holds.pop_front();
}
