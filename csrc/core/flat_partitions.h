// Boxes of tensors whose elements lie in flat partitions: one-dimensional buffers, one per rank, as ZeRO cuts them.
//
// A partition holds runs of a tensor's row-major positions, which need not begin or end with a row. A run of positions
// is cut into few boxes, at most two per dim and one more, so that whatever reads boxes reads partitions.
//
// Example: a (4, 5) tensor on two partitions of 13 and 7 elements.
//   partition 0   positions [0, 13)   rows 0-1 whole, columns 0-2 of row 2
//   partition 1   positions [13, 20)  columns 3-4 of row 2, row 3 whole
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// A box of a tensor, row by row from `position` of a partition on.
struct FlatBox {
  Sizes offsets;
  Sizes sizes;
  size_t partition = 0;
  int64_t position = 0;  // elements

  bool operator==(const FlatBox&) const = default;
};

// The boxes of each tensor, in order of their positions; of a tensor without elements one empty box.
using FlatBoxes = std::vector<std::vector<FlatBox>>;

// ZeRO 1 and 2: partitions of these lengths, joined, hold the tensors one behind the other. Behind tensor i there are
// `gaps[i]` elements of padding; empty `gaps` stand for none. What is behind the last tensor is padding.
// Throws std::invalid_argument where the partitions have too few elements.
FlatBoxes joined_boxes(std::span<const Sizes> shapes, std::span<const int64_t> gaps, std::span<const int64_t> lengths);

// ZeRO 3: each partition holds an equal part of each tensor in turn, ceil(elements / partitions) long, the last of which
// are padded. Throws std::invalid_argument where a partition has another length than these parts together.
FlatBoxes dealt_boxes(std::span<const Sizes> shapes, std::span<const int64_t> lengths);

}  // namespace torchtitan_ext::core
