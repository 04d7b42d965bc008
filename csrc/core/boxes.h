// Boxes of one tensor that share elements: chunks of a shard that must not overlap, wanted and saved chunks that must.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// Offsets and sizes in elements, as views into whatever holds them. A box with a size 0 shares nothing.
struct Box {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
};

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

  // Replaces `found` by the positions, in increasing order, of the boxes that share an element with `box`.
  void find(const Box& box, std::vector<size_t>& found) const;

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

// The same for one question.
std::vector<Overlap> find_overlaps(std::span<const Chunk> wanted, std::span<const Chunk> saved);

// What is left of a chunk without the elements of others: chunks that share none, with `local_offsets` in the same local
// tensor. At most two per dim for each of the others that it meets.
//
//   4 x 4 at [0, 0] without 2 x 2 at [0, 0]:  rows 2-3, and columns 2-3 of rows 0-1
std::vector<Chunk> subtract(const Chunk& chunk, std::span<const Chunk> others);

// The positions of two boxes that share an element, the lower one first.
std::optional<std::pair<size_t, size_t>> find_colliding_pair(std::span<const Box> boxes);

}  // namespace torchtitan_ext::core
