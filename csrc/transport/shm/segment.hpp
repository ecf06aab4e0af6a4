// The shared segment of one session: header, two rings, slots. Created by D, new per session.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "transport/shm/fd.hpp"
#include "transport/shm/ring.hpp"

namespace kvpush::shm {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kRingBytes = std::size_t{256} << 10U;
/// The largest message or notice. A quarter of a ring, so that one large message never monopolises it.
inline constexpr std::size_t kMaxRecordBytes = kRingBytes / 4;
inline constexpr std::uint64_t kMaxSegmentBytes = std::uint64_t{1} << 40U;

/// What a side waits for, as bits of its `armed` word.
inline constexpr std::uint32_t kWantsData = 1;
inline constexpr std::uint32_t kWantsSpace = 2;

/// Which slots P uses, as it says in the segment. Until kDevice P has opened no device memory.
inline constexpr std::uint32_t kSlotsUndecided = 0;
inline constexpr std::uint32_t kSlotsOnDevice = 1;   ///< D's device memory is open at P, or will be at once
inline constexpr std::uint32_t kSlotsInSegment = 2;  ///< P could not open it
inline constexpr std::uint32_t kSlotsClosed = 3;     ///< P has closed it again

/// The first page. Everything that changes lies on lines of its own.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_slots;
  std::uint64_t slot_bytes;
  Uuid session;
  RingControl to_source;   ///< D writes, P reads: messages
  RingControl to_landing;  ///< P writes, D reads: messages and notices
  alignas(
      kLineBytes) std::atomic<std::uint32_t> source_armed;  ///< set by P before it waits, cleared by either
  alignas(kLineBytes) std::atomic<std::uint32_t> landing_armed;  ///< the same for D
  alignas(kLineBytes) std::atomic<std::uint32_t> source_slots;   ///< written by P: kSlots...
};
static_assert(sizeof(SegmentHeader) <= kPageBytes);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr std::size_t kToSourceOffset = kPageBytes;
inline constexpr std::size_t kToLandingOffset = kToSourceOffset + kRingBytes;
inline constexpr std::size_t kSlotsOffset = kToLandingOffset + kRingBytes;

/// Size of a segment. Both sides compute it from the agreed slots; nothing of it is read from the segment.
struct SegmentLayout {
  std::size_t slot_bytes = 0;
  std::uint32_t num_slots = 0;
  std::size_t total_bytes = 0;
};

/// Errors: InvalidArgument (no slots, an empty slot, more than kMaxSegmentBytes).
Result<SegmentLayout> plan_segment(std::size_t slot_bytes, std::uint32_t num_slots);

/// A shared mapping; unmapped on destruction, absent in forked children. Externally synchronised.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* base, std::size_t size_bytes) noexcept : base_(base), size_(size_bytes) {}
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      base_ = std::exchange(other.base_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~Mapping() { reset(); }

  void reset() noexcept;
  [[nodiscard]] bool ok() const noexcept { return base_ != nullptr; }
  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::byte* slots() const noexcept { return base_ + kSlotsOffset; }
  [[nodiscard]] SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(base_); }

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
};

struct Segment {
  Fd memfd;
  Mapping mapping;
};

/// What of a segment is used: all of it, or no slots, because these are in device memory.
enum class Extent : std::uint8_t { kAll, kRings };

/// D: an anonymous, sealed file with the pages of `extent` allocated, and the mapping of all of it.
/// Errors: Exhausted (no memory, or not all of it within `budget_us`), Transport.
Result<Segment> create_segment(const SegmentLayout& layout, const SessionId& session, Extent extent,
                               TimeUs budget_us);
/// Either: allocates the slots of a segment that was created without. Errors: as create_segment.
Status allocate_slots(const Fd& memfd, const SegmentLayout& layout, TimeUs budget_us);

/// P: checks that `memfd` is such a segment of `session` and can never shrink under us, then maps all of it;
/// pages outside of `extent` are not touched, hence not allocated.
/// Errors: Transport, with both values.
Result<Mapping> open_segment(const Fd& memfd, const SegmentLayout& layout, const SessionId& session,
                             Extent extent);

}  // namespace kvpush::shm
