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

// All casts, compiled once per instruction set. The widest one that the processor has is chosen when the library is
// loaded.
struct CastTable {
  Cast casts[6][4];
};
extern const CastTable kBaselineCasts;
extern const CastTable kAvx2Casts;

}  // namespace torchtitan_ext::storage
