#include "pack/cpu/copy_box.hpp"

#include <algorithm>
#include <cstring>

#include "pack/checksum.hpp"
#include "pack/cpu/row_walk.hpp"

namespace kvpush {
namespace {

// How far ahead of the copy its source is prefetched: memory's latency at a copy's rate, several times.
constexpr std::size_t kPrefetchBytes = 16 * 1024;
// Rows of which the pages are touched in batches, before that.
constexpr std::size_t kMinTouchedRow = 2 * 1024;
constexpr std::size_t kMaxTouchedRow = 64 * 1024;
constexpr std::size_t kTouchesPerBatch = 4;
constexpr std::size_t kPageBytes = 4096;

/// Copies up to `limit` bytes to the end of the line that `run` is in, and adds them. Returns how many.
std::size_t copy_in_line(std::byte* to, const std::byte* from, std::size_t limit, ChecksumRun& run) {
  const std::size_t to_line = kChecksumLineBytes - run.dense_offset() % kChecksumLineBytes;
  const std::size_t num_bytes = std::min(limit, to_line);
  for (std::size_t done = 0; done < num_bytes;) {
    const std::size_t part = std::min(num_bytes - done, 8 - run.dense_offset() % 8);
    std::uint64_t value = 0;
    if (part == 8) {
      std::memcpy(&value, from + done, 8);
      std::memcpy(to + done, &value, 8);
    } else {
      std::memcpy(&value, from + done, part);
      std::memcpy(to + done, &value, part);
    }
    run.add_in_word(value, part);
    done += part;
  }
  return num_bytes;
}

/// Touches pages of a scattered source well before they are copied. A prefetch that misses the TLB seems to
/// hold the CPU up until its page is found; several in a row are found side by side.
class PageToucher {
 public:
  explicit PageToucher(const RowWalk& walk) : walk_(walk) {}

  /// The copy has come to byte `dense_offset`: keeps one to two batches ahead of it.
  void follow(std::uint64_t dense_offset) {
    while (dense_offset >= batch_at_ && walk_.valid()) {
      batch_at_ = next_at_;
      for (std::size_t i = 0; i < kTouchesPerBatch && walk_.valid(); ++i) {
        const std::size_t in_row = walk_.left();
        const std::size_t piece = std::min(in_row, kPageBytes);
        if (in_row >= kMinTouchedRow && in_row <= kMaxTouchedRow) __builtin_prefetch(walk_.data(), 0, 2);
        walk_.skip(piece);
        next_at_ += piece;
      }
    }
  }

 private:
  RowWalk walk_;
  std::uint64_t batch_at_ = 0;  ///< where the last batch began
  std::uint64_t next_at_ = 0;
};

bool is_aligned(const std::byte* address, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

}  // namespace

std::uint64_t copy_box(const Cache& cache, const PackJob& job, const LineCopier& copier) {
  const Group& group = cache.groups[job.box.group];
  const bool packing = job.kind == PackJob::Kind::kPack;
  std::byte* const dense = job.dense;
  ChecksumRun run;
  RowWalk row(group, job.box, job.block_ids);
  // Rows lie anywhere, so hardware cannot foresee the next. The slot is read front to back: it can.
  RowWalk ahead = row;
  PageToucher toucher(row);
  if (packing) ahead.skip(kPrefetchBytes);
  while (row.valid()) {
    if (packing) toucher.follow(run.dense_offset());
    std::byte* const slot = dense + run.dense_offset();
    std::byte* const to = packing ? slot : row.data();
    const std::byte* const from = packing ? row.data() : slot;
    std::size_t num_bytes = 0;
    if (std::size_t lines = std::min(run.whole_lines(), row.left() / kChecksumLineBytes); lines > 0) {
      const std::byte* prefetch = from;
      if (packing && ahead.valid()) {
        prefetch = ahead.data();
        lines = std::min(lines, (ahead.left() + kChecksumLineBytes - 1) / kChecksumLineBytes);
      }
      // A slot is read next, by the peer or a post. Blocks are read much later, and by whom is not known.
      const bool streaming = !packing && is_aligned(to, copier.streaming_alignment);
      (streaming ? copier.streaming : copier.cached)(to, from, prefetch, lines, run.lanes());
      run.added_lines(lines);
      num_bytes = lines * kChecksumLineBytes;
    } else {
      num_bytes = copy_in_line(to, from, row.left(), run);
    }
    row.skip(num_bytes);
    if (packing) ahead.skip(num_bytes);
  }
  if (!packing) streaming_fence();
  return run.finish();
}

}  // namespace kvpush
