#include "core/boxes.h"

#include <algorithm>

#include "core/check.h"
#include "core/cover.h"

namespace torchtitan_ext::core {
namespace {

constexpr size_t kLeafBoxes = 8;

bool is_empty(const Box& box) { return std::ranges::find(box.sizes, 0) != box.sizes.end(); }

bool meets(std::span<const Interval> left, std::span<const Interval> right) {
  for (size_t dim = 0; dim < left.size(); ++dim) {
    if (left[dim].begin >= right[dim].end || right[dim].begin >= left[dim].end) return false;
  }
  return true;
}

void append_extents(std::vector<Interval>& extents, const Box& box) {
  for (size_t dim = 0; dim < box.offsets.size(); ++dim) {
    extents.push_back({box.offsets[dim], checked_add(box.offsets[dim], box.sizes[dim])});
  }
}

bool intersect(const Chunk& wanted, const Chunk& saved, Overlap& overlap) {
  const size_t num_dims = wanted.offsets.size();
  overlap.saved_offsets.resize(num_dims);
  overlap.local_offsets.resize(num_dims);
  overlap.sizes.resize(num_dims);
  for (size_t dim = 0; dim < num_dims; ++dim) {
    const int64_t begin = std::max(wanted.offsets[dim], saved.offsets[dim]);
    const int64_t end = std::min(wanted.offsets[dim] + wanted.sizes[dim], saved.offsets[dim] + saved.sizes[dim]);
    if (begin >= end) return false;
    overlap.saved_offsets[dim] = begin - saved.offsets[dim];
    overlap.local_offsets[dim] = wanted.local_offsets[dim] + (begin - wanted.offsets[dim]);
    overlap.sizes[dim] = end - begin;
  }
  return true;
}

void check_dims(const Chunk& chunk, size_t num_dims) {
  TTE_CHECK(chunk.offsets.size() == num_dims && chunk.sizes.size() == num_dims, "find_overlaps", "a chunk has ",
            chunk.offsets.size(), " dims, expected ", num_dims);
}

std::vector<Box> boxes_of(const std::vector<Chunk>& chunks, size_t num_dims) {
  std::vector<Box> boxes;
  boxes.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    check_dims(chunk, num_dims);
    boxes.push_back({chunk.offsets, chunk.sizes});
  }
  return boxes;
}

}  // namespace

BoxIndex::BoxIndex(std::span<const Box> boxes, size_t num_dims) : num_dims_(num_dims) {
  extents_.reserve(boxes.size() * num_dims);
  order_.reserve(boxes.size());
  for (size_t index = 0; index < boxes.size(); ++index) {
    append_extents(extents_, boxes[index]);
    if (!is_empty(boxes[index])) order_.push_back(index);
  }
  if (!order_.empty()) build(0, order_.size());
}

size_t BoxIndex::build(size_t first, size_t last) {
  const size_t node = nodes_.size();
  nodes_.push_back({first, last});
  for (size_t dim = 0; dim < num_dims_; ++dim) {
    Interval bounds = extents_[order_[first] * num_dims_ + dim];
    for (size_t index = first + 1; index < last; ++index) {
      const Interval& extent = extents_[order_[index] * num_dims_ + dim];
      bounds = {std::min(bounds.begin, extent.begin), std::max(bounds.end, extent.end)};
    }
    bounds_.push_back(bounds);
  }
  if (last - first <= kLeafBoxes) return node;
  const size_t middle = first + (last - first) / 2;
  if (num_dims_ > 0) {
    const size_t dim = dim_to_cut(first, last);
    const auto begin_of = [&](size_t index) { return extents_[index * num_dims_ + dim].begin; };
    std::nth_element(order_.begin() + first, order_.begin() + middle, order_.begin() + last,
                     [&](size_t left, size_t right) { return begin_of(left) < begin_of(right); });
  }
  build(first, middle);
  const size_t right = build(middle, last);
  nodes_[node].right = right;
  return node;
}

size_t BoxIndex::dim_to_cut(size_t first, size_t last) const {
  size_t best_dim = 0;
  double most_side_by_side = -1;
  for (size_t dim = 0; dim < num_dims_; ++dim) {
    double lowest = static_cast<double>(extents_[order_[first] * num_dims_ + dim].begin);
    double highest = lowest;
    double lengths = 0;
    for (size_t index = first; index < last; ++index) {
      const Interval& extent = extents_[order_[index] * num_dims_ + dim];
      lowest = std::min(lowest, static_cast<double>(extent.begin));
      highest = std::max(highest, static_cast<double>(extent.begin));
      lengths += static_cast<double>(extent.length());
    }
    const double side_by_side = (highest - lowest) / lengths;
    if (side_by_side > most_side_by_side) {
      best_dim = dim;
      most_side_by_side = side_by_side;
    }
  }
  return best_dim;
}

void BoxIndex::find(const Box& box, std::vector<size_t>& found) const {
  found.clear();
  if (nodes_.empty() || is_empty(box)) return;
  std::vector<Interval> wanted;
  append_extents(wanted, box);
  std::vector<size_t> open = {0};
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (!meets(wanted, std::span(bounds_).subspan(node * num_dims_, num_dims_))) continue;
    const auto& [first, last, right] = nodes_[node];
    if (right != 0) {
      open.push_back(right);
      open.push_back(node + 1);
      continue;
    }
    for (size_t index = first; index < last; ++index) {
      if (meets(wanted, std::span(extents_).subspan(order_[index] * num_dims_, num_dims_))) {
        found.push_back(order_[index]);
      }
    }
  }
  std::sort(found.begin(), found.end());
}

ChunkIndex::ChunkIndex(std::vector<Chunk> saved)
    : saved_(std::move(saved)),
      num_dims_(saved_.empty() ? 0 : saved_[0].offsets.size()),
      index_(boxes_of(saved_, num_dims_), num_dims_),
      end_(num_dims_, 0) {
  for (const Chunk& chunk : saved_) {
    for (size_t dim = 0; dim < num_dims_; ++dim) {
      end_[dim] = std::max(end_[dim], chunk.offsets[dim] + chunk.sizes[dim]);
    }
  }
}

bool ChunkIndex::covers(std::span<const int64_t> shape) const {
  if (!saved_.empty() && !std::ranges::equal(shape, end_)) {
    if (shape.size() != num_dims_ || std::ranges::find(shape, 0) == shape.end()) return false;
    for (size_t dim = 0; dim < num_dims_; ++dim) {
      if (end_[dim] > shape[dim]) return false;
    }
    return true;  // there is nothing to hold
  }
  if (saved_.empty()) return !find_cover_defect(shape, saved_);
  std::call_once(cover_->once, [&] { cover_->is_exact = !find_cover_defect(shape, saved_); });
  return cover_->is_exact;
}

bool ChunkIndex::fills(std::span<const Chunk> wanted) const {
  std::vector<Chunk> boxes;
  for (const Chunk& chunk : wanted) boxes.push_back({chunk.offsets, chunk.sizes, Sizes(chunk.sizes.size(), 0)});
  std::vector<std::vector<Chunk>> parts(boxes.size());
  for (Overlap& part : find_overlaps(boxes)) {
    parts[part.wanted].push_back({std::move(part.local_offsets), std::move(part.sizes), {}});
  }
  for (size_t position = 0; position < boxes.size(); ++position) {
    if (find_cover_defect(boxes[position].sizes, parts[position])) return false;
  }
  return true;
}

std::vector<Overlap> ChunkIndex::find_overlaps(std::span<const Chunk> wanted) const {
  std::vector<Overlap> overlaps;
  if (saved_.empty()) return overlaps;
  std::vector<size_t> found;
  Overlap overlap;
  for (size_t position = 0; position < wanted.size(); ++position) {
    check_dims(wanted[position], num_dims_);
    index_.find({wanted[position].offsets, wanted[position].sizes}, found);
    for (const size_t saved_position : found) {
      if (!intersect(wanted[position], saved_[saved_position], overlap)) continue;
      overlap.wanted = position;
      overlap.saved = saved_position;
      overlaps.push_back(overlap);
    }
  }
  return overlaps;
}

std::vector<Overlap> find_overlaps(std::span<const Chunk> wanted, std::span<const Chunk> saved) {
  if (wanted.empty()) return {};
  return ChunkIndex({saved.begin(), saved.end()}).find_overlaps(wanted);
}

std::vector<Chunk> subtract(const Chunk& chunk, std::span<const Chunk> others) {
  std::vector<Chunk> left;
  if (std::ranges::find(chunk.sizes, 0) == chunk.sizes.end()) left.push_back(chunk);
  Overlap overlap;
  for (const Chunk& other : others) {
    check_dims(other, chunk.offsets.size());
    std::vector<Chunk> cut;
    for (Chunk& part : left) {
      if (!intersect(part, other, overlap)) {
        cut.push_back(std::move(part));
        continue;
      }
      // Dim by dim what lies before and behind the overlap; what is left in the end is the overlap itself.
      for (size_t dim = 0; dim < part.sizes.size(); ++dim) {
        const int64_t before = overlap.local_offsets[dim] - part.local_offsets[dim];
        const int64_t behind = part.sizes[dim] - before - overlap.sizes[dim];
        if (before > 0) {
          cut.push_back(part);
          cut.back().sizes[dim] = before;
        }
        if (behind > 0) {
          cut.push_back(part);
          cut.back().offsets[dim] += before + overlap.sizes[dim];
          cut.back().local_offsets[dim] += before + overlap.sizes[dim];
          cut.back().sizes[dim] = behind;
        }
        part.offsets[dim] += before;
        part.local_offsets[dim] += before;
        part.sizes[dim] = overlap.sizes[dim];
      }
    }
    left = std::move(cut);
  }
  return left;
}

std::optional<std::pair<size_t, size_t>> find_colliding_pair(std::span<const Box> boxes) {
  if (boxes.size() < 2) return std::nullopt;
  const BoxIndex index(boxes, boxes[0].offsets.size());
  std::vector<size_t> found;
  for (size_t position = 0; position < boxes.size(); ++position) {
    index.find(boxes[position], found);
    for (const size_t other : found) {
      if (other != position) return std::minmax(position, other);
    }
  }
  return std::nullopt;
}

}  // namespace torchtitan_ext::core
