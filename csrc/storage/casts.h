// Casts of floating-point elements, as torch's copy_ does them: to the nearest number, of two the one with an even
// fraction; out of range to infinity; from float64 to less than float32 by way of that. NaN stays some NaN.
#pragma once

#include <cstdint>
#include <string_view>

namespace torchtitan_ext::storage {

struct Cast {
  int64_t src_bytes = 0;  // of an element
  int64_t dst_bytes = 0;
  // Casts `count` elements that lie so many bytes apart, unaligned too. Returns the first one that is finite and becomes
  // infinite; null where there is none.
  const char* (*copy)(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t count) = nullptr;
  // The number in an element before the cast.
  double (*number)(const char* src) = nullptr;
};

// By names of dtypes as torch has them. Null where a cast is not known, or none is needed.
const Cast* find_cast(std::string_view src_dtype, std::string_view dst_dtype);

// Weighted sums of the elements of a dtype, in float32 or float64. Each operation is rounded to the dtype of the sums;
// memory may be unaligned.
struct WeightedSum {
  int64_t item_bytes = 0;  // of an element
  int64_t sum_bytes = 0;
  // Adds to each sum the product of the weight and its element; the first product is put in the place of the sum.
  void (*add)(char* sums, const char* src, int64_t count, double weight, bool is_first) = nullptr;
  // Sums as elements, rounded once. Returns the first sum that is finite and becomes infinite; null where there is none.
  const char* (*round)(char* dst, const char* sums, int64_t count) = nullptr;
  // The number in a sum.
  double (*number)(const char* sum) = nullptr;
};

// By the name of the dtype, of which a complex number is two elements. Sums of float64 are in float64. Null for dtypes
// that are not summed.
const WeightedSum* find_weighted_sum(std::string_view dtype, bool in_float64);

// All casts and sums, compiled once per instruction set. The widest one that the processor has is chosen when the
// library is loaded.
struct CastTable {
  Cast casts[6][4];
  WeightedSum sums[4][2];
};
extern const CastTable kBaselineCasts;
extern const CastTable kAvx2Casts;

}  // namespace torchtitan_ext::storage
