#include "storage/casts.h"

#include <algorithm>
#include <iterator>

#include "storage/casts_kernel.h"

namespace torchtitan_ext::storage {

extern const CastTable kBaselineCasts = kCasts;

namespace {

// Those from kFirstTarget on are targets of casts too.
constexpr std::string_view kDtypes[] = {"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"};
constexpr std::ptrdiff_t kFirstTarget = 2;

const CastTable& table() {
#ifdef TTE_HAVE_AVX2_CASTS
  static const CastTable& chosen = __builtin_cpu_supports("avx2") ? kAvx2Casts : kBaselineCasts;
  return chosen;
#else
  return kBaselineCasts;
#endif
}

}  // namespace

const Cast* find_cast(std::string_view src_dtype, std::string_view dst_dtype) {
  const std::ptrdiff_t src = std::ranges::find(kDtypes, src_dtype) - std::begin(kDtypes);
  const std::ptrdiff_t dst = std::ranges::find(kDtypes, dst_dtype) - std::begin(kDtypes);
  if (src == std::ssize(kDtypes) || dst == std::ssize(kDtypes) || dst < kFirstTarget || src == dst) return nullptr;
  return &table().casts[src][dst - kFirstTarget];
}

const WeightedSum* find_weighted_sum(std::string_view dtype, bool in_float64) {
  if (dtype == "complex64") dtype = "float32";
  if (dtype == "complex128") dtype = "float64";
  const std::ptrdiff_t place = std::ranges::find(kDtypes, dtype) - std::begin(kDtypes);
  if (place == std::ssize(kDtypes) || place < kFirstTarget) return nullptr;
  return &table().sums[place - kFirstTarget][in_float64 || dtype == "float64" ? 1 : 0];
}

}  // namespace torchtitan_ext::storage
