#include "core/tensor_map.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Views that scatter a tensor into more pieces than this have no boxes or rows left.
constexpr size_t kMaxPieces = size_t{1} << 21;

// More elements than this are not compared one by one where boxes cannot say it.
constexpr int64_t kMaxCounted = int64_t{1} << 33;

// The dims of a shape as positions see them: row-major strides, of dims with more than one element.
class Grid {
 public:
  explicit Grid(std::span<const int64_t> shape)
      : shape_(shape.begin(), shape.end()), strides_(row_major_strides(shape)) {
    for (size_t dim = 0; dim < shape_.size(); ++dim) {
      if (shape_[dim] > 1) dims_.push_back(dim);
    }
  }

  const Sizes& shape() const { return shape_; }
  const Sizes& strides() const { return strides_; }
  std::span<const size_t> dims() const { return dims_; }

  Sizes coordinates(int64_t position) const {
    Sizes found(shape_.size(), 0);
    for (const size_t dim : dims_) {
      found[dim] = position / strides_[dim];
      position %= strides_[dim];
    }
    return found;
  }

  // The dim through which a loop of this stride steps, if it steps through one alone; the stride is not 0.
  size_t dim_of(int64_t stride) const {
    for (const size_t dim : dims_) {
      if (strides_[dim] <= stride) return dim;
    }
    throw std::logic_error("a stride without a dim; please report");
  }

 private:
  Sizes shape_;
  Sizes strides_;
  std::vector<size_t> dims_;
};

// The iterations [begin, begin + count) of a loop; the loop goes where one is left.
MapPiece part_of(const MapPiece& piece, size_t loop, int64_t begin, int64_t count) {
  MapPiece part = piece;
  for (const MapSide side : {kTarget, kSource}) part.starts[side] += begin * piece.loops[loop].strides[side];
  if (count == 1) {
    part.loops.erase(part.loops.begin() + static_cast<std::ptrdiff_t>(loop));
  } else {
    part.loops[loop].count = count;
  }
  return part;
}

int64_t floor_div(int64_t left, int64_t right) { return left >= 0 ? left / right : -((-left + right - 1) / right); }
int64_t ceil_div(int64_t left, int64_t right) { return -floor_div(-left, right); }

// The loops of a piece that step through one dim, on one side.
struct OfDim {
  std::vector<size_t> loops;
  size_t largest = 0;  // the loop of the largest step
  int64_t step = 0;    // of that loop
  int64_t lower = 0;   // how far the other loops reach
  int64_t reach = 0;   // all of them
};

OfDim loops_of(const MapPiece& piece, MapSide side, const Grid& grid, size_t dim) {
  OfDim found;
  for (size_t loop = 0; loop < piece.loops.size(); ++loop) {
    const auto& [count, strides] = piece.loops[loop];
    if (strides[side] == 0 || grid.dim_of(strides[side]) != dim) continue;
    const int64_t step = strides[side] / grid.strides()[dim];
    found.loops.push_back(loop);
    found.reach += step * (count - 1);
    if (step > found.step) std::tie(found.step, found.largest) = std::pair(step, loop);
  }
  if (!found.loops.empty()) found.lower = found.reach - found.step * (piece.loops[found.largest].count - 1);
  return found;
}

// Cuts a piece that is not aligned into parts that are closer to it; false where it is aligned.
bool cut(const MapPiece& piece, MapSide side, const Grid& grid, std::vector<MapPiece>& parts) {
  for (size_t loop = 0; loop < piece.loops.size(); ++loop) {
    const int64_t stride = piece.loops[loop].strides[side];
    if (stride == 0 || stride % grid.strides()[grid.dim_of(stride)] == 0) continue;
    for (int64_t index = 0; index < piece.loops[loop].count; ++index) parts.push_back(part_of(piece, loop, index, 1));
    return true;
  }
  const Sizes start = grid.coordinates(piece.starts[side]);
  for (size_t number = grid.dims().size(); number-- > 0;) {
    const size_t dim = grid.dims()[number];
    const int64_t size = grid.shape()[dim];
    const OfDim of_dim = loops_of(piece, side, grid, dim);
    if (start[dim] + of_dim.reach < size) continue;
    const size_t loop = of_dim.largest;
    const int64_t count = piece.loops[loop].count;
    if (size % of_dim.step == 0 && start[dim] % of_dim.step + of_dim.lower < of_dim.step) {
      // The loop carries after each `period` of its iterations: a loop of two digits, if it begins at one.
      const int64_t period = size / of_dim.step;
      const int64_t phase = start[dim] / of_dim.step;
      const int64_t first = phase == 0 ? count / period * period : period - phase;
      MapPiece head = part_of(piece, loop, 0, first);
      if (phase == 0) {
        std::array<int64_t, 2> strides = piece.loops[loop].strides;
        head.loops[loop].count = period;
        for (int64_t& stride : strides) stride *= period;
        if (first > period) head.loops.push_back({first / period, strides});
        if (period == 1) head.loops.erase(head.loops.begin() + static_cast<std::ptrdiff_t>(loop));
      }
      parts.push_back(std::move(head));
      if (first < count) parts.push_back(part_of(piece, loop, first, count - first));
      return true;
    }
    const int64_t last_fit = floor_div(size - 1 - start[dim] - of_dim.lower, of_dim.step);
    const int64_t fitting = std::clamp<int64_t>(last_fit + 1, 0, count);
    const int64_t beyond = std::clamp<int64_t>(ceil_div(size - start[dim], of_dim.step), fitting, count);
    if (fitting > 0) parts.push_back(part_of(piece, loop, 0, fitting));
    for (int64_t index = fitting; index < beyond; ++index) parts.push_back(part_of(piece, loop, index, 1));
    if (beyond < count) parts.push_back(part_of(piece, loop, beyond, count - beyond));
    return true;
  }
  return false;
}

// Adds the aligned parts of a piece.
void align(MapPiece piece, MapSide side, const Grid& grid, std::vector<MapPiece>& aligned) {
  std::vector<MapPiece> pending;
  pending.push_back(std::move(piece));
  std::vector<MapPiece> parts;
  while (!pending.empty()) {
    MapPiece next = std::move(pending.back());
    pending.pop_back();
    parts.clear();
    if (cut(next, side, grid, parts)) {
      for (size_t part = parts.size(); part-- > 0;) pending.push_back(std::move(parts[part]));
    } else {
      aligned.push_back(std::move(next));
    }
    TTE_CHECK(aligned.size() + pending.size() <= kMaxPieces, "shape", "neither boxes nor rows of a tensor of shape ",
              list_text(grid.shape()), " stay together: it would be moved in more than ", kMaxPieces, " pieces");
  }
}

std::vector<MapPiece> aligned(std::span<const MapPiece> pieces, MapSide side, const Grid& grid) {
  std::vector<MapPiece> result;
  result.reserve(pieces.size());
  for (const MapPiece& piece : pieces) align(piece, side, grid, result);
  return result;
}

// Adds the parts of an aligned piece whose coordinates in one dim lie in [begin, end).
void clip(const MapPiece& piece, MapSide side, const Grid& grid, size_t dim, int64_t begin, int64_t end,
          std::vector<MapPiece>& inside) {
  const int64_t first = grid.coordinates(piece.starts[side])[dim];
  const OfDim of_dim = loops_of(piece, side, grid, dim);
  if (first >= begin && first + of_dim.reach < end) {
    inside.push_back(piece);
    return;
  }
  if (first >= end || first + of_dim.reach < begin || of_dim.loops.empty()) return;
  const size_t loop = of_dim.largest;
  const int64_t count = piece.loops[loop].count;
  const int64_t touching = std::clamp<int64_t>(ceil_div(begin - first - of_dim.lower, of_dim.step), 0, count);
  const int64_t touching_end = std::clamp<int64_t>(floor_div(end - 1 - first, of_dim.step) + 1, touching, count);
  const int64_t whole = std::clamp<int64_t>(ceil_div(begin - first, of_dim.step), touching, touching_end);
  const int64_t whole_end =
      std::clamp<int64_t>(floor_div(end - 1 - first - of_dim.lower, of_dim.step) + 1, whole, touching_end);
  for (int64_t index = touching; index < whole; ++index) {
    clip(part_of(piece, loop, index, 1), side, grid, dim, begin, end, inside);
  }
  if (whole < whole_end) inside.push_back(part_of(piece, loop, whole, whole_end - whole));
  for (int64_t index = whole_end; index < touching_end; ++index) {
    clip(part_of(piece, loop, index, 1), side, grid, dim, begin, end, inside);
  }
}

std::vector<MapPiece> clipped(std::vector<MapPiece> pieces, MapSide side, const Grid& grid,
                              std::span<const int64_t> offsets, std::span<const int64_t> sizes) {
  for (const size_t dim : grid.dims()) {
    if (offsets[dim] == 0 && sizes[dim] == grid.shape()[dim]) continue;
    std::vector<MapPiece> inside;
    for (const MapPiece& piece : pieces) {
      clip(piece, side, grid, dim, offsets[dim], offsets[dim] + sizes[dim], inside);
    }
    pieces = std::move(inside);
  }
  return pieces;
}

// Joins loops that go on where an inner one stops, so that pieces stay as few loops as their numbers allow.
void simplify(MapPiece& piece) {
  std::ranges::sort(piece.loops, [](const MapLoop& left, const MapLoop& right) {
    return std::pair(left.strides[kTarget], left.strides[kSource]) >
           std::pair(right.strides[kTarget], right.strides[kSource]);
  });
  std::vector<MapLoop> joined;
  for (size_t loop = piece.loops.size(); loop-- > 0;) {
    const MapLoop& outer = piece.loops[loop];
    if (!joined.empty()) {
      MapLoop& inner = joined.back();
      if (outer.strides[kTarget] == inner.count * inner.strides[kTarget] &&
          outer.strides[kSource] == inner.count * inner.strides[kSource]) {
        inner.count *= outer.count;
        continue;
      }
    }
    joined.push_back(outer);
  }
  std::ranges::reverse(joined);
  piece.loops = std::move(joined);
}

// The same elements at other strides per dim: `pieces` are aligned to `grid` on the side of the target.
void restride(std::vector<MapPiece>& pieces, const Grid& grid, std::span<const int64_t> offsets,
              std::span<const int64_t> strides, int64_t begin) {
  for (MapPiece& piece : pieces) {
    for (MapLoop& loop : piece.loops) {
      const size_t dim = grid.dim_of(loop.strides[kTarget]);
      loop.strides[kTarget] = loop.strides[kTarget] / grid.strides()[dim] * strides[dim];
    }
    const Sizes start = grid.coordinates(piece.starts[kTarget]);
    piece.starts[kTarget] = begin;
    for (size_t dim = 0; dim < strides.size(); ++dim) {
      piece.starts[kTarget] += (start[dim] - offsets[dim]) * strides[dim];
    }
  }
}

// A box of a map, its elements at these strides.
std::vector<MapPiece> box_of(const TensorMap& map, std::span<const int64_t> offsets, std::span<const int64_t> sizes,
                             std::span<const int64_t> strides) {
  if (std::ranges::find(sizes, 0) != sizes.end()) return {};
  const Grid grid(map.shape);
  std::vector<MapPiece> pieces = clipped(aligned(map.pieces, kTarget, grid), kTarget, grid, offsets, sizes);
  restride(pieces, grid, offsets, strides, 0);
  return pieces;
}

std::string shape_text(std::span<const int64_t> shape) { return list_text(shape); }

// Dims so fine that loops of all pieces are digits of them, as far as their strides divide each other.
Sizes factored(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces, MapSide side) {
  Sizes strides = row_major_strides(shape);
  for (const MapPiece* piece : pieces) {
    for (const MapLoop& loop : piece->loops) {
      if (loop.strides[side] > 0) {
        strides.push_back(loop.strides[side]);
        strides.push_back(loop.strides[side] * loop.count);
      }
    }
  }
  const int64_t total = num_elements(shape);
  std::ranges::sort(strides);
  Sizes sizes;
  int64_t last = 1;
  for (const int64_t stride : strides) {
    if (stride <= last || stride % last != 0 || total % stride != 0) continue;
    sizes.push_back(stride / last);
    last = stride;
  }
  sizes.push_back(total / last);
  std::ranges::reverse(sizes);
  return sizes;
}

// The box that an aligned piece fills on one side, if it fills one: the steps in each dim are digits.
std::optional<Chunk> dense_box(const MapPiece& piece, MapSide side, const Grid& grid) {
  Chunk box{grid.coordinates(piece.starts[side]), Sizes(grid.shape().size(), 1), {}};
  std::vector<MapLoop> loops = piece.loops;
  std::ranges::sort(loops, {}, [side](const MapLoop& loop) { return loop.strides[side]; });
  for (const MapLoop& loop : loops) {
    if (loop.strides[side] == 0) return std::nullopt;
    const size_t dim = grid.dim_of(loop.strides[side]);
    if (loop.strides[side] / grid.strides()[dim] != box.sizes[dim]) return std::nullopt;
    box.sizes[dim] *= loop.count;
  }
  return box;
}

struct Boxes {
  Grid grid;
  std::vector<Chunk> chunks;
  std::vector<size_t> owner;  // of each chunk its piece
};

std::optional<Boxes> boxes_of(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces, MapSide side) {
  Boxes boxes{Grid(factored(shape, pieces, side)), {}, {}};
  std::vector<MapPiece> parts;
  for (size_t number = 0; number < pieces.size(); ++number) {
    parts.clear();
    align(*pieces[number], side, boxes.grid, parts);
    for (const MapPiece& part : parts) {
      std::optional<Chunk> box = dense_box(part, side, boxes.grid);
      if (!box) return std::nullopt;
      boxes.chunks.push_back(*std::move(box));
      boxes.owner.push_back(number);
    }
  }
  return boxes;
}

template <typename Visit>
void walk(const MapPiece& piece, const Visit& visit) {
  std::vector<int64_t> index(piece.loops.size(), 0);
  std::array<int64_t, 2> at = piece.starts;
  while (true) {
    visit(at);
    size_t loop = piece.loops.size();
    for (; loop > 0; --loop) {
      const MapLoop& of = piece.loops[loop - 1];
      const bool ends = ++index[loop - 1] == of.count;
      if (ends) index[loop - 1] = 0;
      for (const MapSide side : {kTarget, kSource}) {
        at[side] += ends ? -of.strides[side] * (of.count - 1) : of.strides[side];
      }
      if (!ends) break;
    }
    if (loop == 0) return;
  }
}

// Counts elements one by one: for pieces whose loops interleave.
std::optional<CoverDefect> counted_defect(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces,
                                          MapSide side, bool once) {
  const int64_t total = num_elements(shape);
  TTE_CHECK(total <= kMaxCounted, "prove", "a tensor of shape ", shape_text(shape),
            " is filled in interleaved elements, and is too large to count them");
  std::vector<bool> seen(static_cast<size_t>(total), false);
  std::optional<int64_t> twice;
  for (const MapPiece* piece : pieces) {
    walk(*piece, [&](const std::array<int64_t, 2>& at) {
      const auto position = static_cast<size_t>(at[side]);
      if (seen[position] && once) twice = std::min(twice.value_or(at[side]), at[side]);
      seen[position] = true;
    });
  }
  const auto missed = std::ranges::find(seen, false);
  const Grid grid(shape);
  if (missed != seen.end()) {
    return CoverDefect{CoverDefect::Kind::kGap, grid.coordinates(missed - seen.begin()), {}};
  }
  if (!twice) return std::nullopt;
  CoverDefect defect{CoverDefect::Kind::kOverlap, grid.coordinates(*twice), {}};
  for (size_t number = 0; number < pieces.size(); ++number) {
    bool has = false;
    walk(*pieces[number], [&](const std::array<int64_t, 2>& at) { has = has || at[side] == *twice; });
    if (has) defect.chunks.push_back(number);
  }
  return defect;
}

std::vector<size_t> checked_permutation(std::span<const int64_t> dims, size_t num_dims) {
  TTE_CHECK(dims.size() == num_dims, "dims", "got ", shape_text(dims), " for a tensor of ", num_dims, " dims");
  std::vector<size_t> order;
  for (const int64_t dim : dims) {
    const size_t checked = checked_dim(dim, num_dims);
    TTE_CHECK(std::ranges::find(order, checked) == order.end(), "dims", "got ", shape_text(dims), ", a dim twice");
    order.push_back(checked);
  }
  return order;
}

// The parts of pieces that lie in one chunk of their source each, aligned to it: calls `visit` with the piece, the position
// of the chunk, the chunk, and the source's grid.
template <typename Visit>
void for_each_in_chunks(std::vector<MapPiece> pieces, std::span<const MapSource> sources, const Visit& visit) {
  std::vector<MapPiece> by_source;
  for (MapPiece& piece : pieces) {
    if (piece.source == kFill) continue;
    simplify(piece);
    const MapSource& source = sources[piece.source];
    const Grid grid(source.shape);
    by_source.clear();
    align(std::move(piece), kSource, grid, by_source);
    for (const MapPiece& aligned_piece : by_source) {
      Chunk wanted{grid.coordinates(aligned_piece.starts[kSource]), Sizes(source.shape.size(), 1), {}};
      for (const size_t dim : grid.dims()) wanted.sizes[dim] += loops_of(aligned_piece, kSource, grid, dim).reach;
      for (const Overlap& overlap : source.chunks->find_overlaps(std::span(&wanted, 1))) {
        const Chunk& chunk = source.chunks->chunks()[overlap.saved];
        for (const MapPiece& inside : clipped({aligned_piece}, kSource, grid, chunk.offsets, chunk.sizes)) {
          visit(inside, overlap.saved, chunk, grid);
        }
      }
    }
  }
}

// Where the first element of a piece lies in a chunk of its source.
Sizes coordinates_in(const Chunk& chunk, const MapPiece& piece, const Grid& grid) {
  Sizes found = grid.coordinates(piece.starts[kSource]);
  for (size_t dim = 0; dim < chunk.offsets.size(); ++dim) found[dim] -= chunk.offsets[dim];
  return found;
}

// How a loop of an aligned piece steps through one dim; a step of 0, of any dim, repeats an element.
ViewStep step_of(const MapLoop& loop, MapSide side, const Grid& grid) {
  const int64_t stride = loop.strides[side];
  if (stride == 0) return {};
  const size_t dim = grid.dim_of(stride);
  return {static_cast<uint32_t>(dim), stride / grid.strides()[dim]};
}

}  // namespace

int64_t MapPiece::num_elements() const {
  int64_t product = 1;
  for (const MapLoop& loop : loops) product = checked_mul(product, loop.count);
  return product;
}

size_t checked_dim(int64_t dim, size_t num_dims) {
  const auto count = static_cast<int64_t>(num_dims);
  TTE_CHECK(dim >= -count && dim < count, "dim", "got ", dim, " for a tensor of ", num_dims, " dims");
  return static_cast<size_t>(dim < 0 ? dim + count : dim);
}

TensorMap TensorMap::whole(uint32_t source, Sizes shape) {
  const int64_t total = core::num_elements(shape);
  TensorMap map{std::move(shape), {}};
  if (total == 0) return map;
  MapPiece piece{source, {0, 0}, {}};
  if (total > 1) piece.loops.push_back({total, {1, 1}});
  map.pieces.push_back(std::move(piece));
  return map;
}

TensorMap TensorMap::placed(Sizes shape, std::span<const TensorMap* const> parts, std::span<const Sizes> offsets) {
  TTE_CHECK(parts.size() == offsets.size(), "offsets", "got ", offsets.size(), " for ", parts.size(), " tensors");
  const Sizes strides = row_major_strides(shape);
  TensorMap map{std::move(shape), {}};
  core::num_elements(map.shape);
  for (size_t number = 0; number < parts.size(); ++number) {
    const TensorMap& part = *parts[number];
    const Sizes& at = offsets[number];
    TTE_CHECK(part.shape.size() == map.shape.size() && at.size() == map.shape.size(), "offsets", "got ", shape_text(at),
              " for a tensor of shape ", shape_text(part.shape), " in one of ", shape_text(map.shape));
    int64_t begin = 0;
    for (size_t dim = 0; dim < at.size(); ++dim) {
      TTE_CHECK(at[dim] >= 0 && part.shape[dim] <= map.shape[dim] - at[dim], "offsets", "a box at ", shape_text(at),
                " of sizes ", shape_text(part.shape), " does not lie in ", shape_text(map.shape));
      begin += at[dim] * strides[dim];
    }
    const Grid grid(part.shape);
    std::vector<MapPiece> pieces = aligned(part.pieces, kTarget, grid);
    restride(pieces, grid, Sizes(at.size(), 0), strides, begin);
    for (MapPiece& piece : pieces) {
      simplify(piece);
      map.pieces.push_back(std::move(piece));
    }
  }
  return map;
}

TensorMap TensorMap::concatenated(std::span<const TensorMap* const> parts, int64_t dim) {
  TTE_CHECK(!parts.empty(), "parts", "got none");
  const size_t along = checked_dim(dim, parts.front()->shape.size());
  Sizes shape = parts.front()->shape;
  shape[along] = 0;
  std::vector<Sizes> offsets;
  for (const TensorMap* part : parts) {
    Sizes other = part->shape;
    bool fits = other.size() == shape.size();
    for (size_t each = 0; fits && each < other.size(); ++each) fits = each == along || other[each] == shape[each];
    TTE_CHECK(fits, "shapes", "got ", shape_text(parts.front()->shape), " and ", shape_text(other),
              ", which differ in other dims than ", along);
    Sizes at(shape.size(), 0);
    at[along] = shape[along];
    offsets.push_back(std::move(at));
    shape[along] = checked_add(shape[along], other[along]);
  }
  return placed(std::move(shape), parts, offsets);
}

TensorMap TensorMap::stacked(std::span<const TensorMap* const> parts, int64_t dim) {
  TTE_CHECK(!parts.empty(), "parts", "got none");
  const size_t along = checked_dim(dim, parts.front()->shape.size() + 1);
  std::vector<TensorMap> rows;
  rows.reserve(parts.size());
  for (const TensorMap* part : parts) {
    TTE_CHECK(part->shape == parts.front()->shape, "shapes", "got ", shape_text(parts.front()->shape), " and ",
              shape_text(part->shape), ", expected equal ones");
    rows.push_back(*part);
    rows.back().shape.insert(rows.back().shape.begin() + static_cast<std::ptrdiff_t>(along), 1);
  }
  std::vector<const TensorMap*> pointers;
  for (const TensorMap& row : rows) pointers.push_back(&row);
  return concatenated(pointers, static_cast<int64_t>(along));
}

std::optional<uint32_t> TensorMap::source_in_place() const {
  if (pieces.empty()) return std::nullopt;
  const uint32_t source = pieces.front().source;
  if (source == kFill) return std::nullopt;
  const auto stays = [&](const MapPiece& piece) {
    return piece.source == source && piece.starts[kTarget] == piece.starts[kSource] &&
           std::ranges::all_of(piece.loops,
                               [](const MapLoop& loop) { return loop.strides[kTarget] == loop.strides[kSource]; });
  };
  return std::ranges::all_of(pieces, stays) ? std::optional(source) : std::nullopt;
}

TensorMap TensorMap::permuted(std::span<const int64_t> dims) const {
  const std::vector<size_t> order = checked_permutation(dims, shape.size());
  TensorMap map;
  for (const size_t dim : order) map.shape.push_back(shape[dim]);
  const Sizes new_strides = row_major_strides(map.shape);
  Sizes strides(shape.size());
  for (size_t dim = 0; dim < order.size(); ++dim) strides[order[dim]] = new_strides[dim];
  const Grid grid(shape);
  map.pieces = aligned(pieces, kTarget, grid);
  restride(map.pieces, grid, Sizes(shape.size(), 0), strides, 0);
  for (MapPiece& piece : map.pieces) simplify(piece);
  return map;
}

TensorMap TensorMap::reshaped(Sizes sizes) const {
  const int64_t total = core::num_elements(shape);
  const Sizes asked = sizes;
  const auto open = std::ranges::find(sizes, -1);
  if (open != sizes.end()) {
    *open = 1;
    const bool is_known = std::ranges::all_of(sizes, [](int64_t size) { return size > 0; });
    const int64_t known = is_known ? core::num_elements(sizes) : 0;
    TTE_CHECK(is_known && total % known == 0, "shape", "got ", shape_text(asked), " for ", total, " elements of shape ",
              shape_text(shape));
    *open = total / known;
  }
  const bool is_shape = std::ranges::all_of(sizes, [](int64_t size) { return size >= 0; });
  TTE_CHECK(is_shape && core::num_elements(sizes) == total, "shape", "got ", shape_text(asked), " for ", total,
            " elements of shape ", shape_text(shape));
  return {std::move(sizes), pieces};
}

TensorMap TensorMap::sliced(std::span<const int64_t> offsets, std::span<const int64_t> sizes) const {
  TTE_CHECK(offsets.size() == shape.size() && sizes.size() == shape.size(), "slice", "got ", shape_text(offsets),
            " and ", shape_text(sizes), " for a tensor of shape ", shape_text(shape));
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    TTE_CHECK(
        offsets[dim] >= 0 && sizes[dim] >= 0 && offsets[dim] <= shape[dim] && sizes[dim] <= shape[dim] - offsets[dim],
        "slice", "elements ", offsets[dim], " to ", offsets[dim] + sizes[dim], " of dim ", dim, " do not lie in shape ",
        shape_text(shape));
  }
  TensorMap map{Sizes(sizes.begin(), sizes.end()), {}};
  map.pieces = box_of(*this, offsets, sizes, row_major_strides(sizes));
  for (MapPiece& piece : map.pieces) simplify(piece);
  return map;
}

TensorMap TensorMap::repeated(std::span<const int64_t> block, std::span<const int64_t> sizes) const {
  TTE_CHECK(block.size() == shape.size() && sizes.size() == shape.size(), "block", "got ", shape_text(block),
            " for tensors of shapes ", shape_text(sizes), " and ", shape_text(shape));
  TensorMap map;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    TTE_CHECK(block[dim] > 0 && shape[dim] == ceil_div(sizes[dim], block[dim]), "block", "scales of shape ",
              shape_text(shape), " are not those of blocks ", shape_text(block), " of a tensor of shape ",
              shape_text(sizes));
    map.shape.push_back(checked_mul(shape[dim], block[dim]));
  }
  const Grid grid(shape);
  const Sizes rows = row_major_strides(map.shape);
  Sizes strides = rows;
  for (size_t dim = 0; dim < strides.size(); ++dim) strides[dim] *= block[dim];
  map.pieces = aligned(pieces, kTarget, grid);
  restride(map.pieces, grid, Sizes(shape.size(), 0), strides, 0);
  for (MapPiece& piece : map.pieces) {
    for (size_t dim = 0; dim < block.size(); ++dim) {
      if (block[dim] > 1) piece.loops.push_back({block[dim], {rows[dim], 0}});
    }
  }
  return map.sliced(Sizes(sizes.size(), 0), sizes);
}

TensorMap TensorMap::padded(size_t dim, int64_t size, double value) const {
  TTE_CHECK(size >= shape[dim], "to", "got ", size, " for dim ", dim, " of shape ", shape_text(shape),
            ", which a pad does not make shorter");
  Sizes added = shape;
  added[dim] = size - shape[dim];
  TensorMap padding = whole(kFill, added);
  for (MapPiece& piece : padding.pieces) {
    piece.fill = value;
    for (MapLoop& loop : piece.loops) loop.strides[kSource] = 0;
  }
  return concatenated(std::vector<const TensorMap*>{this, &padding}, static_cast<int64_t>(dim));
}

std::optional<CoverDefect> find_defect(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces,
                                       MapSide side) {
  const int64_t total = num_elements(shape);
  if (total == 0) return std::nullopt;
  std::optional<Boxes> boxes;
  try {
    boxes = boxes_of(shape, pieces, side);
  } catch (const std::invalid_argument&) {
    // Too many pieces: counted below.
  }
  if (!boxes) return counted_defect(shape, pieces, side, true);
  std::optional<CoverDefect> defect = find_cover_defect(boxes->grid.shape(), boxes->chunks);
  if (!defect) return std::nullopt;
  int64_t position = 0;
  for (size_t dim = 0; dim < defect->element.size(); ++dim) {
    position += defect->element[dim] * boxes->grid.strides()[dim];
  }
  defect->element = Grid(shape).coordinates(position);
  for (size_t& chunk : defect->chunks) chunk = boxes->owner[chunk];
  return defect;
}

std::optional<CoverDefect> find_gap(std::span<const int64_t> shape, std::span<const MapPiece* const> pieces,
                                    MapSide side) {
  if (num_elements(shape) == 0) return std::nullopt;
  std::optional<CoverDefect> defect = find_defect(shape, pieces, side);
  if (!defect || defect->kind == CoverDefect::Kind::kGap) return defect;
  return counted_defect(shape, pieces, side, false);
}

std::vector<MapPart> find_parts(const TensorMap& map, const Box& box, std::span<const int64_t> memory_strides,
                                std::span<const MapSource> sources) {
  std::vector<MapPart> parts;
  const auto add = [&](const MapPiece& inside, size_t position, const Chunk& chunk, const Grid& grid) {
    MapPart part{inside.source, position, coordinates_in(chunk, inside, grid), inside.starts[kTarget], {}};
    for (const MapLoop& loop : inside.loops) {
      const auto [dim, step] = step_of(loop, kSource, grid);
      part.loops.push_back({loop.count, static_cast<int64_t>(dim), step, loop.strides[kTarget]});
    }
    std::ranges::stable_sort(part.loops, [](const MapPart::Loop& left, const MapPart::Loop& right) {
      if (left.step == 0 || right.step == 0) return left.step == 0 && right.step != 0;
      return left.dim != right.dim ? left.dim < right.dim : left.step > right.step;
    });
    parts.push_back(std::move(part));
  };
  for_each_in_chunks(box_of(map, box.offsets, box.sizes, memory_strides), sources, add);
  return parts;
}

std::vector<MapMove> find_moves(const TensorMap& map, const Box& box, std::span<const MapSource> sources) {
  std::vector<MapMove> moves;
  const Grid box_grid(box.sizes);
  std::vector<MapPiece> by_target;
  const auto add = [&](const MapPiece& inside, size_t position, const Chunk& chunk, const Grid& grid) {
    by_target.clear();
    align(inside, kTarget, box_grid, by_target);  // what is cut stays aligned to the source
    for (MapPiece& piece : by_target) {
      std::ranges::stable_sort(piece.loops, std::ranges::greater(),
                               [](const MapLoop& loop) { return loop.strides[kTarget]; });
      MapMove move{piece.source,
                   position,
                   {},
                   {coordinates_in(chunk, piece, grid), {}},
                   {box_grid.coordinates(piece.starts[kTarget]), {}}};
      for (const MapLoop& loop : piece.loops) {
        move.sizes.push_back(loop.count);
        move.src.steps.push_back(step_of(loop, kSource, grid));
        move.dst.steps.push_back(step_of(loop, kTarget, box_grid));
      }
      moves.push_back(std::move(move));
    }
  };
  for_each_in_chunks(box_of(map, box.offsets, box.sizes, row_major_strides(box.sizes)), sources, add);
  return moves;
}

std::vector<MapFill> find_fills(const TensorMap& map, const Box& box) {
  std::vector<MapFill> fills;
  const Grid grid(box.sizes);
  std::vector<MapPiece> by_target;
  for (const MapPiece& piece : box_of(map, box.offsets, box.sizes, row_major_strides(box.sizes))) {
    if (piece.source == kFill) align(piece, kTarget, grid, by_target);
  }
  for (const MapPiece& piece : by_target) {
    MapFill fill{piece.fill, {}, {grid.coordinates(piece.starts[kTarget]), {}}};
    for (const MapLoop& loop : piece.loops) {
      fill.sizes.push_back(loop.count);
      fill.dst.steps.push_back(step_of(loop, kTarget, grid));
    }
    fills.push_back(std::move(fill));
  }
  return fills;
}

std::vector<std::pair<int64_t, int64_t>> enumerate(const TensorMap& map) {
  std::vector<std::pair<int64_t, int64_t>> found(static_cast<size_t>(num_elements(map.shape)), {-1, 0});
  for (const MapPiece& piece : map.pieces) {
    walk(piece, [&](const std::array<int64_t, 2>& at) {
      found[static_cast<size_t>(at[kTarget])] = {piece.source, at[kSource]};
    });
  }
  return found;
}

}  // namespace torchtitan_ext::core
