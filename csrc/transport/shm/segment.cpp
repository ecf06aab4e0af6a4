#include "transport/shm/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

namespace kvpush::shm {
namespace {

constexpr std::uint64_t kMagic = 0x31474553504b564bU;
constexpr std::uint32_t kVersion = 1;
constexpr unsigned kSeals = unsigned{F_SEAL_SHRINK} | unsigned{F_SEAL_GROW} | unsigned{F_SEAL_SEAL};
constexpr std::size_t kAllocateStepBytes = std::size_t{16} << 20U;
// Linux 6.3; older headers lack it, older kernels answer EINVAL.
constexpr unsigned kMfdNoexecSeal = 8;

std::size_t bytes_of(const SegmentLayout& layout, Extent extent) {
  return extent == Extent::kAll ? layout.total_bytes : kSlotsOffset;
}

Status os_error(const char* call, int error) {
  return {Code::kTransport, std::string(call) + ": " + std::strerror(error)};
}

Result<Mapping> map(const Fd& memfd, std::size_t size_bytes, int populate) {
  void* base = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | populate, memfd.get(), 0);
  if (base == MAP_FAILED) return os_error("mmap", errno);
  Mapping mapping(static_cast<std::byte*>(base), size_bytes);
  // A forked child that could still write would make the peer's proof of quiet worthless.
  if (::madvise(base, size_bytes, MADV_DONTFORK) != 0) return os_error("madvise(MADV_DONTFORK)", errno);
  return mapping;
}

Status allocate(const Fd& memfd, std::size_t begin, std::size_t size_bytes, TimeUs budget_us) {
  const TimeUs start = monotonic_us();
  for (std::size_t done = begin; done < size_bytes;) {
    if (done != begin && monotonic_us() - start > budget_us) {
      return {Code::kExhausted, "allocated " + std::to_string(done) + " of " + std::to_string(size_bytes) +
                                    " bytes of shared memory in " + std::to_string(budget_us) +
                                    " us: open a smaller landing"};
    }
    const std::size_t step = std::min(kAllocateStepBytes, size_bytes - done);
    if (::fallocate(memfd.get(), 0, static_cast<off_t>(done), static_cast<off_t>(step)) == 0) {
      done += step;
    } else if (errno == ENOSPC || errno == ENOMEM) {
      return {Code::kExhausted, "no shared memory for a landing of " + std::to_string(size_bytes) + " bytes"};
    } else if (errno != EINTR) {
      return os_error("fallocate", errno);
    } else if (monotonic_us() - start > budget_us) {
      return os_error("fallocate", EINTR);
    }
  }
  return {};
}

}  // namespace

Result<SegmentLayout> plan_segment(std::size_t slot_bytes, std::uint32_t num_slots) {
  if (slot_bytes == 0 || num_slots == 0 ||
      slot_bytes > (kMaxSegmentBytes - kSlotsOffset - kPageBytes) / num_slots) {
    return Status(Code::kInvalidArgument, "a landing of " + std::to_string(num_slots) + " slots of " +
                                              std::to_string(slot_bytes) +
                                              " bytes: both must be positive and the total below " +
                                              std::to_string(kMaxSegmentBytes) + " bytes");
  }
  const std::size_t total = kSlotsOffset + slot_bytes * num_slots;
  return SegmentLayout{slot_bytes, num_slots, (total + kPageBytes - 1) & ~(kPageBytes - 1)};
}

void Mapping::reset() noexcept {
  if (base_ != nullptr) ::munmap(base_, size_);
  base_ = nullptr;
  size_ = 0;
}

Result<Segment> create_segment(const SegmentLayout& layout, const SessionId& session, Extent extent,
                               TimeUs budget_us) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Fd memfd(::memfd_create("kvpush", kFlags | kMfdNoexecSeal));
  if (!memfd.ok() && errno == EINVAL) memfd = Fd(::memfd_create("kvpush", kFlags));
  if (!memfd.ok()) return os_error("memfd_create", errno);
  if (::ftruncate(memfd.get(), static_cast<off_t>(layout.total_bytes)) != 0)
    return os_error("ftruncate", errno);
  KVPUSH_TRY(allocate(memfd, 0, bytes_of(layout, extent), budget_us));
  if (::fcntl(memfd.get(), F_ADD_SEALS, kSeals) != 0) return os_error("fcntl(F_ADD_SEALS)", errno);
  Result<Mapping> mapping = map(memfd, layout.total_bytes, extent == Extent::kAll ? MAP_POPULATE : 0);
  if (!mapping.ok()) return mapping.status();
  auto* header = new (mapping.value().base()) SegmentHeader{};
  header->magic = kMagic;
  header->version = kVersion;
  header->num_slots = layout.num_slots;
  header->slot_bytes = layout.slot_bytes;
  header->session = session;
  return Segment{std::move(memfd), std::move(mapping).value()};
}

Status allocate_slots(const Fd& memfd, const SegmentLayout& layout, TimeUs budget_us) {
  return allocate(memfd, kSlotsOffset, layout.total_bytes, budget_us);
}

Result<Mapping> open_segment(const Fd& memfd, const SegmentLayout& layout, const SessionId& session,
                             Extent extent) {
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0 || (static_cast<unsigned>(seals) & kSeals) != kSeals) {
    return Status(Code::kTransport, "the peer's segment has seals " + std::to_string(seals) +
                                        ", needed are " + std::to_string(kSeals));
  }
  struct stat info{};
  if (::fstat(memfd.get(), &info) != 0) return os_error("fstat", errno);
  if (info.st_size != static_cast<off_t>(layout.total_bytes)) {
    return Status(Code::kTransport, "the peer's segment has " + std::to_string(info.st_size) +
                                        " bytes, agreed were " + std::to_string(layout.total_bytes));
  }
  Result<Mapping> mapping = map(memfd, layout.total_bytes, extent == Extent::kAll ? MAP_POPULATE : 0);
  if (!mapping.ok()) return mapping;
  const SegmentHeader& header = mapping.value().header();
  if (header.magic != kMagic || header.version != kVersion ||
      header.session != static_cast<const Uuid&>(session)) {
    return Status(Code::kTransport, "the peer's segment carries version " + std::to_string(header.version) +
                                        " or a session that is not this one; expected version " +
                                        std::to_string(kVersion));
  }
  return mapping;
}

}  // namespace kvpush::shm
