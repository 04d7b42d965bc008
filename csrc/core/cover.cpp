#include "core/cover.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

bool is_empty(std::span<const int64_t> sizes) { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }

bool is_inside(const Chunk& chunk, std::span<const int64_t> global_shape) {
  for (size_t dim = 0; dim < global_shape.size(); ++dim) {
    const int64_t offset = chunk.offsets[dim];
    const int64_t size = chunk.sizes[dim];
    if (offset < 0 || size < 0 || offset > global_shape[dim] || size > global_shape[dim] - offset) return false;
  }
  return true;
}

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

}  // namespace

std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> global_shape, std::span<const Chunk> chunks) {
  const size_t num_dims = global_shape.size();
  std::vector<bool> is_partial(num_dims, false);
  for (size_t index = 0; index < chunks.size(); ++index) {
    const Chunk& chunk = chunks[index];
    TTE_CHECK(chunk.offsets.size() == num_dims && chunk.sizes.size() == num_dims, "find_cover_defect", "chunk ", index,
              " has ", chunk.offsets.size(), " offsets and ", chunk.sizes.size(), " sizes, expected ", num_dims);
    if (!is_inside(chunk, global_shape)) return CoverDefect{CoverDefect::Kind::kOutOfBounds, chunk.offsets, {index}};
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
  TTE_CHECK(partial_dims.size() <= 16, "find_cover_defect", "chunks are partial in ", partial_dims.size(),
            " dims, at most 16 can be checked");
  SignedCorners corners(partial_dims);
  corners.add(Sizes(num_dims, 0), global_shape, -1);
  for (const Chunk& chunk : chunks) {
    if (!is_empty(chunk.sizes)) corners.add(chunk.offsets, chunk.sizes, 1);
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
