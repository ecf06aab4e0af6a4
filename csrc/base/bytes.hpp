// Length-checked little-endian reading and writing: the only way bytes of a peer are interpreted.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvpush {

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

/// Appends values to a buffer.
class ByteWriter {
 public:
  template <typename T>
    requires std::is_integral_v<T>
  void put(T value) {
    put_raw(std::as_bytes(std::span(&value, 1)));
  }
  void put_raw(ByteView bytes) {
    if (bytes.empty()) return;
    const std::size_t at = out_.size();
    out_.resize(at + bytes.size());
    std::memcpy(out_.data() + at, bytes.data(), bytes.size());
  }
  /// A u32 length, then the bytes.
  void put_blob(ByteView bytes) {
    put(static_cast<std::uint32_t>(bytes.size()));
    put_raw(bytes);
  }
  void put_text(std::string_view text) { put_blob(std::as_bytes(std::span(text.data(), text.size()))); }

  [[nodiscard]] Bytes take() && { return std::move(out_); }
  [[nodiscard]] const Bytes& bytes() const { return out_; }

 private:
  Bytes out_;
};

/// Reads values in order. After the first read past the end every read gives zero and ok() is false.
class ByteReader {
 public:
  explicit ByteReader(ByteView bytes) : rest_(bytes) {}

  template <typename T>
    requires std::is_integral_v<T>
  T get() {
    T value{};
    const ByteView raw = get_raw(sizeof(T));
    if (raw.size() == sizeof(T)) std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  ByteView get_raw(std::size_t num_bytes) {
    if (num_bytes > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const ByteView head = rest_.first(num_bytes);
    rest_ = rest_.subspan(num_bytes);
    return head;
  }
  /// A blob of at most `max_bytes`; longer ones fail the reader.
  ByteView get_blob(std::size_t max_bytes) {
    const auto size = get<std::uint32_t>();
    if (size > max_bytes) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    return get_raw(size);
  }
  std::string get_text(std::size_t max_bytes) {
    const ByteView raw = get_blob(max_bytes);
    std::string text(raw.size(), '\0');
    if (!raw.empty()) std::memcpy(text.data(), raw.data(), raw.size());
    return text;
  }

  [[nodiscard]] bool ok() const { return ok_; }
  /// Everything was read, and nothing is left over.
  [[nodiscard]] bool done() const { return ok_ && rest_.empty(); }
  [[nodiscard]] std::size_t remaining() const { return rest_.size(); }

 private:
  ByteView rest_;
  bool ok_ = true;
};

/// FNV-1a, 64 bits: catches a damaged message; not a signature.
[[nodiscard]] inline std::uint64_t fnv1a(ByteView bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3U;
  }
  return hash;
}

}  // namespace kvpush
