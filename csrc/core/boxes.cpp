#include "core/boxes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "core/check.h"
#include "core/cover.h"

namespace torchtitan_ext::core {
namespace {

constexpr size_t kLeafBoxes = 8;

bool meets(std::span<const Interval> left, std::span<const Interval> right) {
  for (size_t dim = 0; dim < left.size(); ++dim) {
    if (is_empty(intersect(left[dim], right[dim]))) return false;
  }
  return true;
}

void append_extents(std::vector<Interval>& extents, const Box& box) {
  for (size_t dim = 0; dim < box.offsets.size(); ++dim) {
    extents.push_back({box.offsets[dim], checked_add(box.offsets[dim], box.sizes[dim])});
  }
}

Interval extent(const Box& box, size_t dim) { return {box.offsets[dim], box.offsets[dim] + box.sizes[dim]}; }

void check_dims(const Chunk& chunk, size_t num_dims) {
  TTE_CHECK(chunk.offsets.size() == num_dims && chunk.sizes.size() == num_dims, "find_overlaps", "a chunk has ",
            chunk.offsets.size(), " dims, expected ", num_dims);
}

std::vector<Box> boxes_of(const std::vector<Chunk>& chunks, size_t num_dims) {
  std::vector<Box> boxes;
  boxes.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    check_dims(chunk, num_dims);
    boxes.push_back(box_of(chunk));
  }
  return boxes;
}

// Keeps elements [begin, begin + size) of one dim of a chunk, counted from where it begins.
void narrow(Chunk& chunk, size_t dim, int64_t begin, int64_t size) {
  chunk.offsets[dim] += begin;
  if (!chunk.local_offsets.empty()) chunk.local_offsets[dim] += begin;
  chunk.sizes[dim] = size;
}

// Each without the elements of a box: dim by dim what lies before and behind it.
std::vector<Chunk> subtract(std::vector<Chunk> chunks, const Box& box) {
  std::vector<Chunk> left;
  for (Chunk& part : chunks) {
    const std::optional<Chunk> both = intersect(part, box);
    if (!both) {
      left.push_back(std::move(part));
      continue;
    }
    for (size_t dim = 0; dim < part.sizes.size(); ++dim) {
      const int64_t before = both->offsets[dim] - part.offsets[dim];
      const int64_t end = before + both->sizes[dim];
      if (before > 0) narrow(left.emplace_back(part), dim, 0, before);
      if (end < part.sizes[dim]) narrow(left.emplace_back(part), dim, end, part.sizes[dim] - end);
      narrow(part, dim, before, both->sizes[dim]);
    }
  }
  return left;
}

// Adds a box to disjoint cells, which are cut where it ends.
std::vector<Cell> with_box(const std::vector<Cell>& cells, Chunk box, uint32_t number) {
  std::vector<Cell> result;
  std::vector<Chunk> rest = {std::move(box)};
  for (const Cell& cell : cells) {
    std::vector<Chunk> untouched = {cell.box};
    for (const Chunk& part : rest) {
      for (const Chunk& own : untouched) {
        std::optional<Chunk> both = intersect(own, box_of(part));
        if (!both) continue;
        result.push_back({*std::move(both), cell.holders});
        result.back().holders.push_back(number);
      }
      untouched = subtract(std::move(untouched), box_of(part));
    }
    for (Chunk& own : untouched) result.push_back({std::move(own), cell.holders});
    rest = subtract(std::move(rest), box_of(cell.box));
  }
  for (Chunk& part : rest) result.push_back({std::move(part), {number}});
  return result;
}

// The dim in which to halve a box that is not in file order, so that few cuts are needed.
std::optional<size_t> dim_to_halve(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  std::vector<size_t> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 1) dims.push_back(dim);
  }
  std::ranges::sort(dims, {}, [&](size_t dim) { return std::tuple(strides[dim], sizes[dim], dim); });
  if (!dims.empty() && strides[dims.front()] == 0) return std::nullopt;
  int64_t reach = 1;
  std::optional<size_t> inner;
  for (const size_t dim : dims) {
    // What lies inside is cut until it fits into one step of this dim, or this dim until it makes no step.
    if (strides[dim] < reach) return !inner || (reach - 1) / strides[dim] + 1 >= sizes[dim] ? dim : inner;
    reach = checked_add(reach, checked_mul(strides[dim], sizes[dim] - 1));
    inner = dim;
  }
  return std::nullopt;
}

}  // namespace

bool lies_inside(const Box& box, std::span<const int64_t> global_sizes) {
  if (box.offsets.size() != global_sizes.size() || box.sizes.size() != global_sizes.size()) return false;
  for (size_t dim = 0; dim < global_sizes.size(); ++dim) {
    const int64_t offset = box.offsets[dim];
    const int64_t size = box.sizes[dim];
    if (offset < 0 || size < 0 || offset > global_sizes[dim] || size > global_sizes[dim] - offset) return false;
  }
  return true;
}

BoxIndex::BoxIndex(std::span<const Box> boxes, size_t num_dims) : num_dims_(num_dims) {
  extents_.reserve(boxes.size() * num_dims);
  order_.reserve(boxes.size());
  for (size_t index = 0; index < boxes.size(); ++index) {
    append_extents(extents_, boxes[index]);
    if (!is_empty(boxes[index].sizes)) order_.push_back(index);
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

size_t BoxIndex::find(const Box& box, std::vector<size_t>& found) const {
  found.clear();
  if (nodes_.empty() || is_empty(box.sizes)) return 0;
  size_t num_compared = 0;
  std::vector<Interval> wanted;
  append_extents(wanted, box);
  std::vector<size_t> open = {0};
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    ++num_compared;
    if (!meets(wanted, std::span(bounds_).subspan(node * num_dims_, num_dims_))) continue;
    const auto& [first, last, right] = nodes_[node];
    if (right != 0) {
      open.push_back(right);
      open.push_back(node + 1);
      continue;
    }
    num_compared += last - first;
    for (size_t index = first; index < last; ++index) {
      if (meets(wanted, std::span(extents_).subspan(order_[index] * num_dims_, num_dims_))) {
        found.push_back(order_[index]);
      }
    }
  }
  std::sort(found.begin(), found.end());
  return num_compared;
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
    if (shape.size() != num_dims_ || !is_empty(shape)) return false;
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
  for (size_t position = 0; position < wanted.size(); ++position) {
    check_dims(wanted[position], num_dims_);
    index_.find(box_of(wanted[position]), found);
    for (const size_t saved_position : found) {
      const Chunk& saved = saved_[saved_position];
      std::optional<Chunk> both = intersect(wanted[position], box_of(saved));
      for (size_t dim = 0; dim < num_dims_; ++dim) both->offsets[dim] -= saved.offsets[dim];
      overlaps.push_back(
          {position, saved_position, std::move(both->offsets), std::move(both->local_offsets), std::move(both->sizes)});
    }
  }
  return overlaps;
}

std::optional<Chunk> intersect(const Chunk& chunk, const Box& box) {
  Chunk both = chunk;
  for (size_t dim = 0; dim < chunk.sizes.size(); ++dim) {
    const Interval inside = intersect(extent(box_of(chunk), dim), extent(box, dim));
    if (is_empty(inside)) return std::nullopt;
    narrow(both, dim, inside.begin - chunk.offsets[dim], inside.length());
  }
  return both;
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

std::vector<std::vector<uint32_t>> overlapping_groups(std::span<const Box> boxes) {
  if (boxes.empty()) return {};
  const BoxIndex index(boxes, boxes[0].offsets.size());
  std::vector<uint32_t> parent(boxes.size());
  std::iota(parent.begin(), parent.end(), 0);
  const auto root_of = [&](uint32_t box) {
    while (parent[box] != box) box = parent[box] = parent[parent[box]];
    return box;
  };
  std::vector<size_t> found;
  for (uint32_t box = 0; box < boxes.size(); ++box) {
    index.find(boxes[box], found);
    for (const size_t other : found) parent[root_of(static_cast<uint32_t>(other))] = root_of(box);
  }
  std::map<uint32_t, std::vector<uint32_t>> groups;
  for (uint32_t box = 0; box < boxes.size(); ++box) groups[root_of(box)].push_back(box);
  std::vector<std::vector<uint32_t>> result;
  for (auto& [root, group] : groups) result.push_back(std::move(group));
  return result;
}

std::optional<std::vector<Cell>> partition(std::span<const Box> boxes, size_t most_cells) {
  std::vector<Cell> cells;
  for (uint32_t number = 0; number < boxes.size(); ++number) {
    const Box& box = boxes[number];
    if (is_empty(box.sizes)) continue;
    cells =
        with_box(cells, {{box.offsets.begin(), box.offsets.end()}, {box.sizes.begin(), box.sizes.end()}, {}}, number);
    if (cells.size() > most_cells) return std::nullopt;
  }
  return cells;
}

BoxParts::BoxParts(Chunk box, int64_t most_elements) : box_(std::move(box)) {
  int64_t num_in_row = num_elements(box_.sizes);
  if (num_in_row <= most_elements) return;
  for (; dim_ < box_.sizes.size(); ++dim_) {
    num_in_row /= box_.sizes[dim_];
    if (num_in_row <= most_elements) break;
    num_parts_ *= box_.sizes[dim_];
  }
  if (dim_ == box_.sizes.size()) return;
  num_rows_ = most_elements / num_in_row;
  num_parts_ *= (box_.sizes[dim_] - 1) / num_rows_ + 1;
}

Chunk BoxParts::at(int64_t number) const {
  Chunk part = box_;
  if (num_parts_ == 1) return part;
  if (dim_ < part.sizes.size()) {
    const int64_t size = box_.sizes[dim_], in_dim = (size - 1) / num_rows_ + 1;
    const int64_t begin = number % in_dim * num_rows_;
    narrow(part, dim_, begin, std::min(num_rows_, size - begin));
    number /= in_dim;
  }
  for (size_t dim = dim_; dim-- > 0; number /= box_.sizes[dim]) narrow(part, dim, number % box_.sizes[dim], 1);
  return part;
}

std::vector<Chunk> boxes_in_file_order(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  std::vector<Chunk> ordered, open = {{Sizes(sizes.size(), 0), {sizes.begin(), sizes.end()}, {}}};
  while (!open.empty()) {
    Chunk box = std::move(open.back());
    open.pop_back();
    if (const auto dim = dim_to_halve(box.sizes, strides)) {
      const int64_t size = box.sizes[*dim], half = size / 2;
      narrow(open.emplace_back(box), *dim, half, size - half);
      narrow(open.emplace_back(std::move(box)), *dim, 0, half);
    } else {
      ordered.push_back(std::move(box));
    }
  }
  return ordered;
}

}  // namespace torchtitan_ext::core
