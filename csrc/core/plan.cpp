#include "core/plan.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace torchtitan_ext::core {

std::vector<int64_t> assign_writers(std::span<const ReplicatedShard> shards, int64_t num_ranks) {
  std::vector<size_t> order(shards.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return shards[a].num_bytes > shards[b].num_bytes; });
  std::vector<int64_t> load_bytes(static_cast<size_t>(num_ranks), 0);
  std::vector<int64_t> writers(shards.size(), 0);
  for (const size_t index : order) {
    const ReplicatedShard& shard = shards[index];
    TTE_CHECK(!shard.ranks.empty(), "assign_writers", "shard ", index, " is held by no rank");
    for (const int64_t rank : shard.ranks) {
      TTE_CHECK(0 <= rank && rank < num_ranks, "assign_writers", "rank ", rank, " of shard ", index, " is outside [0, ",
                num_ranks, ")");
    }
    const int64_t writer = *std::min_element(shard.ranks.begin(), shard.ranks.end(),
                                             [&](int64_t a, int64_t b) { return load_bytes[a] < load_bytes[b]; });
    load_bytes[writer] = checked_add(load_bytes[writer], shard.num_bytes);
    writers[index] = writer;
  }
  return writers;
}

}  // namespace torchtitan_ext::core
