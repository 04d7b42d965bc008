// From global shape, mesh shape, sharding order and mesh coordinate to the chunks a rank holds, as pure functions.
//
// Definition. A layout applies *steps*, one per sharding mesh axis, in the order in which the axes were really sharded.
// A step (axis, dim, split_factor) takes what the rank holds along `dim` so far, a list of intervals seen as one
// sequence, and
//   1. cuts the sequence into `split_factor` parts as torch.chunk does (parts of ceil(n / k), the last may be empty),
//   2. cuts every part into mesh_shape[axis] pieces in the same way,
//   3. keeps piece coordinate[axis] of every part, joined in order.
// With split_factor 1 this is torch.chunk; with a greater one it is what DTensor's _StridedShard does.
//
// Worked example: 9 rows, mesh (dp 4, tp 2), placements [_StridedShard(0, split_factor=2), Shard(0)].
//   kNested      tp, then dp, both plain (FSDP2 over TP): tp 0 holds rows 0-4, tp 1 rows 5-8; dp cuts each in 4
//                dp 0: 0-1 | 5      dp 1: 2-3 | 6      dp 2: 4 | 7      dp 3: - | 8
//   kLeftToRight dp with split factor 2, then tp (DTensor's arithmetic): dp 0 holds rows 0-1 and 5, cut in 2
//                dp 0: 0-1 | 5      dp 1: 2-3 | 6      dp 2: 4 | 7      dp 3: 8 | -
// The placements are the same, the ranks at dp 3 differ: placements alone do not tell, so `resolve_steps` decides
// between readings by what the local tensors of all ranks really are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

struct ShardStep {
  int64_t axis = 0;
  int64_t dim = 0;
  int64_t split_factor = 1;

  bool operator==(const ShardStep&) const = default;
};

struct ShardLayout {
  Sizes global_shape;
  Sizes mesh_shape;
  std::vector<ShardStep> steps;  // axes that no step names replicate
};

// A DTensor placement of one mesh axis: kReplicated as dim for Replicate, split_factor 1 for Shard.
struct Placement {
  static constexpr int64_t kReplicated = -1;
  int64_t dim = kReplicated;
  int64_t split_factor = 1;
};

enum class Reading {
  kLeftToRight,  // DTensor: axes from left to right, every split factor taken literally
  kNested,       // FSDP2: a split factor that axes further right pay for means "after those axes", by plain torch.chunk
};

// The steps that a reading of the placements gives. `placements` has one entry per mesh axis.
std::vector<ShardStep> read_placements(std::span<const Placement> placements, std::span<const int64_t> mesh_shape,
                                       Reading reading);

// The sharding orders that placements leave open, without repeats, the nested reading first; only the stated one where an
// order is stated.
std::vector<std::vector<ShardStep>> candidate_steps(std::span<const Placement> placements,
                                                    std::span<const int64_t> mesh_shape,
                                                    const std::vector<ShardStep>* stated);

// Throws std::invalid_argument for axes or dims out of range, an axis used twice, or sizes that make no sense.
void check_layout(const ShardLayout& layout);

// What the rank at `coordinate` holds. Cost depends on the number of chunks, never on the length of a dim.
Shard shard_at(const ShardLayout& layout, std::span<const int64_t> coordinate);

// The shards of all ranks, in row-major order of the mesh.
std::vector<Shard> all_shards(const ShardLayout& layout);

// What one rank reported: its coordinate and the shape of its local tensor.
struct Observation {
  Sizes coordinate;
  Sizes local_sizes;
};

struct Resolution {
  enum class Outcome {
    kDecided,  // all candidates that fit the observations give every observed rank the same chunks
    kInDoubt,  // candidates[first] and candidates[second] both fit and differ at `coordinate`
    kNoMatch,  // no candidate fits; candidates[first] fails at `coordinate`
  };
  Outcome outcome = Outcome::kNoMatch;
  size_t first = 0;  // the candidate decided on
  size_t second = 0;
  Sizes coordinate;
};

// Decides between candidate readings by the local shapes that ranks really have. A local tensor without elements fits
// an empty shard whatever its shape.
Resolution resolve_steps(const Sizes& global_shape, const Sizes& mesh_shape,
                         std::span<const std::vector<ShardStep>> candidates, std::span<const Observation> observations);

}  // namespace torchtitan_ext::core
