// A chunk is a box of a global tensor; a shard is what one rank holds of it: an ordered list of chunks.
//
// Offsets and sizes count elements, intervals are half-open. A 0-d tensor has one chunk with no offsets and no sizes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace torchtitan_ext::core {

using Sizes = std::vector<int64_t>;

// A half-open interval [begin, end) of one tensor dim.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

struct Chunk {
  Sizes offsets;        // in the global tensor
  Sizes sizes;          // no size is 0: an empty box is no chunk
  Sizes local_offsets;  // of the same box in the rank's local tensor

  bool operator==(const Chunk&) const = default;
};

// `sizes` is the shape of the local tensor; the chunks stand in row-major order of their local offsets and tile it.
// An empty shard has no chunks and at least one size 0.
struct Shard {
  Sizes sizes;
  std::vector<Chunk> chunks;

  bool operator==(const Shard&) const = default;
};

// Product of the sizes, 1 for a 0-d tensor. Throws std::overflow_error beyond int64.
int64_t num_elements(std::span<const int64_t> sizes);

// The strides, in elements, of a tensor whose elements lie row-major, without gaps. Throws std::overflow_error beyond
// int64.
Sizes row_major_strides(std::span<const int64_t> sizes);

// As Python writes a list of them: "[2, 0]".
std::string list_text(std::span<const int64_t> sizes);

}  // namespace torchtitan_ext::core
