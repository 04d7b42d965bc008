// Checks on arguments. A failed check is an std::invalid_argument (a ValueError in Python); sizes that overflow int64
// are an std::overflow_error. Both leave every argument unchanged. Of operators torch 2.15 makes a RuntimeError of both,
// which op_library.py knows by their texts: a failed check begins with the name of its op and a colon.
#pragma once

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace torchtitan_ext::core {

inline void append(std::string& text, std::string_view part) { text += part; }
inline void append(std::string& text, char part) { text += part; }
template <std::integral Number>
void append(std::string& text, Number number) {
  text += std::to_string(number);
}

// By no stream: one crashes where the process has several C++ libraries that disagree about locales, as was seen in
// forked processes that use CUDA.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// `where` names the function as the caller knows it; the rest says what is wrong, what was expected and what to do.
#define TTE_CHECK(condition, where, ...)                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      throw std::invalid_argument(::torchtitan_ext::core::concat(where, ": ", __VA_ARGS__)); \
    }                                                                                        \
  } while (false)

inline int64_t checked_mul(int64_t left, int64_t right) {
  int64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) {
    throw std::overflow_error(concat("size product overflows int64: ", left, " * ", right));
  }
  return product;
}

inline int64_t checked_add(int64_t left, int64_t right) {
  int64_t sum = 0;
  if (__builtin_add_overflow(left, right, &sum)) {
    throw std::overflow_error(concat("size sum overflows int64: ", left, " + ", right));
  }
  return sum;
}

}  // namespace torchtitan_ext::core
