// Which element of which source each element of a target is: a target whose elements come from other tensors, moved and
// not changed.
//
// A map is a list of *pieces*. A piece is a loop nest over two tensors at once, in row-major positions, so that it knows
// nothing of dims:
//
//     for i in [0, count_0): for j in [0, count_1): ...
//       target[target_start + i * t_0 + j * t_1 + ...] = source[source_start + i * s_0 + j * s_1 + ...]
//
// That makes a reshape free (positions stay), and every other view a change of the target's strides. Before it, a piece is
// *aligned*: its loops are cut until each of them steps through one dim and never carries into the next one. Cutting
// happens where the numbers ask for it, in the worst case down to rows or elements, so that any order of views is exact.
// Aligned to the source instead, pieces say which boxes of which saved chunks a box of the target needs.
//
// Example: the rows of a 4 x 3 source in the order 0, 2, 1, 3 (reshape to 2, 2, 3; transpose 0 and 1; reshape to 4, 3)
// are one piece: loops {count 2, target 3, source 6}, {count 2, target 6, source 3}, {count 3, target 1, source 1}. Its
// rows [1, 3) are two pieces, of one row each.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/boxes.h"
#include "core/chunk.h"
#include "core/cover.h"

namespace torchtitan_ext::core {

enum MapSide : size_t { kTarget = 0, kSource = 1 };

struct MapLoop {
  int64_t count = 0;
  std::array<int64_t, 2> strides = {};  // by side, in elements; of the source 0 where an element is repeated

  bool operator==(const MapLoop&) const = default;
};

// The source of elements that come from nowhere: all of a piece have one value.
inline constexpr uint32_t kFill = UINT32_MAX;

struct MapPiece {
  uint32_t source = 0;
  std::array<int64_t, 2> starts = {};  // by side
  std::vector<MapLoop> loops;          // in no particular order; no count is below 2
  double fill = 0;                     // the value, where the source is kFill

  int64_t num_elements() const;
  bool operator==(const MapPiece&) const = default;
};

// The views below throw std::invalid_argument where they do not fit the shape, in words that follow the name of the view.
struct TensorMap {
  Sizes shape;
  std::vector<MapPiece> pieces;

  // All of a source.
  static TensorMap whole(uint32_t source, Sizes shape);
  // Maps side by side in a new tensor, each at its offsets. Nothing checks that they cover it once: `find_defect` does.
  static TensorMap placed(Sizes shape, std::span<const TensorMap* const> parts, std::span<const Sizes> offsets);
  static TensorMap concatenated(std::span<const TensorMap* const> parts, int64_t dim);
  static TensorMap stacked(std::span<const TensorMap* const> parts, int64_t dim);

  // The only source, where each element is the one at the same row-major position of it; nothing else is asked.
  std::optional<uint32_t> source_in_place() const;

  // Dim i of the result is dim `dims[i]`.
  TensorMap permuted(std::span<const int64_t> dims) const;
  // One size may be -1: what is left over for it.
  TensorMap reshaped(Sizes sizes) const;
  TensorMap sliced(std::span<const int64_t> offsets, std::span<const int64_t> sizes) const;
  // Each element becomes a block of equal ones, of which the first `sizes` are taken: scales of blocks per element.
  TensorMap repeated(std::span<const int64_t> block, std::span<const int64_t> sizes) const;
  // With elements of one value behind a dim, which has `size` elements then.
  TensorMap padded(size_t dim, int64_t size, double value) const;
};

// A dim that counts from behind where it is negative; throws std::invalid_argument outside of `num_dims`.
size_t checked_dim(int64_t dim, size_t num_dims);

// The first element of a tensor that the pieces' positions on one side miss, or have more than once; `chunks` are
// positions of pieces.
std::optional<CoverDefect> find_defect(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces,
                                       MapSide side);
// Whether the pieces have every element of the tensor at least once: the first one that they have not, in words.
std::optional<CoverDefect> find_gap(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces,
                                    MapSide side);

// What is read of one chunk of a source for a box of the target: loops over the chunk's dims and over memory.
struct MapPart {
  struct Loop {
    int64_t count = 0;
    int64_t dim = 0;            // of the chunk; without meaning where the step is 0
    int64_t step = 0;           // elements of that dim per count
    int64_t memory_stride = 0;  // elements
  };
  uint32_t source = 0;
  size_t chunk = 0;           // position in the source's chunk list
  Sizes chunk_offsets;        // of the first element, inside the chunk
  int64_t memory_offset = 0;  // elements
  std::vector<Loop> loops;    // the chunk's outermost dim first, in it the largest step
};

// The parts for a box of the target that lies in memory with these strides. `chunks_of` gives shape and chunks of a source,
// by its number.
struct MapSource {
  Sizes shape;
  const ChunkIndex* chunks = nullptr;
};
std::vector<MapPart> find_parts(const TensorMap& map, const Box& box, std::span<const int64_t> memory_strides,
                                std::span<const MapSource> sources);

// What goes from one chunk of a source to a box of the target: a view of each, of these sizes.
struct MapMove {
  uint32_t source = 0;
  size_t chunk = 0;  // position in the source's chunk list
  Sizes sizes;       // the last one with the smallest step in the target
  BoxView src;       // inside the chunk
  BoxView dst;       // inside the box
};
std::vector<MapMove> find_moves(const TensorMap& map, const Box& box, std::span<const MapSource> sources);

// What no source has of a box of the target: a view of the box, and the value of its elements.
struct MapFill {
  double value = 0;
  Sizes sizes;
  BoxView dst;  // inside the box
};
std::vector<MapFill> find_fills(const TensorMap& map, const Box& box);

// Source and position of each element, row by row; source -1 for one that no piece has, kFill for a filled one. For tests and small tensors.
std::vector<std::pair<int64_t, int64_t>> enumerate(const TensorMap& map);

}  // namespace torchtitan_ext::core
