// Which elements of a tensor differ by bits from those of another one: one bit for each.
#pragma once

#include <cstdint>
#include <span>

#include "core/memory.h"
#include "ops/copy_runs.h"

namespace torchtitan_ext::ops {

constexpr int64_t kWordElements = 64;

inline int64_t mask_words(int64_t num_elements) { return (num_elements + kWordElements - 1) / kWordElements; }

// Two tensors of one shape and element size (1, 2, 4, 8 or 16 bytes). Element i in row-major order has bit i % 64 of word
// `first_word` + i / 64 of the mask; the last word ends with zeros.
struct MarkedPair {
  core::Memory left, right;
  bool left_contiguous = false;
  bool right_contiguous = false;
  int64_t num_elements = 0;
  int64_t first_word = 0;

  int64_t num_words() const { return mask_words(num_elements); }
};

// Fills the mask, which the pairs share out among them in their order without gaps, and the number of bits set for each
// pair. This form is the specification.
void mark_changes_cpu(std::span<const MarkedPair> pairs, uint64_t* mask, int64_t* counts, ParallelFor parallel_for);

// Words [first_word, last_word) of a pair alone, which begin at `mask`. On this thread.
void mark_words_cpu(const MarkedPair& pair, int64_t first_word, int64_t last_word, uint64_t* mask);

// mark_changes_cpu on the current stream of the device; mask and counts lie in its memory. Elements are aligned to their size.
// Throws std::runtime_error in a build without CUDA.
void mark_changes_cuda(std::span<const MarkedPair> pairs, uint64_t* mask, int64_t* counts, int32_t device_index);

// What MarkKernel::indices may write behind the indices.
constexpr int64_t kIndexSlack = 16;

// One for each set of instructions.
struct MarkKernel {
  // Marks words of elements that lie one behind the other.
  void (*mark)(const char* left, const char* right, int64_t item_bytes, int64_t num_words, uint64_t* mask);
  // How many bits are set.
  int64_t (*count)(const uint64_t* mask, int64_t num_words);
  // Writes the numbers of the bits that are set, and returns how many. At most 1,024 words; behind the room for all of their
  // bits, `indices` has kIndexSlack more.
  int64_t (*indices)(const uint64_t* mask, int64_t num_words, uint16_t* indices);
};
extern const MarkKernel kBaselineMarks;
extern const MarkKernel kAvx2Marks;

// The best of them on this machine.
const MarkKernel& mark_kernel();

}  // namespace torchtitan_ext::ops
