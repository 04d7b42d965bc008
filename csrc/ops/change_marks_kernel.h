// The parts of a MarkKernel that are the same source for all sets of instructions: everything is static here.
#pragma once

#include <cstdint>

#include "ops/change_marks.h"

namespace torchtitan_ext::ops {
namespace {

int64_t count_bits(const uint64_t* mask, int64_t num_words) {
  int64_t count = 0;
  for (int64_t word = 0; word < num_words; ++word) count += __builtin_popcountll(mask[word]);
  return count;
}

// Always some indices more than there are, which the next word overwrites: how many a word has is hard to foretell for a
// processor where few elements have changed (https://arxiv.org/abs/1902.08318, flatten_bits).
int64_t indices_of_bits(const uint64_t* mask, int64_t num_words, uint16_t* indices) {
  constexpr int kAlways = 4;
  uint16_t* end = indices;
  for (int64_t word = 0; word < num_words; ++word) {
    uint64_t bits = mask[word];
    const int64_t count = __builtin_popcountll(bits);
    const int64_t first = word * kWordElements;
    uint16_t* next = end;
    const auto write = [&] {
      *next++ = static_cast<uint16_t>(first + __builtin_ctzll(bits | uint64_t{1} << 63));
      bits &= bits - 1;
    };
    for (int index = 0; index < kAlways; ++index) write();
    if (count > kAlways) {
      while (bits != 0) write();
    }
    end += count;
  }
  return end - indices;
}

}  // namespace
}  // namespace torchtitan_ext::ops
