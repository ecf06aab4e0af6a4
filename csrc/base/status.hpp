// What every fallible call of the core returns. Nothing in csrc/ throws after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace kvpush {

/// What went wrong with a call. Each code is one Python exception (python/kvpush/errors.py).
enum class Code : std::uint8_t {
  kOk = 0,
  kInvalidArgument,  ///< an argument is wrong; nothing was changed
  kDuplicateKey,     ///< a push of this key is open already
  kQueueFull,        ///< max_open_transfers are open; poll, then try again
  kClosed,           ///< the engine is closed
  kHandshake,        ///< offer and answer do not fit
  kPeerLost,         ///< the session is not open
  kExhausted,        ///< a memory budget is spent
  kUnsupported,      ///< an explicit request cannot be met here
  kTransport,        ///< a library or the operating system refused a call
};

/// A code and one line of context with the actual values.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// A value, or the status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool ok() const noexcept { return value_.has_value(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  [[nodiscard]] T& value() & { return *value_; }
  [[nodiscard]] const T& value() const& { return *value_; }
  [[nodiscard]] T&& value() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace kvpush

/// Returns from the calling function with the status when it is not ok.
#define KVPUSH_TRY(expr)                                                                       \
  do {                                                                                         \
    if (::kvpush::Status kvpush_status_ = (expr); !kvpush_status_.ok()) return kvpush_status_; \
  } while (false)
