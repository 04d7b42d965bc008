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

}  // namespace torchtitan_ext::storage
