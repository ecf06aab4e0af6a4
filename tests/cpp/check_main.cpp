// Runs the tests of one program: all, or those whose name contains argv[1].
#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <vector>

#include "check.hpp"

namespace kvpush::check {
namespace {

struct Test {
  const char* name;
  TestBody body;
};

std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

std::atomic<unsigned> num_failures{0};
constexpr unsigned kMaxPrinted = 20;  // per test

}  // namespace

Registration::Registration(const char* name, TestBody body) {
  tests().push_back({name, body});
}

void fail(const char* file, int line, const std::string& what) {
  if (num_failures.fetch_add(1) >= kMaxPrinted) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::printf("  %s:%d: %s\n", file, line, what.c_str());
  std::fflush(stdout);
}

namespace {

enum class Outcome { kPassed, kFailed, kSkipped };

Outcome run_one(const Test& test) {
  num_failures = 0;
  try {
    test.body();
  } catch (const Skipped& skipped) {
    if (num_failures == 0) {
      std::printf("skip %s: %s\n", test.name, skipped.reason.c_str());
      return Outcome::kSkipped;
    }
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("threw: ") + error.what());
  }
  const unsigned failures = num_failures;
  if (failures > kMaxPrinted) std::printf("  ... %u failed checks in all\n", failures);
  std::printf("%s %s\n", failures == 0 ? "ok  " : "FAIL", test.name);
  std::fflush(stdout);
  return failures == 0 ? Outcome::kPassed : Outcome::kFailed;
}

}  // namespace

int run_all(std::string_view filter) {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  for (const Test& test : tests()) {
    if (std::string_view(test.name).find(filter) == std::string_view::npos) continue;
    switch (run_one(test)) {
      case Outcome::kPassed: ++passed; break;
      case Outcome::kFailed: ++failed; break;
      case Outcome::kSkipped: ++skipped; break;
    }
  }
  std::printf("%d passed, %d failed", passed, failed);
  if (skipped > 0) std::printf(", %d skipped", skipped);
  std::printf("\n");
  if (passed + failed + skipped == 0) {
    std::printf("no test has '%.*s' in its name\n", static_cast<int>(filter.size()), filter.data());
    return 2;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace kvpush::check

int main(int argc, char** argv) {
  return kvpush::check::run_all(argc > 1 ? argv[1] : "");
}
