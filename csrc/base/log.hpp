// One line to stderr for what a person should know. Level by KVPUSH_LOG_LEVEL (debug, info, warning,
// error); warning by default.
#pragma once

#include <string>

namespace kvpush {

enum class LogLevel : int { kDebug, kInfo, kWarning, kError };

/// Writes one line. Thread-safe; never throws.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace kvpush
