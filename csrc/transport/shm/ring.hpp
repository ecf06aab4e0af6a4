// A single-producer, single-consumer ring of records in memory that the other end may damage at will.
//
// Each end keeps its own index in private memory and only publishes it; what it reads of the other end is
// checked before use. Indices count bytes and never wrap in practice (2^64). A record is one header word
// (length, kind) and the payload, padded to eight bytes; it is published whole.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.hpp"

namespace kvpush::shm {

/// Two lines of 64 bytes: adjacent-line prefetch would make neighbours share.
/// Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, spatial prefetcher.
inline constexpr std::size_t kLineBytes = 128;

/// The shared indices of one ring.
struct RingControl {
  alignas(kLineBytes) std::atomic<std::uint64_t> tail;  ///< bytes ever written; stored by the producer
  alignas(kLineBytes) std::atomic<std::uint64_t> head;  ///< bytes ever read; stored by the consumer
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

enum class RecordKind : std::uint32_t { kMessage = 1, kNotice = 2 };

inline constexpr std::size_t kRecordHeaderBytes = 8;

/// What a record with this payload occupies, in bytes.
[[nodiscard]] constexpr std::size_t record_bytes(std::size_t payload_bytes) {
  return kRecordHeaderBytes + ((payload_bytes + 7) & ~std::size_t{7});
}

/// The writing end. One thread.
class RingProducer {
 public:
  enum class Push : std::uint8_t { kDone, kFull, kCorrupt };

  RingProducer() = default;
  /// `capacity_bytes` is a power of two; `data` is aligned to eight bytes.
  RingProducer(RingControl* control, std::byte* data, std::size_t capacity_bytes)
      : control_(control), data_(data), capacity_(capacity_bytes) {}

  /// Appends and publishes a record. kCorrupt: the consumer's index cannot be true.
  Push push(RecordKind kind, ByteView payload) {
    const std::size_t need = record_bytes(payload.size());
    if (capacity_ - (tail_ - head_) < need) {
      const std::uint64_t head = control_->head.load(std::memory_order_acquire);
      if (tail_ - head > tail_ - head_) return Push::kCorrupt;
      head_ = head;
      if (capacity_ - (tail_ - head_) < need) return Push::kFull;
    }
    const std::uint64_t word = payload.size() | static_cast<std::uint64_t>(kind) << 32U;
    std::memcpy(data_ + (tail_ & (capacity_ - 1)), &word, sizeof(word));
    const std::size_t at = (tail_ + kRecordHeaderBytes) & (capacity_ - 1);
    const std::size_t first = std::min(payload.size(), capacity_ - at);
    if (first != 0) std::memcpy(data_ + at, payload.data(), first);
    if (first != payload.size()) std::memcpy(data_, payload.data() + first, payload.size() - first);
    tail_ += need;
    // Sequentially consistent: pairs with the consumer's re-check after it armed its wait.
    control_->tail.store(tail_, std::memory_order_seq_cst);
    return Push::kDone;
  }

  /// Whether the consumer has read anything since the last kFull.
  [[nodiscard]] bool has_moved() const { return control_->head.load(std::memory_order_seq_cst) != head_; }

 private:
  RingControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t tail_ = 0;  // ours
  std::uint64_t head_ = 0;  // the consumer's, as last seen and found possible
};

/// The reading end. One thread.
class RingConsumer {
 public:
  enum class Pop : std::uint8_t { kRecord, kEmpty, kCorrupt };

  struct Record {
    RecordKind kind = RecordKind::kMessage;
    ByteView payload;  ///< a private copy in the scratch of pop()
  };

  RingConsumer() = default;
  RingConsumer(RingControl* control, const std::byte* data, std::size_t capacity_bytes)
      : control_(control), data_(data), capacity_(capacity_bytes) {}

  /// Fixes what pop() will return until the next snapshot: everything published so far. False: the
  /// producer's index cannot be true.
  [[nodiscard]] bool snapshot() {
    const std::uint64_t tail = control_->tail.load(std::memory_order_acquire);
    if (tail - head_ > capacity_ || tail % 8 != 0) return false;
    tail_ = tail;
    return true;
  }

  /// Copies the next record into `scratch` (which bounds its length) and frees its place.
  Pop pop(std::span<std::byte> scratch, Record& record) {
    const std::size_t available = tail_ - head_;
    if (available == 0) return Pop::kEmpty;
    // Atomic, so that the checked value is the used one.
    const auto* at_word = reinterpret_cast<const std::uint64_t*>(data_ + (head_ & (capacity_ - 1)));
    const std::uint64_t word =
        std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(at_word)).load(std::memory_order_relaxed);
    const std::size_t size = word & 0xffffffffU;
    const auto kind = static_cast<RecordKind>(word >> 32U);
    if (size > scratch.size() || record_bytes(size) > available) return Pop::kCorrupt;
    if (kind != RecordKind::kMessage && kind != RecordKind::kNotice) return Pop::kCorrupt;
    const std::size_t at = (head_ + kRecordHeaderBytes) & (capacity_ - 1);
    const std::size_t first = std::min(size, capacity_ - at);
    if (first != 0) std::memcpy(scratch.data(), data_ + at, first);
    if (first != size) std::memcpy(scratch.data() + first, data_, size - first);
    head_ += record_bytes(size);
    control_->head.store(head_, std::memory_order_seq_cst);
    record = {kind, scratch.first(size)};
    return Pop::kRecord;
  }

  /// Whether anything was published beyond what was read.
  [[nodiscard]] bool has_data() const { return control_->tail.load(std::memory_order_seq_cst) != head_; }

 private:
  RingControl* control_ = nullptr;
  const std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t head_ = 0;  // ours
  std::uint64_t tail_ = 0;  // the producer's, as of the last snapshot
};

}  // namespace kvpush::shm
