#include "base/log.hpp"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace kvpush {
namespace {

constexpr const char* kNames[] = {"debug", "info", "warning", "error"};

LogLevel level_from_environment() noexcept {
  const char* text = std::getenv("KVPUSH_LOG_LEVEL");
  if (text != nullptr) {
    for (int i = 0; i < 4; ++i) {
      if (std::string_view(text) == kNames[i]) return static_cast<LogLevel>(i);
    }
  }
  return LogLevel::kWarning;
}

}  // namespace

void log(LogLevel level, const std::string& message) noexcept {
  static const LogLevel threshold = level_from_environment();
  if (level < threshold) return;
  std::fprintf(stderr, "kvpush %s: %s\n", kNames[static_cast<int>(level)], message.c_str());
}

}  // namespace kvpush
