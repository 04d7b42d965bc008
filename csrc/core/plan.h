// What each rank writes: which replica writes a shard.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torchtitan_ext::core {

// A shard that several ranks hold alike.
struct ReplicatedShard {
  std::vector<int64_t> ranks;  // in increasing order, not empty
  int64_t num_bytes = 0;
};

// For every shard the rank that writes it: largest shards first, each to the holder with the fewest bytes so far (the
// lowest rank of several). Deterministic.
std::vector<int64_t> assign_writers(std::span<const ReplicatedShard> shards, int64_t num_ranks);

}  // namespace torchtitan_ext::core
