// Where the parts of a tensor truly are, of which stock noted wrong places.
//
// Stock notes where DTensor's arithmetic, left to right, puts a rank's part, and how large that makes it; FSDP2 cuts in
// the other order (https://github.com/pytorch/pytorch/issues/168134), and the record has what the rank held. Example: 7
// rows on dp 3 x tp 2, whose last two ranks hold no row, and row 6:
//
//   rank (2, 0)   noted: row 6      record: no row
//   rank (2, 1)   noted: no row     record: one row
//
// So the placements are those whose reading from left to right gives what was noted, and whose nested reading gives the
// sizes of the records; by the latter each record has its true place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// What one rank, a row-major position of the mesh, wrote of a tensor.
struct NotedPart {
  int64_t rank = 0;
  Sizes offsets;  // as noted; of an empty part they mean nothing
  Sizes sizes;    // as noted
  Sizes written;  // the sizes in its record
};

// A box of the tensor, the lowest rank that held it, and the part that has it: -1 where none has.
struct TruePlace {
  Sizes offsets;
  Sizes sizes;
  int64_t rank = 0;
  int64_t part = -1;
};

struct TruePlaces {
  size_t num_ways = 0;            // to cut the tensor that explain all parts, and differ for some rank
  std::vector<TruePlace> places;  // where there is one way: the boxes of all ranks, in order of their offsets
};

// `choices` has for each mesh axis the dims that it may cut, Placement::kReplicated among them where it may replicate.
// Ways in which a rank holds several boxes explain nothing: FSDP2 makes none such.
// Throws std::invalid_argument for dims, ranks or meshes that cannot be.
TruePlaces find_true_places(const Sizes& shape, const Sizes& mesh_shape, std::span<const std::vector<int64_t>> choices,
                            std::span<const NotedPart> parts);

}  // namespace torchtitan_ext::core
