// The hash of one element, and of the words of a fingerprint: the same on CPU and CUDA.
//
// A tensor's bits are words: elements of 1, 2, 4 or 8 bytes are one word each, elements of 16 bytes two. Word w at
// position p, in the row-major order of the *global* tensor, hashes to
//
//     mix(w xor (p + 1) * golden),  mix = the finalizer of SplitMix64 (https://doi.org/10.1145/2714064.2660195)
//
// and a fingerprint is the sum of the hashes modulo 2^64. A sum does not depend on the order, so the sums of disjoint
// chunks add up to that of the whole, however it is cut. The multiples of golden are far apart (golden ratio), so that
// equal words at different positions, and neighbouring words exchanged, meet unrelated inputs of mix.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TTE_HASH_FUNCTION __host__ __device__ inline
#else
#define TTE_HASH_FUNCTION inline
#endif

namespace torchtitan_ext::core {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

TTE_HASH_FUNCTION uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31);
}

TTE_HASH_FUNCTION uint64_t hash_word(uint64_t word, uint64_t position) {
  return mix_bits(word ^ ((position + 1) * kGolden));
}

// The hash of a list of words, one word longer: what is compared on the spot, by its order too.
inline uint64_t extended_hash(uint64_t hash, int64_t word) {
  return mix_bits(hash + kGolden + static_cast<uint64_t>(word));
}

}  // namespace torchtitan_ext::core
