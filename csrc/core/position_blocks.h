// Positions of elements in a tensor, in few bytes: those of changes between two versions of a state.
//
// A position is that of an element in the row-major order of its tensor. Positions ascend, and are cut by blocks of
// 65,536, so that each is two bytes inside of its block. Per block two numbers: the block's, and how many positions it
// has; a negative count -n says that n positions follow each other, of which only the first is stored:
//
//   positions  3, 9, 65536, 65537, 65538        blocks  (0, 2) (1, -3)        offsets  3, 9, 0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

class PositionBlocks {
 public:
  static constexpr int64_t kBlock = 65536;

  PositionBlocks() = default;
  // Of what `blocks` and `offsets` gave. Throws std::invalid_argument where it is not that.
  PositionBlocks(std::vector<int32_t> blocks, std::vector<uint16_t> offsets);
  // Of ascending positions, below 2^47. Throws std::invalid_argument.
  static PositionBlocks encode(std::span<const int64_t> positions);

  std::span<const int32_t> blocks() const { return blocks_; }  // pairs
  std::span<const uint16_t> offsets() const { return offsets_; }
  int64_t size() const { return size_; }
  std::vector<int64_t> decode() const;
  // Into space for `size()` positions. Throws std::invalid_argument for other space.
  void decode(std::span<int64_t> positions) const;

 private:
  std::vector<int32_t> blocks_;
  std::vector<uint16_t> offsets_;
  int64_t size_ = 0;
};

// Which of ascending positions in a tensor lie in a box of it.
struct Selection {
  std::vector<int64_t> in_box;   // as positions in the row-major order of the box
  std::vector<int64_t> indices;  // which of the positions they are
};
Selection select_positions(std::span<const int64_t> positions, std::span<const int64_t> tensor_sizes,
                           std::span<const int64_t> offsets, std::span<const int64_t> sizes);

// The sum of the hashes (element_hash.h) of elements at positions. Args:
//   values: of each position its `item_bytes` (1, 2, 4, 8 or 16) bytes.
uint64_t sum_at(std::span<const uint8_t> values, int64_t item_bytes, std::span<const int64_t> positions);

}  // namespace torchtitan_ext::core
