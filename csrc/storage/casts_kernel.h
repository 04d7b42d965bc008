// The casts of a CastTable, compiled once per instruction set: everything is static here. Nothing branches on an element,
// so that the compiler makes vectors of the loops; baseline x86-64 has no instruction for float16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "storage/casts.h"

namespace torchtitan_ext::storage {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The float32 that equals a float of fewer bits, which are sign, exponent and fraction like its own. From `kSpecial` on
// magnitudes stand for infinity or NaN.
template <int kBits, int kFractionBits, int kBias, uint32_t kSpecial>
inline float widened(uint32_t bits) {
  constexpr uint32_t kRebias = (127 - kBias) << 23;
  const uint32_t magnitude = bits & ((1u << (kBits - 1)) - 1);
  const uint32_t moved = magnitude << (23 - kFractionBits);
  // A subnormal number has the exponent of the smallest normal ones, and no leading one.
  constexpr uint32_t kLeadingOne = kRebias + (1u << 23);
  const uint32_t subnormal = bits_of(float_of(moved + kLeadingOne) - float_of(kLeadingOne));
  const uint32_t normal = moved + kRebias + (magnitude >= kSpecial ? kRebias : 0);
  const uint32_t sign = (bits & (1u << (kBits - 1))) << (32 - kBits);
  return float_of(sign | (magnitude < (1u << kFractionBits) ? subnormal : normal));
}

// A dtype: elements, how they become float32 and come from it, and its place in the order of ranges. A finite number
// becomes infinite only in a dtype of less range, where it is float32 of at least the magnitude `kInfinite`, in bits.
struct Float8E4M3 {
  using Element = uint8_t;
  static constexpr int kRange = 0;
  static float decoded(Element bits) { return widened<8, 3, 7, 0x7f>(bits); }
};

struct Float8E5M2 {
  using Element = uint8_t;
  static constexpr int kRange = 0;
  static float decoded(Element bits) { return widened<8, 2, 15, 0x7c>(bits); }
};

struct Float16 {
  using Element = uint16_t;
  static constexpr int kRange = 1;
  static constexpr uint32_t kInfinite = 0x477ff000;
  static float decoded(Element bits) { return widened<16, 10, 15, 0x7c00>(bits); }
  static Element encoded(float value) {
    constexpr uint32_t kLeastNormal = (127 - 14) << 23;
    const uint32_t magnitude = bits_of(value) & 0x7fffffff;
    // The last bit of a float32 from 0.5 on is worth that of a subnormal float16: the sum is rounded there.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - ((127 - 15) << 23)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < kLeastNormal ? subnormal : normal;
    return static_cast<Element>((magnitude >= kInfinite ? special : finite) | ((bits_of(value) >> 16) & 0x8000));
  }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kRange = 2;
  static constexpr uint32_t kInfinite = 0x7f7f8000;
  static float decoded(Element bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  static Element encoded(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<Element>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

struct Float32 {
  using Element = float;
  static constexpr int kRange = 3;
  static constexpr uint32_t kInfinite = 0x7f800000;
  static float decoded(Element value) { return value; }
  static Element encoded(float value) { return value; }
};

struct Float64 {
  using Element = double;
  static constexpr int kRange = 4;
  static constexpr uint32_t kInfinite = 0x7f800000;
  static float decoded(Element value) { return static_cast<float>(value); }
  static Element encoded(float value) { return value; }
};

template <typename Element>
inline Element load(const char* src) {
  Element element;
  std::memcpy(&element, src, sizeof(element));
  return element;
}

template <typename From>
double number(const char* src) {
  const auto element = load<typename From::Element>(src);
  if constexpr (From::kRange == Float64::kRange) return element;
  return From::decoded(element);
}

// Returns whether some results may be infinite, or NaN.
template <typename From, typename To>
inline bool cast_items(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t count) {
  uint32_t is_infinite = 0;
  for (int64_t index = 0; index < count; ++index) {
    const float value = From::decoded(load<typename From::Element>(src + index * src_stride));
    if constexpr (From::kRange > To::kRange) is_infinite |= (bits_of(value) & 0x7fffffff) >= To::kInfinite;
    const typename To::Element element = To::encoded(value);
    std::memcpy(dst + index * dst_stride, &element, sizeof(element));
  }
  return is_infinite != 0;
}

template <typename From, typename To>
const char* cast(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t count) {
  constexpr int64_t kDst = sizeof(typename To::Element), kSrc = sizeof(typename From::Element);
  const bool is_dense = dst_stride == kDst && src_stride == kSrc;
  const bool is_infinite = is_dense ? cast_items<From, To>(dst, kDst, src, kSrc, count)
                                    : cast_items<From, To>(dst, dst_stride, src, src_stride, count);
  if (!is_infinite) return nullptr;
  for (int64_t index = 0; index < count; ++index, src += src_stride) {
    const uint32_t magnitude = bits_of(From::decoded(load<typename From::Element>(src))) & 0x7fffffff;
    if (std::isfinite(number<From>(src)) && magnitude >= To::kInfinite) return src;
  }
  return nullptr;
}

template <typename From, typename To>
constexpr Cast cast_of() {
  return {sizeof(typename From::Element), sizeof(typename To::Element), &cast<From, To>, &number<From>};
}

// In the order of the names in casts.cpp. What needs no cast is left empty.
constexpr CastTable kCasts{{
    {cast_of<Float8E4M3, Float16>(), cast_of<Float8E4M3, BFloat16>(), cast_of<Float8E4M3, Float32>(),
     cast_of<Float8E4M3, Float64>()},
    {cast_of<Float8E5M2, Float16>(), cast_of<Float8E5M2, BFloat16>(), cast_of<Float8E5M2, Float32>(),
     cast_of<Float8E5M2, Float64>()},
    {Cast{}, cast_of<Float16, BFloat16>(), cast_of<Float16, Float32>(), cast_of<Float16, Float64>()},
    {cast_of<BFloat16, Float16>(), Cast{}, cast_of<BFloat16, Float32>(), cast_of<BFloat16, Float64>()},
    {cast_of<Float32, Float16>(), cast_of<Float32, BFloat16>(), Cast{}, cast_of<Float32, Float64>()},
    {cast_of<Float64, Float16>(), cast_of<Float64, BFloat16>(), cast_of<Float64, Float32>(), Cast{}},
}};

}  // namespace
}  // namespace torchtitan_ext::storage
