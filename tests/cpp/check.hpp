// A test harness in one header: TEST(name) { ... }, CHECK, CHECK_EQ, SKIP. check_main.cpp runs them.
#pragma once

#include <concepts>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace kvpush::check {

using TestBody = void (*)();

/// Adds a test to the program's list; done by TEST before main.
struct Registration {
  Registration(const char* name, TestBody body);
};

/// Records that the running test failed; the test goes on. Thread-safe.
void fail(const char* file, int line, const std::string& what);

/// Thrown by SKIP.
struct Skipped {
  std::string reason;
};

/// The value as text: streamed where it can be, enums as numbers, the rest as "?".
template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (sizeof(T) == 1 && std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    out << +value;
  } else if constexpr (requires { out << value; }) {
    out << std::boolalpha << value;
  } else if constexpr (requires { std::string_view(to_string(value)); }) {
    out << to_string(value);
  } else {
    out << "?";
  }
  return out.str();
}

template <typename A, typename B>
bool same(const A& a, const B& b) {
  // std::cmp_equal: a negative value never equals an unsigned one.
  if constexpr (std::integral<A> && std::integral<B> && !std::same_as<A, bool> && !std::same_as<B, bool> &&
                !std::same_as<A, char> && !std::same_as<B, char>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <typename A, typename B>
bool expect_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (same(a, b)) return true;
  fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
  return false;
}

}  // namespace kvpush::check

#define TEST(name)                                                                     \
  static void test_##name();                                                           \
  static const ::kvpush::check::Registration registration_##name(#name, &test_##name); \
  static void test_##name()

/// Both go on after a failure and are true when the condition held: `if (!CHECK(x.ok())) return;`
#define CHECK(...) \
  ((__VA_ARGS__) ? true : (::kvpush::check::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"), false))
#define CHECK_EQ(a, b) ::kvpush::check::expect_equal((a), (b), "CHECK_EQ(" #a ", " #b ")", __FILE__, __LINE__)

/// Ends the test here without judging it.
#define SKIP(why)                  \
  throw ::kvpush::check::Skipped { \
    why                            \
  }
