// Boxes of one tensor that share elements: chunks of a shard that must not overlap, wanted and saved chunks that must.
// All that finds, cuts and intersects boxes is here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// What two intervals have in common, which may end before it begins.
inline Interval intersect(const Interval& left, const Interval& right) {
  return {std::max(left.begin, right.begin), std::min(left.end, right.end)};
}
inline bool is_empty(const Interval& interval) { return interval.begin >= interval.end; }
inline bool is_empty(std::span<const int64_t> sizes) { return std::ranges::find(sizes, 0) != sizes.end(); }

// Offsets and sizes in elements, as views into whatever holds them. A box with a size 0 shares nothing.
struct Box {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
};

inline Box box_of(const Chunk& chunk) { return {chunk.offsets, chunk.sizes}; }

// How a dim of a view goes through a tensor: `elements` at a time through one dim; 0, of any dim, stays where it is.
struct ViewStep {
  uint32_t dim = 0;
  int64_t elements = 0;

  bool operator==(const ViewStep&) const = default;
};

// Elements of a tensor from `offsets` on, a step per dim of the view. Without steps the view is a box: it has the dims of
// the tensor.
struct BoxView {
  Sizes offsets;
  std::vector<ViewStep> steps;

  bool operator==(const BoxView&) const = default;
};

// Whether a box is one of a tensor of these sizes: it has as many dims, and no size below 0.
bool lies_inside(const Box& box, std::span<const int64_t> global_sizes);

// Answers which of many boxes share an element with a given one, in time that grows with the logarithm of their number
// plus the answer, whether they tile one dim, several, or one of them spans all the others.
//
// A tree over the boxes: each node knows the box around all of its own, and a leaf has a handful. A node is cut in half
// along the dim in which most of its boxes lie side by side, that is in which their beginnings spread over the largest
// multiple of their mean size.
class BoxIndex {
 public:
  // All boxes have `num_dims` dims. Copies what it needs. Throws std::overflow_error for a box that ends beyond int64.
  BoxIndex(std::span<const Box> boxes, size_t num_dims);

  // Replaces `found` by the positions, in increasing order, of the boxes that share an element with `box`. Returns with how
  // many boxes, and boxes around several, that one was compared.
  size_t find(const Box& box, std::vector<size_t>& found) const;

 private:
  struct Node {
    size_t first, last;  // of order_
    size_t right = 0;    // the left child follows its parent; 0 for a leaf
  };

  size_t build(size_t first, size_t last);
  size_t dim_to_cut(size_t first, size_t last) const;

  size_t num_dims_;
  std::vector<size_t> order_;      // positions of the boxes, those of a node side by side
  std::vector<Interval> extents_;  // of box i at [i * num_dims, (i + 1) * num_dims)
  std::vector<Node> nodes_;
  std::vector<Interval> bounds_;  // of node i in the same way
};

// A part of a saved chunk that a wanted chunk needs.
struct Overlap {
  size_t wanted = 0;    // index into the wanted chunks
  size_t saved = 0;     // index into the saved chunks
  Sizes saved_offsets;  // inside the saved chunk
  Sizes local_offsets;  // inside the wanted shard's local tensor
  Sizes sizes;

  bool operator==(const Overlap&) const = default;
};

// Saved chunks, indexed once for many questions.
class ChunkIndex {
 public:
  explicit ChunkIndex(std::vector<Chunk> saved);

  // All non-empty intersections, ordered by wanted chunk, then saved chunk.
  std::vector<Overlap> find_overlaps(std::span<const Chunk> wanted) const;
  // Whether the chunks hold every element of a tensor of this shape exactly once. They are gone through for one shape,
  // that at which they end, once, and for no other one, of which a file may say thousands.
  bool covers(std::span<const int64_t> shape) const;
  // Whether the chunks hold every element of each wanted one exactly once.
  bool fills(std::span<const Chunk> wanted) const;
  // Where the chunks end, in each dim.
  const Sizes& end() const { return end_; }
  const std::vector<Chunk>& chunks() const { return saved_; }

 private:
  std::vector<Chunk> saved_;
  size_t num_dims_;
  BoxIndex index_;
  Sizes end_;
  // Whether the chunks hold all of a tensor that ends where they do. On the heap, because once_flag does not move.
  struct Cover {
    std::once_flag once;
    bool is_exact = false;
  };
  std::unique_ptr<Cover> cover_ = std::make_unique<Cover>();
};

// What of a chunk lies in a box, if anything does. Chunks need no local offsets, here and below; where they have some,
// these are moved along.
std::optional<Chunk> intersect(const Chunk& chunk, const Box& box);

// The positions of two boxes that share an element, the lower one first.
std::optional<std::pair<size_t, size_t>> find_colliding_pair(std::span<const Box> boxes);

// The boxes in groups that hang together by overlaps; of a box that meets no other one, a group of its own.
std::vector<std::vector<uint32_t>> overlapping_groups(std::span<const Box> boxes);

// A box of which every element lies in the same ones of several boxes: in those at these positions, which increase.
struct Cell {
  Chunk box;
  std::vector<uint32_t> holders;
};

// What boxes hold, in disjoint cells, each element once. Nothing where that takes more than `most_cells`.
//
//   0..6 and 4..10:  4..6 (both), 0..4 (the first), 6..10 (the second)
std::optional<std::vector<Cell>> partition(std::span<const Box> boxes, size_t most_cells);

// A box in parts of at most so many elements, in row-major order: whole rows of an outer dim, as many as fit, or parts
// of one row each. A box without elements is one part.
//
//   4 x 6 in parts of at most 12:  rows 0-1 and 2-3; of at most 4:  columns 0-3 and 4-5 of each row
class BoxParts {
 public:
  BoxParts(Chunk box, int64_t most_elements);

  int64_t size() const { return num_parts_; }
  Chunk at(int64_t number) const;

 private:
  Chunk box_;
  size_t dim_ = 0;  // parts are one element long in all dims before it
  int64_t num_rows_ = 1;
  int64_t num_parts_ = 1;
};

// A box of strided memory, whose offsets are 0, in boxes in file order: a stride steps over all elements of smaller
// strides. Most often that is the box itself; elements that share bytes or interleave are rare. Where a stride is 0 in a
// dim of several elements, it is left as it is.
//
//   3 windows of 4 elements, each 2 behind the one before, have sizes (3, 4), strides (2, 1), and share elements: their
//   left and right halves become a box each, of sizes (3, 2)
std::vector<Chunk> boxes_in_file_order(std::span<const int64_t> sizes, std::span<const int64_t> strides);

}  // namespace torchtitan_ext::core
