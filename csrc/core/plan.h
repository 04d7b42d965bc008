// What each rank writes and reads: which replica writes a shard, and which parts of saved chunks make up wanted ones.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// A part of a saved chunk that a wanted chunk needs.
struct Overlap {
  size_t wanted = 0;    // index into the wanted chunks
  size_t saved = 0;     // index into the saved chunks
  Sizes saved_offsets;  // inside the saved chunk
  Sizes local_offsets;  // inside the wanted shard's local tensor
  Sizes sizes;

  bool operator==(const Overlap&) const = default;
};

// All non-empty intersections, ordered by wanted chunk, then saved chunk. Both sides are swept along the dim in which
// the saved chunks begin at the most places, so the cost is near linear in chunks plus overlaps.
std::vector<Overlap> find_overlaps(std::span<const Chunk> wanted, std::span<const Chunk> saved);

// A shard that several ranks hold alike.
struct ReplicatedShard {
  std::vector<int64_t> ranks;  // in increasing order, not empty
  int64_t num_bytes = 0;
};

// For every shard the rank that writes it: largest shards first, each to the holder with the fewest bytes so far (the
// lowest rank of several). Deterministic.
std::vector<int64_t> assign_writers(std::span<const ReplicatedShard> shards, int64_t num_ranks);

}  // namespace torchtitan_ext::core
