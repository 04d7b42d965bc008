// The memory of tensors: where it lies, whether tensors share any, and copies of a range of their elements. What is
// written must share none, or the result depends on the order.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/runs.h"

namespace torchtitan_ext::core {

// The memory of one tensor. Strides count elements and are not negative; `sizes` and `strides` are the caller's and
// must outlive this.
struct Memory {
  uintptr_t address = 0;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  int64_t item_bytes = 1;
};

// Addresses of bytes.
using Extent = Interval;

// From the first to one past the last byte; {0, 0} for a tensor without elements.
Extent extent_of(const Memory& memory);

// True where two different indices of a tensor may share memory. Exact for strides that come from slicing and permuting
// a contiguous tensor; others (of as_strided) are called overlapping unless they are surely not.
bool may_overlap_itself(std::span<const int64_t> sizes, std::span<const int64_t> strides);

// The positions of two tensors that share a byte, the lower one first. Near-linear where extents do not meet.
// Interleaved tensors (column views of one buffer, the real and the imaginary part of another) are told apart byte for
// byte: by their runs where these are few, else pair by pair by arithmetic on their strides. Tensors of strides so odd
// that this takes more than some 16 million steps are called sharing.
std::optional<std::pair<size_t, size_t>> find_shared_memory(std::span<const Memory> tensors);

// The positions of a written and a read tensor that share a byte, in this order. Read tensors may share memory.
std::optional<std::pair<size_t, size_t>> find_shared_memory(std::span<const Memory> written,
                                                            std::span<const Memory> read);

// A box of a strided tensor: `num_rows` indices of dim `dim`, and all of the dims behind it. It begins `offset` elements
// behind the first one in memory. Where `dim` is the number of dims, it is one element.
struct RangeBox {
  int64_t offset = 0;
  size_t dim = 0;
  int64_t num_rows = 1;
  int64_t num_elements = 1;

  bool operator==(const RangeBox&) const = default;
};

// The boxes, in order, that elements [first, last) of a tensor are in row-major order.
std::vector<RangeBox> boxes_of_range(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t first,
                                     int64_t last);

// Adds the copy of elements [first, last), in row-major order, of a tensor between its memory and a contiguous buffer
// that holds these elements alone. `to_buffer` says which of both is the destination.
void append_range(RunList& runs, const Memory& tensor, int64_t buffer_address, int64_t first, int64_t last,
                  bool to_buffer);

}  // namespace torchtitan_ext::core
