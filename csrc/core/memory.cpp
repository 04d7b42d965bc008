#include "core/memory.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr int64_t kMaxRuns = int64_t{1} << 22;   // 100 MB of intervals: a rare question is not worth more
constexpr int64_t kMaxSteps = int64_t{1} << 24;  // a tenth of a second

using Pair = std::optional<std::pair<size_t, size_t>>;

struct Piece {
  Extent extent;
  size_t tensor = 0;
};

bool begins_first(const Piece& left, const Piece& right) { return left.extent.begin < right.extent.begin; }

// Two pieces of different tensors that meet, in pieces sorted by begin.
Pair find_meeting(std::span<const Piece> pieces) {
  const Piece* farthest = nullptr;
  for (const Piece& piece : pieces) {
    if (farthest != nullptr && piece.extent.begin < farthest->extent.end && piece.tensor != farthest->tensor) {
      return std::minmax(piece.tensor, farthest->tensor);
    }
    if (farthest == nullptr || piece.extent.end > farthest->extent.end) farthest = &piece;
  }
  return std::nullopt;
}

RunList runs_of(const Memory& memory) {
  const BoxSide side{static_cast<int64_t>(memory.address), memory.strides};
  RunList runs;
  runs.append_box(memory.sizes, side, side, memory.item_bytes);
  return runs;
}

// Whether runs of two nests meet. The distance from a run of the first to one of the second is a sum: a multiple of each
// stride, within bounds given by the counts of its loops, added to the distance of the nests. The runs meet where it is
// in (-second's run, first's run). Largest stride first, few multiples can still bring the sum there, mostly one or two;
// and none can where the interval holds no number that differs from the sum by a multiple of the strides' common divisor.
class Meeting {
 public:
  Meeting(const RunNest& left, std::span<const Loop> left_loops, const RunNest& right,
          std::span<const Loop> right_loops)
      : lowest_(1 - right.run_bytes), highest_(left.run_bytes - 1), distance_(right.dst_bytes - left.dst_bytes) {
    for (const Loop& loop : left_loops) add({loop.dst_stride_bytes, 1 - loop.count, 0});
    for (const Loop& loop : right_loops) add({loop.dst_stride_bytes, 0, loop.count - 1});
    std::ranges::sort(terms_, [](const Term& one, const Term& other) { return one.stride > other.stride; });
    for (size_t index = terms_.size(); index-- > 0;) {
      Term& term = terms_[index];
      const Term behind = index + 1 < terms_.size() ? terms_[index + 1] : Term{};
      term.divisor = std::gcd(term.stride, behind.divisor);
      term.least = behind.least + term.first * term.stride;
      term.most = behind.most + term.last * term.stride;
    }
  }

  // True where it takes more than `num_steps`, which are counted down.
  bool may_be(int64_t& num_steps) const { return reaches(distance_, 0, num_steps); }

 private:
  // Multiples first to last of the stride; `least`, `most` and `divisor` are of this term and all behind it.
  struct Term {
    int64_t stride = 0, first = 0, last = 0;
    int64_t least = 0, most = 0, divisor = 0;
  };

  void add(const Term& term) {
    if (term.stride == 0) return;
    const auto same = std::ranges::find(terms_, term.stride, &Term::stride);
    if (same == terms_.end()) {
      terms_.push_back(term);
    } else {
      same->first += term.first;
      same->last += term.last;
    }
  }

  bool reaches(int64_t sum, size_t index, int64_t& num_steps) const {
    if (--num_steps < 0) return true;
    if (index == terms_.size()) return lowest_ <= sum && sum <= highest_;
    const Term& term = terms_[index];
    if (sum + term.most < lowest_ || sum + term.least > highest_) return false;
    const int64_t past_lowest = ((sum - lowest_) % term.divisor + term.divisor) % term.divisor;
    if (past_lowest > highest_ - lowest_) return false;
    const Term behind = index + 1 < terms_.size() ? terms_[index + 1] : Term{};
    const int64_t first = std::max(term.first, floor_div(lowest_ - behind.most - sum + term.stride - 1, term.stride));
    const int64_t last = std::min(term.last, floor_div(highest_ - behind.least - sum, term.stride));
    for (int64_t multiple = first; multiple <= last; ++multiple) {
      if (reaches(sum + multiple * term.stride, index + 1, num_steps)) return true;
    }
    return false;
  }

  static int64_t floor_div(int64_t number, int64_t by) { return number / by - (number % by < 0); }

  int64_t lowest_, highest_, distance_;
  std::vector<Term> terms_;
};

// Pair by pair, of pieces sorted by begin.
Pair find_meeting_pair(std::span<const Piece> group, std::span<const RunList> runs) {
  int64_t num_steps = kMaxSteps;
  for (size_t left = 0; left < group.size(); ++left) {
    for (size_t right = left + 1; right < group.size(); ++right) {
      if (group[right].extent.begin >= group[left].extent.end) break;
      for (const RunNest& one : runs[left].nests()) {
        for (const RunNest& other : runs[right].nests()) {
          const Meeting meeting(one, runs[left].loops_of(one), other, runs[right].loops_of(other));
          if (meeting.may_be(num_steps)) return std::minmax(group[left].tensor, group[right].tensor);
        }
      }
    }
  }
  return std::nullopt;
}

// The pieces are tensors whose extents form one connected group, sorted by begin. Compares their runs.
Pair find_meeting_runs(std::span<const Piece> group, std::span<const Memory> tensors) {
  std::vector<RunList> runs;
  int64_t num_runs = 0;
  for (const Piece& piece : group) {
    runs.push_back(runs_of(tensors[piece.tensor]));
    for (const RunNest& nest : runs.back().nests()) num_runs = checked_add(num_runs, nest.num_runs);
  }
  if (num_runs > kMaxRuns) return find_meeting_pair(group, runs);
  std::vector<Piece> pieces;
  for (size_t index = 0; index < group.size(); ++index) {
    for (const Run& run : runs[index].enumerate()) {
      pieces.push_back({{run.dst_bytes, run.dst_bytes + run.num_bytes}, group[index].tensor});
    }
  }
  std::sort(pieces.begin(), pieces.end(), begins_first);
  return find_meeting(pieces);
}

void append_boxes_of_range(std::vector<RangeBox>& boxes, std::span<const int64_t> sizes,
                           std::span<const int64_t> strides, size_t dim, int64_t offset, int64_t first, int64_t last) {
  if (first == last) return;
  if (dim == sizes.size()) {
    boxes.push_back({offset, dim, 1, 1});
    return;
  }
  const auto append_inner = [&](int64_t row, int64_t inner_first, int64_t inner_last) {
    append_boxes_of_range(boxes, sizes, strides, dim + 1, offset + row * strides[dim], inner_first, inner_last);
  };
  if (sizes[dim] == 1) {  // whose stride may be any number
    append_boxes_of_range(boxes, sizes, strides, dim + 1, offset, first, last);
    return;
  }
  int64_t inner = 1;
  for (size_t index = dim + 1; index < sizes.size(); ++index) inner *= sizes[index];
  const int64_t first_row = first / inner, last_row = last / inner;
  if (first_row == last_row) return append_inner(first_row, first % inner, last % inner);
  int64_t row = first_row;
  if (first % inner != 0) {
    append_inner(row, first % inner, inner);
    ++row;
  }
  if (row < last_row) boxes.push_back({offset + row * strides[dim], dim, last_row - row, (last_row - row) * inner});
  append_inner(last_row, 0, last % inner);
}

}  // namespace

Extent extent_of(const Memory& memory) {
  int64_t span = 1;
  for (size_t dim = 0; dim < memory.sizes.size(); ++dim) {
    if (memory.sizes[dim] == 0) return {};
    span = checked_add(span, checked_mul(memory.sizes[dim] - 1, memory.strides[dim]));
  }
  const int64_t begin = static_cast<int64_t>(memory.address);
  return {begin, checked_add(begin, checked_mul(span, memory.item_bytes))};
}

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

Pair find_shared_memory(std::span<const Memory> tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const Extent extent = extent_of(tensors[tensor]);
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
      const Pair pair = find_meeting_runs(std::span<const Piece>(pieces).subspan(first, last - first), tensors);
      if (pair) return pair;
    }
    first = last;
  }
  return std::nullopt;
}

Pair find_shared_memory(std::span<const Memory> written, std::span<const Memory> read) {
  // Extents first: sorted, with the farthest end so far beside each, so that every read tensor finds those that it
  // meets.
  std::vector<Piece> pieces;
  for (size_t tensor = 0; tensor < written.size(); ++tensor) {
    const Extent extent = extent_of(written[tensor]);
    if (extent.length() > 0) pieces.push_back({extent, tensor});
  }
  if (!std::is_sorted(pieces.begin(), pieces.end(), begins_first)) {
    std::sort(pieces.begin(), pieces.end(), begins_first);
  }
  std::vector<int64_t> farthest_end;
  for (const Piece& piece : pieces) {
    farthest_end.push_back(std::max(piece.extent.end, farthest_end.empty() ? 0 : farthest_end.back()));
  }
  for (size_t tensor = 0; tensor < read.size(); ++tensor) {
    const Extent extent = extent_of(read[tensor]);
    if (extent.length() == 0) continue;
    const auto past = std::partition_point(pieces.begin(), pieces.end(),
                                           [&](const Piece& piece) { return piece.extent.begin < extent.end; });
    for (size_t at = past - pieces.begin(); at-- > 0 && farthest_end[at] > extent.begin;) {
      if (pieces[at].extent.end <= extent.begin) continue;
      const Memory both[] = {read[tensor], written[pieces[at].tensor]};
      if (find_shared_memory(both)) return {{pieces[at].tensor, tensor}};
    }
  }
  return std::nullopt;
}

std::vector<RangeBox> boxes_of_range(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t first,
                                     int64_t last) {
  std::vector<RangeBox> boxes;
  append_boxes_of_range(boxes, sizes, strides, 0, 0, first, last);
  return boxes;
}

void append_range(RunList& runs, const Memory& tensor, int64_t buffer_address, int64_t first, int64_t last,
                  bool to_buffer) {
  std::vector<int64_t> sizes, contiguous;
  for (const RangeBox& box : boxes_of_range(tensor.sizes, tensor.strides, first, last)) {
    sizes.assign(tensor.sizes.begin() + box.dim, tensor.sizes.end());
    if (!sizes.empty()) sizes[0] = box.num_rows;
    contiguous.resize(sizes.size());
    int64_t stride = 1;
    for (size_t dim = sizes.size(); dim-- > 0;) {
      contiguous[dim] = stride;
      stride *= sizes[dim];
    }
    const int64_t address = static_cast<int64_t>(tensor.address) + box.offset * tensor.item_bytes;
    const BoxSide there{address, tensor.strides.subspan(box.dim)}, here{buffer_address, contiguous};
    runs.append_box(sizes, to_buffer ? there : here, to_buffer ? here : there, tensor.item_bytes);
    buffer_address += box.num_elements * tensor.item_bytes;
  }
}

}  // namespace torchtitan_ext::core
