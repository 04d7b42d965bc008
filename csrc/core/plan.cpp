#include "core/plan.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// The dim in which `chunks` begin at the most different places; 0 where all begin alike.
size_t sweep_dim(std::span<const Chunk> chunks) {
  size_t best_dim = 0;
  size_t best_count = 1;
  std::vector<int64_t> begins(chunks.size());
  for (size_t dim = 0; dim < chunks[0].offsets.size(); ++dim) {
    for (size_t index = 0; index < chunks.size(); ++index) begins[index] = chunks[index].offsets[dim];
    std::sort(begins.begin(), begins.end());
    const size_t count = static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (count > best_count) {
      best_dim = dim;
      best_count = count;
    }
  }
  return best_dim;
}

bool intersect(const Chunk& wanted, const Chunk& saved, Overlap& overlap) {
  const size_t num_dims = wanted.offsets.size();
  overlap.saved_offsets.resize(num_dims);
  overlap.local_offsets.resize(num_dims);
  overlap.sizes.resize(num_dims);
  for (size_t dim = 0; dim < num_dims; ++dim) {
    const int64_t begin = std::max(wanted.offsets[dim], saved.offsets[dim]);
    const int64_t end = std::min(wanted.offsets[dim] + wanted.sizes[dim], saved.offsets[dim] + saved.sizes[dim]);
    if (begin >= end) return false;
    overlap.saved_offsets[dim] = begin - saved.offsets[dim];
    overlap.local_offsets[dim] = wanted.local_offsets[dim] + (begin - wanted.offsets[dim]);
    overlap.sizes[dim] = end - begin;
  }
  return true;
}

}  // namespace

std::vector<Overlap> find_overlaps(std::span<const Chunk> wanted, std::span<const Chunk> saved) {
  std::vector<Overlap> overlaps;
  if (wanted.empty() || saved.empty()) return overlaps;
  const size_t num_dims = saved[0].offsets.size();
  for (const auto side : {wanted, saved}) {
    for (const Chunk& chunk : side) {
      TTE_CHECK(chunk.offsets.size() == num_dims && chunk.sizes.size() == num_dims, "find_overlaps", "a chunk has ",
                chunk.offsets.size(), " dims, expected ", num_dims);
    }
  }
  const size_t dim = num_dims == 0 ? 0 : sweep_dim(saved);
  const auto begin_of = [&](size_t index) { return num_dims == 0 ? 0 : saved[index].offsets[dim]; };

  std::vector<size_t> order(saved.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begin_of(a) < begin_of(b); });
  // furthest_end[i]: where the furthest of the first i + 1 saved chunks ends. It only grows, so the first chunk that
  // can reach a wanted chunk is found by bisection.
  Sizes furthest_end(saved.size());
  int64_t furthest = 0;
  for (size_t index = 0; index < order.size(); ++index) {
    furthest = num_dims == 0 ? 1 : std::max(furthest, begin_of(order[index]) + saved[order[index]].sizes[dim]);
    furthest_end[index] = furthest;
  }

  std::vector<size_t> reached;
  Overlap overlap;
  for (size_t wanted_index = 0; wanted_index < wanted.size(); ++wanted_index) {
    const int64_t begin = num_dims == 0 ? 0 : wanted[wanted_index].offsets[dim];
    const int64_t end = num_dims == 0 ? 1 : begin + wanted[wanted_index].sizes[dim];
    const auto first = std::upper_bound(furthest_end.begin(), furthest_end.end(), begin) - furthest_end.begin();
    reached.clear();
    for (size_t index = static_cast<size_t>(first); index < order.size() && begin_of(order[index]) < end; ++index) {
      reached.push_back(order[index]);
    }
    std::sort(reached.begin(), reached.end());
    for (const size_t saved_index : reached) {
      if (!intersect(wanted[wanted_index], saved[saved_index], overlap)) continue;
      overlap.wanted = wanted_index;
      overlap.saved = saved_index;
      overlaps.push_back(overlap);
    }
  }
  return overlaps;
}

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
