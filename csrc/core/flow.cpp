#include "core/flow.h"

#include <algorithm>
#include <functional>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

Sizes sum_of(const Sizes& left, const Sizes& right) {
  Sizes sum(left.size());
  std::ranges::transform(left, right, sum.begin(), std::plus());
  return sum;
}

ChunkIndex index_of(std::span<const Supply> supplies) {
  std::vector<Chunk> boxes;
  for (const Supply& supply : supplies) boxes.push_back(supply.box);
  return ChunkIndex(std::move(boxes));
}

// The position in `supply.ranks` of the one that gives a part to a rank.
size_t holder_for(int64_t wanting, const Supply& supply, const Sizes& sizes, int64_t num_bytes, Loads& loads) {
  const size_t holder = loads.best(supply.ranks, wanting);
  const int64_t giving = supply.ranks[holder];
  if (giving != wanting) loads.add(giving, checked_mul(num_elements(sizes), num_bytes));
  return holder;
}

}  // namespace

Flow plan_flow(std::span<const Supply> supplies, std::span<const Demand> demands, int64_t num_bytes, Loads& loads) {
  const ChunkIndex held = index_of(supplies);
  Flow flow;
  for (const Demand& demand : demands) {
    const std::vector<Overlap> overlaps = held.find_overlaps(demand.boxes);
    for (const int64_t wanting : demand.ranks) {
      for (const Overlap& overlap : overlaps) {
        const Supply& supply = supplies[overlap.saved];
        const size_t holder = holder_for(wanting, supply, overlap.sizes, num_bytes, loads);
        flow.moves.push_back({supply.ranks[holder],
                              wanting,
                              0,
                              supply.chunks[holder],
                              demand.chunks[overlap.wanted],
                              overlap.sizes,
                              {sum_of(supply.box.local_offsets, overlap.saved_offsets), {}},
                              {overlap.local_offsets, {}}});
      }
    }
  }
  return flow;
}

Flow plan_mapped_flow(const TensorMap& map, std::span<const MappedSupplies> sources, std::span<const Demand> demands,
                      int64_t num_bytes, Loads& loads) {
  std::vector<ChunkIndex> indexes;
  indexes.reserve(sources.size());
  std::vector<MapSource> held;
  for (const MappedSupplies& source : sources) {
    indexes.push_back(index_of(source.supplies));
    held.push_back({source.shape, &indexes.back()});
  }
  Flow flow;
  std::vector<std::vector<MapMove>> moves;  // per wanted box
  for (size_t position = 0; position < demands.size(); ++position) {
    const Demand& demand = demands[position];
    moves.clear();
    for (size_t wanted = 0; wanted < demand.boxes.size(); ++wanted) {
      const Chunk& box = demand.boxes[wanted];
      moves.push_back(find_moves(map, box_of(box), held));
      for (MapFill& fill : find_fills(map, box_of(box))) {
        fill.dst.offsets = sum_of(box.local_offsets, fill.dst.offsets);
        flow.filled.push_back({position, demand.chunks[wanted], std::move(fill)});
      }
    }
    for (const int64_t wanting : demand.ranks) {
      for (size_t wanted = 0; wanted < demand.boxes.size(); ++wanted) {
        for (const MapMove& move : moves[wanted]) {
          const Supply& supply = sources[move.source].supplies[move.chunk];
          const size_t holder = holder_for(wanting, supply, move.sizes, num_bytes, loads);
          flow.moves.push_back({supply.ranks[holder],
                                wanting,
                                move.source,
                                supply.chunks[holder],
                                demand.chunks[wanted],
                                move.sizes,
                                {sum_of(supply.box.local_offsets, move.src.offsets), move.src.steps},
                                {sum_of(demand.boxes[wanted].local_offsets, move.dst.offsets), move.dst.steps}});
        }
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
