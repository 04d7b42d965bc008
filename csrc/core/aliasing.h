// Do tensors share memory, with themselves or with each other? What is written must not, or the result depends on the
// order.
#pragma once

#include <cstdint>
#include <span>

#include "core/runs.h"

namespace torchtitan_ext::core {

// The memory of one tensor. Strides count elements; `sizes` and `strides` are the caller's and must outlive this.
struct Memory {
  uintptr_t address = 0;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  int64_t item_bytes = 1;
};

// True where two different indices of a tensor may share memory. Exact for strides that come from slicing and permuting
// a contiguous tensor; others (of as_strided) are called overlapping unless they are surely not.
bool may_overlap_itself(std::span<const int64_t> sizes, std::span<const int64_t> strides);

// The addresses from the first to one past the last byte; {0, 0} for a tensor without elements.
Extent extent_of(const Memory& memory);

// The positions of two tensors that share a byte, or {-1, -1}. Interleaved tensors (column views of one buffer) are
// told apart byte for byte; where that would take more than 4 million runs, they are called sharing. Near-linear
// otherwise.
BoxPair find_shared_memory(std::span<const Memory> tensors);

}  // namespace torchtitan_ext::core
