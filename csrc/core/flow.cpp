#include "core/flow.h"

#include <algorithm>
#include <functional>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Of boxes that may share elements each keeps what none before it holds.
std::vector<Supply> without_repeats(std::vector<Supply> supplies) {
  std::vector<Chunk> boxes;
  for (const Supply& supply : supplies) boxes.push_back(supply.box);
  const ChunkIndex index(boxes);
  std::vector<Supply> result;
  for (size_t position = 0; position < supplies.size(); ++position) {
    std::vector<Chunk> before;
    for (const Overlap& overlap : index.find_overlaps(std::span(&boxes[position], 1))) {
      if (overlap.saved < position) before.push_back(boxes[overlap.saved]);
    }
    for (Chunk& part : subtract(boxes[position], before)) {
      result.push_back({std::move(part), supplies[position].ranks, supplies[position].chunks});
    }
  }
  return result;
}

void add_absent(size_t position, const Demand& demand, const ChunkIndex& held, std::span<const Overlap> overlaps,
                std::vector<Absent>& absent) {
  auto overlap = overlaps.begin();  // in the order of the wanted boxes
  for (size_t box = 0; box < demand.boxes.size(); ++box) {
    std::vector<Chunk> held_of_it;
    for (; overlap != overlaps.end() && overlap->wanted == box; ++overlap) {
      held_of_it.push_back(held.chunks()[overlap->saved]);
    }
    for (Chunk& part : subtract(demand.boxes[box], held_of_it)) {
      absent.push_back({position, demand.chunks[box], std::move(part)});
    }
  }
}

Sizes sum_of(const Sizes& left, const Sizes& right) {
  Sizes sum(left.size());
  std::ranges::transform(left, right, sum.begin(), std::plus());
  return sum;
}

}  // namespace

Flow plan_flow(std::vector<Supply> supplies, std::span<const Demand> demands, Holdings holdings, int64_t num_bytes,
               Loads& loads) {
  if (holdings == Holdings::kAny) supplies = without_repeats(std::move(supplies));
  std::vector<Chunk> boxes;
  for (const Supply& supply : supplies) boxes.push_back(supply.box);
  const ChunkIndex held(std::move(boxes));
  Flow flow;
  for (size_t position = 0; position < demands.size(); ++position) {
    const Demand& demand = demands[position];
    const std::vector<Overlap> overlaps = held.find_overlaps(demand.boxes);
    if (holdings == Holdings::kAny) add_absent(position, demand, held, overlaps, flow.absent);
    for (const int64_t wanting : demand.ranks) {
      for (const Overlap& overlap : overlaps) {
        const Supply& supply = supplies[overlap.saved];
        const size_t holder = loads.best(supply.ranks, wanting);
        const int64_t giving = supply.ranks[holder];
        if (giving != wanting) loads.add(giving, checked_mul(num_elements(overlap.sizes), num_bytes));
        flow.moves.push_back({giving, wanting, supply.chunks[holder], demand.chunks[overlap.wanted],
                              sum_of(supply.box.local_offsets, overlap.saved_offsets), overlap.local_offsets,
                              overlap.sizes});
      }
    }
  }
  return flow;
}

std::vector<Supply> without_ranks(std::vector<Supply> supplies, std::span<const int64_t> ranks) {
  for (Supply& supply : supplies) {
    Supply kept{std::move(supply.box), {}, {}};
    for (size_t index = 0; index < supply.ranks.size(); ++index) {
      if (std::ranges::binary_search(ranks, supply.ranks[index])) continue;
      kept.ranks.push_back(supply.ranks[index]);
      kept.chunks.push_back(supply.chunks[index]);
    }
    supply = std::move(kept);
  }
  std::erase_if(supplies, [](const Supply& supply) { return supply.ranks.empty(); });
  return supplies;
}

}  // namespace torchtitan_ext::core
