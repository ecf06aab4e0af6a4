// Which box of a claim comes next: walks the wanted positions of one group in stripes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache/box.hpp"

namespace kvpush::protocol {

/// A stripe is a run of wanted positions that travels together: all planes of it, in as many boxes as
/// the slot size asks for. Its length is chosen when it begins, so the number of boxes depends on bytes
/// and on when blocks became ready, never on block ids. Externally synchronised.
class Cursor {
 public:
  Cursor(const Group& group, std::uint32_t group_index, std::vector<PositionRange> wanted,
         std::size_t box_bytes);

  /// Whether next() gives a box when positions [0, num_ready) are there.
  [[nodiscard]] bool ready(std::uint32_t num_ready) const;
  /// The next box; ready() must hold.
  Box next(std::uint32_t num_ready);
  /// All wanted positions have been given out.
  [[nodiscard]] bool exhausted() const { return range_ == wanted_.size(); }
  /// The first position of which not all units were given out; past the last wanted one when exhausted.
  [[nodiscard]] std::uint32_t position() const;
  /// The wanted position that is needed next, or nothing when exhausted.
  [[nodiscard]] std::optional<std::uint32_t> needs() const;

 private:
  [[nodiscard]] std::uint32_t stripe_length(std::uint32_t available) const;

  std::vector<PositionRange> wanted_;
  std::size_t box_bytes_;
  std::size_t max_unit_bytes_ = 0;
  std::uint32_t num_planes_;
  std::uint32_t num_heads_;
  std::uint32_t group_index_;
  std::size_t range_ = 0;
  std::uint32_t pos_ = 0;
  std::uint32_t stripe_end_ = 0;  ///< equals pos_ while no stripe has begun
  std::uint32_t plane_ = 0;
};

}  // namespace kvpush::protocol
