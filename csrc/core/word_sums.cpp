#include "core/word_sums.h"

#include <cstring>

#include "core/element_hash.h"

// The hash multiplies 64-bit words, for which only AVX-512 has an instruction. The compiler makes a form for each
// machine and the loader chooses: glibc's does (musl's does not), and sanitizers do not survive that choice at load
// time. GCC 11 knows no levels of x86-64; its AVX-512 form does without that instruction and is still the faster one.
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(__clang__) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
#define TTE_BEST_MACHINE
#elif __GNUC__ >= 12
#define TTE_BEST_MACHINE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TTE_BEST_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

namespace torchtitan_ext::core {
namespace {

template <typename Word>
inline __attribute__((always_inline)) uint64_t sum_words(const char* src, int64_t stride_bytes, uint64_t position,
                                                         uint64_t position_stride, int64_t count) {
  uint64_t sum = 0;
  for (int64_t index = 0; index < count; ++index) {
    Word word;
    std::memcpy(&word, src + index * stride_bytes, sizeof(Word));
    sum += hash_word(word, position + index * position_stride);
  }
  return sum;
}

// Contiguous words, the common case: constant strides let the compiler vectorise.
#define TTE_SUM_CONTIGUOUS(name, Word)                                                \
  TTE_BEST_MACHINE uint64_t name(const char* src, uint64_t position, int64_t count) { \
    return sum_words<Word>(src, sizeof(Word), position, 1, count);                    \
  }
TTE_SUM_CONTIGUOUS(sum_contiguous_1, uint8_t)
TTE_SUM_CONTIGUOUS(sum_contiguous_2, uint16_t)
TTE_SUM_CONTIGUOUS(sum_contiguous_4, uint32_t)
TTE_SUM_CONTIGUOUS(sum_contiguous_8, uint64_t)
#undef TTE_SUM_CONTIGUOUS

uint64_t sum_contiguous(const char* src, uint64_t position, int64_t count, int64_t word_bytes) {
  switch (word_bytes) {
    case 1:
      return sum_contiguous_1(src, position, count);
    case 2:
      return sum_contiguous_2(src, position, count);
    case 4:
      return sum_contiguous_4(src, position, count);
    default:
      return sum_contiguous_8(src, position, count);
  }
}

uint64_t sum_strided(const char* src, const Loop& loop, uint64_t position, int64_t word_bytes) {
  const uint64_t position_stride = loop.dst_stride_bytes / word_bytes;
  switch (word_bytes) {
    case 1:
      return sum_words<uint8_t>(src, loop.src_stride_bytes, position, position_stride, loop.count);
    case 2:
      return sum_words<uint16_t>(src, loop.src_stride_bytes, position, position_stride, loop.count);
    case 4:
      return sum_words<uint32_t>(src, loop.src_stride_bytes, position, position_stride, loop.count);
    default:
      return sum_words<uint64_t>(src, loop.src_stride_bytes, position, position_stride, loop.count);
  }
}

}  // namespace

uint64_t sum_runs(int64_t src, int64_t dst, const Loop& loop, int64_t run_bytes, int64_t word_bytes) {
  const char* from = reinterpret_cast<const char*>(src);
  if (run_bytes == word_bytes && loop.count > 1) return sum_strided(from, loop, dst / word_bytes, word_bytes);
  uint64_t sum = 0;
  for (int64_t index = 0; index < loop.count; ++index) {
    sum += sum_contiguous(from + index * loop.src_stride_bytes, (dst + index * loop.dst_stride_bytes) / word_bytes,
                          run_bytes / word_bytes, word_bytes);
  }
  return sum;
}

}  // namespace torchtitan_ext::core
