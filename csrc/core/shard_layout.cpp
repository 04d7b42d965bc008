#include "core/shard_layout.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

int64_t ceil_div(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

// Part `index` of `count` parts of a sequence of `length`, as torch.chunk cuts it.
Interval chunk_of(int64_t length, int64_t count, int64_t index) {
  const int64_t part = ceil_div(length, count);
  // index * part can pass int64 only where the part begins beyond the end.
  const int64_t begin = part == 0 || index >= ceil_div(length, part) ? length : index * part;
  return {begin, length - begin < part ? length : begin + part};
}

// A list of intervals seen as one sequence, and the position up to which `take` has walked.
class Sequence {
 public:
  explicit Sequence(const std::vector<Interval>& intervals) : intervals_(intervals) {}

  // Appends what lies at positions [part.begin, part.end) to `taken`. Parts come in increasing order.
  void take(Interval part, std::vector<Interval>& taken) {
    while (part.begin < part.end) {
      const Interval& current = intervals_[next_];
      const int64_t current_end = position_ + current.length();
      if (current_end <= part.begin) {
        position_ = current_end;
        ++next_;
        continue;
      }
      const int64_t end = std::min(part.end, current_end);
      append(taken, {current.begin + (part.begin - position_), current.begin + (end - position_)});
      part.begin = end;
    }
  }

 private:
  static void append(std::vector<Interval>& taken, Interval piece) {
    if (!taken.empty() && taken.back().end == piece.begin) {
      taken.back().end = piece.end;
    } else {
      taken.push_back(piece);
    }
  }

  const std::vector<Interval>& intervals_;
  size_t next_ = 0;
  int64_t position_ = 0;
};

int64_t total_length(const std::vector<Interval>& intervals) {
  int64_t total = 0;
  for (const Interval& interval : intervals) total += interval.length();
  return total;
}

std::vector<Interval> apply_step(const std::vector<Interval>& held, int64_t split_factor, int64_t mesh_size,
                                 int64_t index) {
  std::vector<Interval> taken;
  const int64_t length = total_length(held);
  if (length == 0) return taken;
  const int64_t num_parts = ceil_div(length, ceil_div(length, split_factor));  // the parts behind are empty
  Sequence sequence(held);
  for (int64_t part_index = 0; part_index < num_parts; ++part_index) {
    const Interval part = chunk_of(length, split_factor, part_index);
    const Interval piece = chunk_of(part.length(), mesh_size, index);
    sequence.take({part.begin + piece.begin, part.begin + piece.end}, taken);
  }
  return taken;
}

// The intervals of every dim that the rank at `coordinate` holds.
std::vector<std::vector<Interval>> held_intervals(const ShardLayout& layout, std::span<const int64_t> coordinate) {
  std::vector<std::vector<Interval>> held(layout.global_shape.size());
  for (size_t dim = 0; dim < held.size(); ++dim) {
    if (layout.global_shape[dim] > 0) held[dim].push_back({0, layout.global_shape[dim]});
  }
  for (const ShardStep& step : layout.steps) {
    auto& intervals = held[step.dim];
    intervals = apply_step(intervals, step.split_factor, layout.mesh_shape[step.axis], coordinate[step.axis]);
  }
  return held;
}

void check_coordinate(const ShardLayout& layout, std::span<const int64_t> coordinate) {
  TTE_CHECK(coordinate.size() == layout.mesh_shape.size(), "shard_at", "coordinate has ", coordinate.size(),
            " axes, expected ", layout.mesh_shape.size(), " as the mesh");
  for (size_t axis = 0; axis < coordinate.size(); ++axis) {
    TTE_CHECK(0 <= coordinate[axis] && coordinate[axis] < layout.mesh_shape[axis], "shard_at", "coordinate ",
              coordinate[axis], " on mesh axis ", axis, " is outside [0, ", layout.mesh_shape[axis], ")");
  }
}

// The row-major product of the intervals of all dims.
Shard shard_from_intervals(const std::vector<std::vector<Interval>>& held) {
  Shard shard;
  size_t num_chunks = 1;
  for (const auto& intervals : held) {
    shard.sizes.push_back(total_length(intervals));
    num_chunks =
        static_cast<size_t>(checked_mul(static_cast<int64_t>(num_chunks), static_cast<int64_t>(intervals.size())));
  }
  shard.chunks.reserve(num_chunks);
  const size_t num_dims = held.size();
  std::vector<size_t> which(num_dims, 0);
  Sizes local_offsets(num_dims, 0);
  for (size_t index = 0; index < num_chunks; ++index) {
    Chunk& chunk = shard.chunks.emplace_back();
    chunk.local_offsets = local_offsets;
    for (size_t dim = 0; dim < num_dims; ++dim) {
      const Interval& interval = held[dim][which[dim]];
      chunk.offsets.push_back(interval.begin);
      chunk.sizes.push_back(interval.length());
    }
    for (size_t dim = num_dims; dim-- > 0;) {
      local_offsets[dim] += held[dim][which[dim]].length();
      if (++which[dim] < held[dim].size()) break;
      which[dim] = 0;
      local_offsets[dim] = 0;
    }
  }
  return shard;
}

bool fits(const std::vector<std::vector<Interval>>& held, const Sizes& local_sizes) {
  bool equal = held.size() == local_sizes.size();
  bool held_is_empty = false;
  bool local_is_empty = std::find(local_sizes.begin(), local_sizes.end(), 0) != local_sizes.end();
  for (size_t dim = 0; dim < held.size(); ++dim) {
    const int64_t length = total_length(held[dim]);
    held_is_empty |= length == 0;
    equal = equal && length == local_sizes[dim];
  }
  return equal || (held_is_empty && local_is_empty);
}

bool same_elements(const std::vector<std::vector<Interval>>& left, const std::vector<std::vector<Interval>>& right) {
  const auto is_empty = [](const auto& held) {
    return std::any_of(held.begin(), held.end(), [](const auto& intervals) { return intervals.empty(); });
  };
  return left == right || (is_empty(left) && is_empty(right));
}

std::vector<ShardStep> nested_steps(std::span<const Placement> placements, std::span<const int64_t> mesh_shape) {
  // From right to left, each axis is put behind as many of the axes to its right (of the same dim, in the order found
  // so far) as its split factor pays for. The same inversion as DTensorSpec._maybe_convert_StridedShard_to_shard_order,
  // except that a factor nothing pays for stays: such an axis really is strided (interleaved fused QKV, SwiGLU).
  std::vector<ShardStep> steps;
  for (size_t axis = placements.size(); axis-- > 0;) {
    const Placement& placement = placements[axis];
    if (placement.dim == Placement::kReplicated) continue;
    int64_t paid = 1;
    size_t position = 0;
    for (size_t behind = 0; behind < steps.size() && paid < placement.split_factor; ++behind) {
      if (steps[behind].dim != placement.dim) continue;
      paid *= mesh_shape[steps[behind].axis];
      position = behind + 1;
    }
    const bool is_paid = paid == placement.split_factor;
    steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(is_paid ? position : 0),
                 {static_cast<int64_t>(axis), placement.dim, is_paid ? 1 : placement.split_factor});
  }
  return steps;
}

}  // namespace

std::vector<ShardStep> read_placements(std::span<const Placement> placements, std::span<const int64_t> mesh_shape,
                                       Reading reading) {
  TTE_CHECK(placements.size() == mesh_shape.size(), "read_placements", placements.size(), " placements for a mesh of ",
            mesh_shape.size(), " axes; pass one placement per axis");
  if (reading == Reading::kNested) return nested_steps(placements, mesh_shape);
  std::vector<ShardStep> steps;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].dim == Placement::kReplicated) continue;
    steps.push_back({static_cast<int64_t>(axis), placements[axis].dim, placements[axis].split_factor});
  }
  return steps;
}

std::vector<std::vector<ShardStep>> candidate_steps(std::span<const Placement> placements,
                                                    std::span<const int64_t> mesh_shape,
                                                    const std::vector<ShardStep>* stated) {
  if (stated != nullptr) return {*stated};
  std::vector<std::vector<ShardStep>> candidates = {read_placements(placements, mesh_shape, Reading::kNested)};
  std::vector<ShardStep> other = read_placements(placements, mesh_shape, Reading::kLeftToRight);
  if (other != candidates[0]) candidates.push_back(std::move(other));
  return candidates;
}

void check_layout(const ShardLayout& layout) {
  constexpr const char* kWhere = "layout";
  for (const int64_t size : layout.global_shape) {
    TTE_CHECK(size >= 0, kWhere, "global shape has the negative size ", size);
  }
  num_elements(layout.global_shape);
  for (const int64_t size : layout.mesh_shape) {
    TTE_CHECK(size > 0, kWhere, "mesh shape has size ", size, "; every mesh axis needs at least one rank");
  }
  std::vector<bool> used(layout.mesh_shape.size(), false);
  for (const ShardStep& step : layout.steps) {
    TTE_CHECK(0 <= step.axis && step.axis < static_cast<int64_t>(layout.mesh_shape.size()), kWhere, "mesh axis ",
              step.axis, " is outside the mesh of ", layout.mesh_shape.size(), " axes");
    TTE_CHECK(!used[step.axis], kWhere, "mesh axis ", step.axis, " shards twice; an axis can shard one dim only");
    used[step.axis] = true;
    TTE_CHECK(0 <= step.dim && step.dim < static_cast<int64_t>(layout.global_shape.size()), kWhere, "dim ", step.dim,
              " is outside a tensor of ", layout.global_shape.size(), " dims");
    TTE_CHECK(step.split_factor > 0, kWhere, "split factor ", step.split_factor, " of mesh axis ", step.axis,
              " is not positive");
  }
}

Shard shard_at(const ShardLayout& layout, std::span<const int64_t> coordinate) {
  check_layout(layout);
  check_coordinate(layout, coordinate);
  return shard_from_intervals(held_intervals(layout, coordinate));
}

std::vector<Shard> all_shards(const ShardLayout& layout) {
  check_layout(layout);
  const int64_t num_ranks = num_elements(layout.mesh_shape);
  std::vector<Shard> shards;
  shards.reserve(static_cast<size_t>(num_ranks));
  Sizes coordinate(layout.mesh_shape.size(), 0);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    shards.push_back(shard_from_intervals(held_intervals(layout, coordinate)));
    for (size_t axis = coordinate.size(); axis-- > 0;) {
      if (++coordinate[axis] < layout.mesh_shape[axis]) break;
      coordinate[axis] = 0;
    }
  }
  return shards;
}

Resolution resolve_steps(const Sizes& global_shape, const Sizes& mesh_shape,
                         std::span<const std::vector<ShardStep>> candidates,
                         std::span<const Observation> observations) {
  TTE_CHECK(!candidates.empty(), "resolve_steps", "no candidate reading; pass at least one");
  Resolution resolution;
  std::vector<ShardLayout> layouts;  // of the candidates that fit
  std::vector<size_t> fitting;
  for (size_t index = 0; index < candidates.size(); ++index) {
    const ShardLayout layout{global_shape, mesh_shape, candidates[index]};
    check_layout(layout);
    const auto misfit = std::find_if(observations.begin(), observations.end(), [&](const Observation& seen) {
      check_coordinate(layout, seen.coordinate);
      return !fits(held_intervals(layout, seen.coordinate), seen.local_sizes);
    });
    if (misfit == observations.end()) {
      layouts.push_back(layout);
      fitting.push_back(index);
    } else if (resolution.coordinate.empty()) {
      resolution.first = index;
      resolution.coordinate = misfit->coordinate;
    }
  }
  if (fitting.empty()) return resolution;
  for (size_t other = 1; other < fitting.size(); ++other) {
    for (const Observation& seen : observations) {
      const auto held = held_intervals(layouts[0], seen.coordinate);
      if (same_elements(held, held_intervals(layouts[other], seen.coordinate))) continue;
      return {Resolution::Outcome::kInDoubt, fitting[0], fitting[other], seen.coordinate};
    }
  }
  return {Resolution::Outcome::kDecided, fitting[0], fitting[0], {}};
}

}  // namespace torchtitan_ext::core
