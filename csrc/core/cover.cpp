#include "core/cover.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "core/boxes.h"
#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

bool holds(const Chunk& chunk, std::span<const int64_t> element) {
  for (size_t dim = 0; dim < element.size(); ++dim) {
    if (element[dim] < chunk.offsets[dim] || element[dim] >= chunk.offsets[dim] + chunk.sizes[dim]) return false;
  }
  return true;
}

// Signed corners of boxes in the dims that matter, kept flat: corner i has coordinates [i * num_dims, ...) and
// signs[i].
class SignedCorners {
 public:
  explicit SignedCorners(std::vector<size_t> dims) : dims_(std::move(dims)) {}

  void add(std::span<const int64_t> offsets, std::span<const int64_t> sizes, int64_t weight) {
    const size_t num_corners = size_t{1} << dims_.size();
    for (size_t corner = 0; corner < num_corners; ++corner) {
      int64_t sign = weight;
      for (size_t index = 0; index < dims_.size(); ++index) {
        const bool at_end = (corner >> index) & 1;
        coordinates_.push_back(offsets[dims_[index]] + (at_end ? sizes[dims_[index]] : 0));
        if (at_end) sign = -sign;
      }
      signs_.push_back(sign);
    }
  }

  // The first corner, in row-major order, whose signs do not cancel: its index and the sum of the signs there.
  std::optional<std::pair<size_t, int64_t>> first_left_over() const {
    std::vector<size_t> order(signs_.size());
    for (size_t index = 0; index < order.size(); ++index) order[index] = index;
    std::sort(order.begin(), order.end(), [&](size_t left, size_t right) { return compare(left, right) < 0; });
    for (size_t begin = 0; begin < order.size();) {
      int64_t sum = 0;
      size_t end = begin;
      for (; end < order.size() && compare(order[begin], order[end]) == 0; ++end) sum += signs_[order[end]];
      if (sum != 0) return std::pair{order[begin], sum};
      begin = end;
    }
    return std::nullopt;
  }

  // The corner as an element of the whole tensor; dims that do not matter are at 0.
  Sizes element(size_t corner, size_t num_tensor_dims) const {
    Sizes element(num_tensor_dims, 0);
    for (size_t index = 0; index < dims_.size(); ++index) {
      element[dims_[index]] = coordinates_[corner * dims_.size() + index];
    }
    return element;
  }

 private:
  int compare(size_t left, size_t right) const {
    for (size_t index = 0; index < dims_.size(); ++index) {
      const int64_t a = coordinates_[left * dims_.size() + index];
      const int64_t b = coordinates_[right * dims_.size() + index];
      if (a != b) return a < b ? -1 : 1;
    }
    return 0;
  }

  std::vector<size_t> dims_;
  Sizes coordinates_;
  std::vector<int64_t> signs_;
};

// Beyond this a chunk has more corners than it is worth: 64 in 6 dims, 65,536 in 16.
constexpr size_t kMaxCornerDims = 6;

// The part of each chunk that lies in `region`, empty ones left out.
std::vector<Chunk> clip(std::span<const Chunk> chunks, const Chunk& region) {
  std::vector<Chunk> clipped;
  for (const Chunk& chunk : chunks) {
    if (auto part = intersect(region, box_of(chunk))) clipped.push_back(*std::move(part));
  }
  return clipped;
}

bool has_collision(std::span<const Chunk> chunks) {
  std::vector<Box> boxes;
  for (const Chunk& chunk : chunks) boxes.push_back(box_of(chunk));
  return find_colliding_pair(boxes).has_value();
}

bool has_gap(std::span<const Chunk> disjoint, const Chunk& region) {
  int64_t covered = 0;
  for (const Chunk& chunk : disjoint) covered += num_elements(chunk.sizes);
  return covered < num_elements(region.sizes);
}

// Chunks that are disjoint and have as many elements as the tensor cover it. Where they do not, halving the tensor,
// always on into the first half with the defect, ends at its first element in row-major order.
std::optional<CoverDefect> find_defect_by_halves(std::span<const int64_t> global_shape, std::span<const Chunk> chunks) {
  Chunk region{Sizes(global_shape.size(), 0), Sizes(global_shape.begin(), global_shape.end()), {}};
  std::vector<Chunk> inside = clip(chunks, region);
  const bool overlaps = has_collision(inside);
  const auto is_defect = [overlaps](std::span<const Chunk> parts, const Chunk& where) {
    return overlaps ? has_collision(parts) : has_gap(parts, where);
  };
  if (!is_defect(inside, region)) return std::nullopt;
  for (size_t dim = 0; dim < global_shape.size(); ++dim) {
    while (region.sizes[dim] > 1) {
      Chunk half = region;
      half.sizes[dim] /= 2;
      std::vector<Chunk> parts = clip(inside, half);
      if (!is_defect(parts, half)) {
        half.offsets[dim] += half.sizes[dim];
        half.sizes[dim] = region.sizes[dim] - half.sizes[dim];
        parts = clip(inside, half);
      }
      region = std::move(half);
      inside = std::move(parts);
    }
  }
  CoverDefect defect{overlaps ? CoverDefect::Kind::kOverlap : CoverDefect::Kind::kGap, region.offsets, {}};
  for (size_t index = 0; index < chunks.size(); ++index) {
    if (holds(chunks[index], defect.element)) defect.chunks.push_back(index);
  }
  return defect;
}

}  // namespace

std::string defect_text(const CoverDefect& defect) {
  const char* const what = defect.kind == CoverDefect::Kind::kGap       ? "leave out "
                           : defect.kind == CoverDefect::Kind::kOverlap ? "hold twice "
                                                                        : "lie outside of it, at ";
  return what + list_text(defect.element);
}

std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> global_shape, std::span<const Chunk> chunks) {
  const size_t num_dims = global_shape.size();
  std::vector<bool> is_partial(num_dims, false);
  for (size_t index = 0; index < chunks.size(); ++index) {
    const Chunk& chunk = chunks[index];
    TTE_CHECK(chunk.offsets.size() == num_dims && chunk.sizes.size() == num_dims, "find_cover_defect", "chunk ", index,
              " has ", chunk.offsets.size(), " offsets and ", chunk.sizes.size(), " sizes, expected ", num_dims);
    if (!lies_inside(box_of(chunk), global_shape))
      return CoverDefect{CoverDefect::Kind::kOutOfBounds, chunk.offsets, {index}};
    if (is_empty(chunk.sizes)) continue;
    for (size_t dim = 0; dim < num_dims; ++dim) {
      if (chunk.sizes[dim] != global_shape[dim]) is_partial[dim] = true;
    }
  }
  if (is_empty(global_shape)) return std::nullopt;

  std::vector<size_t> partial_dims;
  for (size_t dim = 0; dim < num_dims; ++dim) {
    if (is_partial[dim]) partial_dims.push_back(dim);
  }
  if (partial_dims.size() > kMaxCornerDims) return find_defect_by_halves(global_shape, chunks);
  SignedCorners corners(partial_dims);
  corners.add(Sizes(num_dims, 0), global_shape, -1);
  // Of equal chunks, which a small file can repeat very often, the corners are kept once.
  std::vector<size_t> order(chunks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto place = [&](size_t index) { return std::tie(chunks[index].offsets, chunks[index].sizes); };
  std::sort(order.begin(), order.end(), [&](size_t left, size_t right) { return place(left) < place(right); });
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && place(order[end]) == place(order[begin])) ++end;
    const Chunk& chunk = chunks[order[begin]];
    if (!is_empty(chunk.sizes)) corners.add(chunk.offsets, chunk.sizes, static_cast<int64_t>(end - begin));
  }
  const auto left_over = corners.first_left_over();
  if (!left_over) return std::nullopt;

  CoverDefect defect;
  defect.kind = left_over->second < 0 ? CoverDefect::Kind::kGap : CoverDefect::Kind::kOverlap;
  defect.element = corners.element(left_over->first, num_dims);
  for (size_t index = 0; index < chunks.size(); ++index) {
    if (holds(chunks[index], defect.element)) defect.chunks.push_back(index);
  }
  return defect;
}

}  // namespace torchtitan_ext::core
