#include "core/aliasing.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr int64_t kMaxRuns = int64_t{1} << 22;  // 100 MB of intervals: a rare question is not worth more

struct Piece {
  Extent extent;
  int64_t tensor = 0;
};

bool begins_first(const Piece& left, const Piece& right) { return left.extent.begin < right.extent.begin; }

// Two pieces of different tensors that meet, in pieces sorted by begin; {-1, -1} if there are none.
BoxPair find_meeting(std::span<const Piece> pieces) {
  const Piece* farthest = nullptr;
  for (const Piece& piece : pieces) {
    if (farthest != nullptr && piece.extent.begin < farthest->extent.end && piece.tensor != farthest->tensor) {
      return {std::min(piece.tensor, farthest->tensor), std::max(piece.tensor, farthest->tensor)};
    }
    if (farthest == nullptr || piece.extent.end > farthest->extent.end) farthest = &piece;
  }
  return {};
}

// The pieces are tensors whose extents form one connected group. Compares their runs.
BoxPair find_meeting_runs(std::span<const Piece> group, std::span<const Memory> tensors) {
  std::vector<Piece> pieces;
  int64_t num_runs = 0;
  for (const Piece& piece : group) {
    const Memory& memory = tensors[piece.tensor];
    const BoxSide side{static_cast<int64_t>(memory.address), memory.strides};
    RunList list;
    list.append_box(memory.sizes, side, side, memory.item_bytes);
    for (const RunNest& nest : list.nests()) num_runs = checked_add(num_runs, nest.num_runs);
    if (num_runs > kMaxRuns) return {group[0].tensor, group[1].tensor};
    for (const Run& run : list.enumerate()) {
      pieces.push_back({{run.dst_bytes, run.dst_bytes + run.num_bytes}, piece.tensor});
    }
  }
  std::sort(pieces.begin(), pieces.end(), begins_first);
  return find_meeting(pieces);
}

}  // namespace

bool may_overlap_itself(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return false;
    if (sizes[dim] > 1) dims.emplace_back(strides[dim], sizes[dim]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // largest offset of the dims so far: the next one must step over it
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach = checked_add(reach, checked_mul(stride, size - 1));
  }
  return false;
}

Extent extent_of(const Memory& memory) {
  int64_t span = 1;
  for (size_t dim = 0; dim < memory.sizes.size(); ++dim) {
    if (memory.sizes[dim] == 0) return {};
    span = checked_add(span, checked_mul(memory.sizes[dim] - 1, memory.strides[dim]));
  }
  const int64_t begin = static_cast<int64_t>(memory.address);
  return {begin, checked_add(begin, checked_mul(span, memory.item_bytes))};
}

BoxPair find_shared_memory(std::span<const Memory> tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const Memory& memory : tensors) {
    const Extent extent = extent_of(memory);
    const int64_t tensor = &memory - tensors.data();
    if (extent.length() > 0) pieces.push_back({extent, tensor});
  }
  if (!std::is_sorted(pieces.begin(), pieces.end(), begins_first)) {
    std::sort(pieces.begin(), pieces.end(), begins_first);
  }
  for (size_t first = 0; first < pieces.size();) {
    size_t last = first + 1;
    int64_t end = pieces[first].extent.end;
    for (; last < pieces.size() && pieces[last].extent.begin < end; ++last) {
      end = std::max(end, pieces[last].extent.end);
    }
    if (last - first > 1) {
      const BoxPair pair = find_meeting_runs(std::span<const Piece>(pieces).subspan(first, last - first), tensors);
      if (pair.first >= 0) return pair;
    }
    first = last;
  }
  return {};
}

}  // namespace torchtitan_ext::core
