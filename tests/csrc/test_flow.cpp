#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "core/flow.h"

namespace torchtitan_ext::core {
namespace {

using Element = Sizes;  // an index

std::vector<Element> elements_of(const Sizes& offsets, const Sizes& sizes) {
  std::vector<Element> elements = {{}};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    std::vector<Element> longer;
    for (const Element& element : elements) {
      for (int64_t index = 0; index < sizes[dim]; ++index) {
        longer.push_back(element);
        longer.back().push_back(offsets[dim] + index);
      }
    }
    elements = std::move(longer);
  }
  return elements;
}

Sizes plus(Sizes left, const Sizes& right) {
  for (size_t dim = 0; dim < left.size(); ++dim) left[dim] += right[dim];
  return left;
}

Chunk random_box(std::mt19937& random, const Sizes& shape) {
  Chunk box;
  for (const int64_t size : shape) {
    const auto begin = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
    box.offsets.push_back(begin);
    box.sizes.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(size - begin)));
    box.local_offsets.push_back(static_cast<int64_t>(random() % 5));
  }
  return box;
}

std::vector<int64_t> some_ranks(std::mt19937& random, int64_t num_ranks) {
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (random() % 3 == 0) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(num_ranks)));
  return ranks;
}

// Where a rank holds, or wants, an element: its tensor, and the index there.
using Spot = std::pair<uint32_t, Element>;

struct Case {
  int64_t num_ranks = 0;
  std::vector<Supply> supplies;
  std::vector<Demand> demands;
  std::vector<uint32_t> hosts;
};

// The chunks of a grid, in 0 to 3 dims.
Case random_case(std::mt19937& random) {
  Case made;
  made.num_ranks = 1 + static_cast<int64_t>(random() % 6);
  Sizes shape(random() % 4);
  for (int64_t& size : shape) size = 1 + static_cast<int64_t>(random() % 6);
  std::vector<Chunk> held;
  held.push_back({Sizes(shape.size(), 0), shape, Sizes(shape.size(), 0)});
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const auto cut = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[dim]));
    if (cut == 0) continue;
    std::vector<Chunk> both;
    for (const Chunk& box : held) {
      both.insert(both.end(), 2, box);
      both[both.size() - 2].sizes[dim] = cut;
      both.back().offsets[dim] = cut;
      both.back().sizes[dim] -= cut;
    }
    held = std::move(both);
  }
  for (Chunk& box : held) {
    Supply supply{std::move(box), some_ranks(random, made.num_ranks), {}};
    for (size_t rank = 0; rank < supply.ranks.size(); ++rank) supply.chunks.push_back(random() % 3);
    made.supplies.push_back(std::move(supply));
  }
  for (size_t count = random() % 4; made.demands.size() < count;) {
    Demand demand{{}, {}, some_ranks(random, made.num_ranks)};
    for (size_t box = 0; box < 1 + random() % 2; ++box) {
      demand.boxes.push_back(random_box(random, shape));
      demand.chunks.push_back(static_cast<uint32_t>(box));  // each a tensor of its own
    }
    made.demands.push_back(std::move(demand));
  }
  for (int64_t rank = 0; rank < made.num_ranks; ++rank) made.hosts.push_back(random() % 3);
  return made;
}

// Element by element: what each rank that wants it gets, from a rank that holds it, once.
void check(const Case& one) {
  Loads loads(one.hosts);
  const Flow flow = plan_flow(one.supplies, one.demands, 2, loads);

  std::map<Element, std::map<int64_t, std::set<Spot>>> holders;
  for (const Supply& supply : one.supplies) {
    for (const Element& index : elements_of(Sizes(supply.box.sizes.size(), 0), supply.box.sizes)) {
      for (size_t rank = 0; rank < supply.ranks.size(); ++rank) {
        holders[plus(supply.box.offsets, index)][supply.ranks[rank]].insert(
            {supply.chunks[rank], plus(supply.box.local_offsets, index)});
      }
    }
  }
  std::map<int64_t, std::vector<std::pair<Spot, Element>>> wanted;  // of each rank, in no order
  for (const Demand& demand : one.demands) {
    for (size_t box = 0; box < demand.boxes.size(); ++box) {
      const Chunk& chunk = demand.boxes[box];
      for (const Element& index : elements_of(Sizes(chunk.sizes.size(), 0), chunk.sizes)) {
        const Element element = plus(chunk.offsets, index);
        for (const int64_t rank : demand.ranks) {
          wanted[rank].push_back({{demand.chunks[box], plus(chunk.local_offsets, index)}, element});
        }
      }
    }
  }
  std::map<int64_t, int64_t> given_bytes;
  for (const Move& move : flow.moves) {
    const std::vector<Element> indices = elements_of(Sizes(move.sizes.size(), 0), move.sizes);
    if (move.src_rank != move.dst_rank) given_bytes[move.src_rank] += 2 * static_cast<int64_t>(indices.size());
    for (const Element& index : indices) {
      const Spot from{move.src_chunk, plus(move.src.offsets, index)};
      const Spot to{move.dst_chunk, plus(move.dst.offsets, index)};
      std::vector<std::pair<Spot, Element>>& open = wanted[move.dst_rank];
      const auto found = std::ranges::find_if(open, [&](const auto& want) {
        const auto& of_element = holders.at(want.second);
        const auto giving = of_element.find(move.src_rank);
        // Own memory first.
        const bool is_right = giving != of_element.end() && giving->second.contains(from);
        return want.first == to && is_right && (move.src_rank == move.dst_rank || !of_element.contains(move.dst_rank));
      });
      ASSERT_TRUE(found != open.end());
      open.erase(found);
    }
  }
  for (const auto& [rank, open] : wanted) EXPECT_TRUE(open.empty()) << rank;
  for (int64_t rank = 0; rank < one.num_ranks; ++rank) EXPECT_EQ(loads.bytes_of(rank), given_bytes[rank]);
}

TEST(Flow, EveryRankGetsWhatItWantsOnce) {
  std::mt19937 random(11);
  for (int round = 0; round < 5000; ++round) {
    check(random_case(random));
    if (HasFatalFailure()) FAIL() << round;
  }
}

TEST(Flow, RanksThatAreLeftOut) {
  const Chunk box{{0}, {4}, {0}};
  const auto left = without_ranks({{box, {0, 1, 2}, {5, 6, 7}}, {box, {1}, {0}}}, std::vector<int64_t>{1});
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0].ranks, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(left[0].chunks, (std::vector<uint32_t>{5, 7}));
}

TEST(Flow, HoldersTakeTurns) {
  Loads loads({0, 1, 2, 3});
  const std::vector<Supply> supplies = {{{{0}, {4}, {0}}, {0, 1}, {0, 0}}};
  const std::vector<Demand> demands = {{{{{0}, {4}, {0}}}, {0}, {1, 2, 3}}};
  const Flow flow = plan_flow(supplies, demands, 1, loads);
  std::vector<std::pair<int64_t, int64_t>> ways;
  for (const Move& move : flow.moves) ways.emplace_back(move.src_rank, move.dst_rank);
  EXPECT_EQ(ways, (std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {0, 2}, {1, 3}}));
}

}  // namespace
}  // namespace torchtitan_ext::core
