// The model of moves: which boxes of a tensor go from where to where.
//
// A *supply* is a box and the ranks that hold it, any of which can give it. A *demand* is a list of boxes that some ranks
// want, each of them all of these. The *flow* between them has a move for each part that a rank gets. Each rank gets
// each element that it wants once, from the best holder by `Loads`.
//
//   supplies  rows 0-3: ranks 0, 1    rows 4-7: rank 2      demand  rows 2-5: ranks 1, 3
//   moves     rows 2-3: 1 -> 1, 0 -> 3                      rows 4-5: 2 -> 1, 2 -> 3
//
// A demand may be one through a *map* (`tensor_map.h`): its tensor is made of others, each of which has supplies.
//
// Everything is a plain value: ranks and loads are arguments, and nothing here knows what a rank does with its moves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/boxes.h"
#include "core/chunk.h"
#include "core/loads.h"
#include "core/tensor_map.h"

namespace torchtitan_ext::core {

// A box, and who holds it. `chunks` has, per rank, the tensor of its own that the box is: 0 where it lies in the rank's one
// local tensor, else the position of the box among those that the rank states.
struct Supply {
  Chunk box;
  std::vector<int64_t> ranks;    // in increasing order
  std::vector<uint32_t> chunks;  // per rank
};

// Boxes of which no size is 0, and the ranks that want them; where they lie is worked out once for all of these.
struct Demand {
  std::vector<Chunk> boxes;
  std::vector<uint32_t> chunks;  // per box, as in `Supply`
  std::vector<int64_t> ranks;
};

// A part of a wanted box that one rank gets from one rank, maybe from itself.
struct Move {
  int64_t src_rank = 0;
  int64_t dst_rank = 0;
  uint32_t source = 0;  // of a map the number of the source
  uint32_t src_chunk = 0;
  uint32_t dst_chunk = 0;
  Sizes sizes;
  BoxView src;  // in the local tensor of each
  BoxView dst;
};

// A part of a wanted box that a map fills with one value, on all ranks of a demand.
struct Filled {
  size_t demand = 0;
  uint32_t chunk = 0;
  MapFill fill;  // in the local tensor
};

struct Flow {
  std::vector<Move> moves;  // by demand, rank that wants, wanted box, supply
  std::vector<Filled> filled;
};

// The supplies hold each wanted element once. What a rank gets from another one counts for the load of the latter.
// Args:
//   num_bytes: of an element, in all tensors that move alike.
Flow plan_flow(std::span<const Supply> supplies, std::span<const Demand> demands, int64_t num_bytes, Loads& loads);

// A source of a map.
struct MappedSupplies {
  Sizes shape;
  std::vector<Supply> supplies;
};

// The same for a tensor that a map makes of others.
Flow plan_mapped_flow(const TensorMap& map, std::span<const MappedSupplies> sources, std::span<const Demand> demands,
                      int64_t num_bytes, Loads& loads);

// The supplies without some ranks, which are in increasing order; those that nobody else holds are gone.
std::vector<Supply> without_ranks(std::vector<Supply> supplies, std::span<const int64_t> ranks);

}  // namespace torchtitan_ext::core
