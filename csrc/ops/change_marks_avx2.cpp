// Compiled with -mavx2, and called only where the processor has it.
#include <immintrin.h>

#include "ops/change_marks_kernel.h"

namespace torchtitan_ext::ops {
namespace {

inline __m256i load(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline uint64_t bits_of(__m256i bytes) { return static_cast<uint32_t>(_mm256_movemask_epi8(bytes)); }

// All ones where elements of `left` and `right` are equal; number `index` of the 32-byte vectors.
template <int64_t kItemBytes>
inline __m256i equal(const char* left, const char* right, int index) {
  const __m256i of_left = load(left + 32 * index), of_right = load(right + 32 * index);
  if constexpr (kItemBytes == 1) return _mm256_cmpeq_epi8(of_left, of_right);
  if constexpr (kItemBytes == 2) return _mm256_cmpeq_epi16(of_left, of_right);
  if constexpr (kItemBytes == 4) return _mm256_cmpeq_epi32(of_left, of_right);
  return _mm256_cmpeq_epi64(of_left, of_right);
}

// One bit for each of 64 elements, set where they are equal. Vectors of wider elements are narrowed to bytes; the packs work
// within halves of a vector, so that the order is put right afterwards.
template <int64_t kItemBytes>
inline uint64_t equal_bits(const char* left, const char* right) {
  uint64_t bits = 0;
  if constexpr (kItemBytes == 1) {
    bits = bits_of(equal<1>(left, right, 0)) | bits_of(equal<1>(left, right, 1)) << 32;
  } else if constexpr (kItemBytes == 2) {
    for (int half = 0; half < 2; ++half) {
      const __m256i packed = _mm256_packs_epi16(equal<2>(left, right, 2 * half), equal<2>(left, right, 2 * half + 1));
      bits |= bits_of(_mm256_permute4x64_epi64(packed, 0xd8)) << (32 * half);
    }
  } else if constexpr (kItemBytes == 4) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int half = 0; half < 2; ++half) {
      const int first = 4 * half;
      const __m256i low = _mm256_packs_epi32(equal<4>(left, right, first), equal<4>(left, right, first + 1));
      const __m256i high = _mm256_packs_epi32(equal<4>(left, right, first + 2), equal<4>(left, right, first + 3));
      bits |= bits_of(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order)) << (32 * half);
    }
  } else {
    for (int index = 0; index < 2 * kItemBytes; ++index) {
      uint64_t words = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal<8>(left, right, index))));
      if constexpr (kItemBytes == 16) {  // two words of 8 bytes make an element
        words &= words >> 1;
        words = (words & 1) | (words >> 1 & 2);
      }
      bits |= words << (32 / kItemBytes * index);
    }
  }
  return bits;
}

template <int64_t kItemBytes>
void mark(const char* left, const char* right, int64_t num_words, uint64_t* mask) {
  for (int64_t word = 0; word < num_words; ++word) {
    const int64_t offset = word * kWordElements * kItemBytes;
    mask[word] = ~equal_bits<kItemBytes>(left + offset, right + offset);
  }
}

void mark_any(const char* left, const char* right, int64_t item_bytes, int64_t num_words, uint64_t* mask) {
  if (item_bytes == 1) return mark<1>(left, right, num_words, mask);
  if (item_bytes == 2) return mark<2>(left, right, num_words, mask);
  if (item_bytes == 4) return mark<4>(left, right, num_words, mask);
  if (item_bytes == 8) return mark<8>(left, right, num_words, mask);
  return mark<16>(left, right, num_words, mask);
}

}  // namespace

extern const MarkKernel kAvx2Marks{mark_any, count_bits, indices_of_bits};

}  // namespace torchtitan_ext::ops
