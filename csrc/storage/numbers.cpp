#include "storage/numbers.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"

namespace torchtitan_ext::storage {
namespace {

constexpr int kMaxDigits = 16;

// Bits of the significand, and the exponent of the smallest number above zero.
struct FloatType {
  std::string_view dtype;
  int bits;
  int least;
};

constexpr FloatType kFloatTypes[] = {
    {"float32", 24, -149},       {"float16", 11, -24},    {"bfloat16", 8, -133},       {"float8_e4m3fn", 4, -9},
    {"float8_e4m3fnuz", 4, -10}, {"float8_e5m2", 3, -16}, {"float8_e5m2fnuz", 3, -17},
};

double rounded(double value, int digits) {
  char text[64];
  const auto written = std::to_chars(std::begin(text), std::end(text), value, std::chars_format::general, digits);
  double number = 0;
  std::from_chars(std::begin(text), written.ptr, number);
  return number;
}

template <typename T>
T read(std::string_view element, size_t index = 0) {
  TTE_CHECK(element.size() >= (index + 1) * sizeof(T), "number_of", "got an element of ", element.size(), " bytes");
  T value;
  std::memcpy(&value, element.data() + index * sizeof(T), sizeof(T));
  return value;
}

double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  double magnitude = std::ldexp(fraction + (exponent == 0 ? 0 : 1024), std::max(exponent, 1) - 25);
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

double shortest(double value, std::string_view dtype) {
  const auto* const type = std::ranges::find(kFloatTypes, dtype, &FloatType::dtype);
  if (type == std::end(kFloatTypes) || value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent);
  const double half_step = std::ldexp(0.5, std::max(exponent - type->bits, type->least));
  for (int digits = 1; digits <= kMaxDigits; ++digits) {
    const double found = rounded(value, digits);
    // Below a power of two numbers lie closer.
    const bool is_below = fraction == 0.5 && exponent - type->bits > type->least && std::abs(found) < std::abs(value);
    if (std::abs(found - value) < (is_below ? half_step / 2 : half_step)) return found;
  }
  return value;
}

Number number_of(std::string_view element, std::string_view dtype) {
  if (dtype == "float64") return read<double>(element);
  if (dtype == "float32") return shortest(read<float>(element), dtype);
  if (dtype == "float16") return shortest(half(read<uint16_t>(element)), dtype);
  if (dtype == "bfloat16") {
    return shortest(std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(element)) << 16), dtype);
  }
  if (dtype == "complex64") {
    return std::complex(shortest(read<float>(element), "float32"), shortest(read<float>(element, 1), "float32"));
  }
  if (dtype == "complex128") return std::complex(read<double>(element), read<double>(element, 1));
  if (dtype == "bool") return read<uint8_t>(element) != 0;
  if (dtype == "int64") return read<int64_t>(element);
  if (dtype == "int32") return int64_t{read<int32_t>(element)};
  if (dtype == "int16") return int64_t{read<int16_t>(element)};
  if (dtype == "int8") return int64_t{read<int8_t>(element)};
  if (dtype == "uint64") return read<uint64_t>(element);
  if (dtype == "uint32") return int64_t{read<uint32_t>(element)};
  if (dtype == "uint16") return int64_t{read<uint16_t>(element)};
  if (dtype == "uint8") return int64_t{read<uint8_t>(element)};
  return {};
}

}  // namespace torchtitan_ext::storage
