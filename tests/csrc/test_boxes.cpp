#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <stdexcept>

#include "core/boxes.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::core {
namespace {

std::vector<Chunk> random_boxes(std::mt19937& random, const Sizes& shape, int64_t count) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<Chunk> boxes(static_cast<size_t>(count));
  for (Chunk& box : boxes) {
    for (const int64_t size : shape) {
      box.offsets.push_back(pick(0, size - 1));
      box.sizes.push_back(pick(1, size - box.offsets.back()));
      box.local_offsets.push_back(pick(0, 100));
    }
  }
  return boxes;
}

// The oracle: every pair, every dim.
std::vector<Overlap> all_pairs(const std::vector<Chunk>& wanted, const std::vector<Chunk>& saved) {
  std::vector<Overlap> overlaps;
  for (size_t w = 0; w < wanted.size(); ++w) {
    for (size_t s = 0; s < saved.size(); ++s) {
      Overlap overlap{w, s, {}, {}, {}};
      bool is_empty = false;
      for (size_t dim = 0; dim < wanted[w].offsets.size(); ++dim) {
        const int64_t begin = std::max(wanted[w].offsets[dim], saved[s].offsets[dim]);
        const int64_t end =
            std::min(wanted[w].offsets[dim] + wanted[w].sizes[dim], saved[s].offsets[dim] + saved[s].sizes[dim]);
        is_empty |= end <= begin;
        overlap.saved_offsets.push_back(begin - saved[s].offsets[dim]);
        overlap.local_offsets.push_back(wanted[w].local_offsets[dim] + begin - wanted[w].offsets[dim]);
        overlap.sizes.push_back(end - begin);
      }
      if (!is_empty) overlaps.push_back(overlap);
    }
  }
  return overlaps;
}

std::set<std::vector<int64_t>> elements_of(std::span<const Chunk> boxes) {
  std::set<std::vector<int64_t>> elements;
  for (const Chunk& box : boxes) {
    Sizes index(box.sizes.size(), 0);
    for (int64_t number = 0; number < num_elements(box.sizes); ++number) {
      int64_t rest = number;
      std::vector<int64_t> element;
      for (size_t dim = box.sizes.size(); dim-- > 0; rest /= box.sizes[dim]) index[dim] = rest % box.sizes[dim];
      for (size_t dim = 0; dim < box.sizes.size(); ++dim) element.push_back(box.offsets[dim] + index[dim]);
      element.push_back(-1);  // then where it lies in the local tensor
      for (size_t dim = 0; dim < box.sizes.size(); ++dim) element.push_back(box.local_offsets[dim] + index[dim]);
      EXPECT_TRUE(elements.insert(element).second) << "two boxes hold one element";
    }
  }
  return elements;
}

TEST(Subtract, LeavesWhatNoOtherBoxHolds) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 3000; ++trial) {
    Sizes shape(std::uniform_int_distribution<size_t>(0, 3)(random));
    for (int64_t& size : shape) size = std::uniform_int_distribution<int64_t>(1, 7)(random);
    const auto box = random_boxes(random, shape, 1);
    const auto others = random_boxes(random, shape, std::uniform_int_distribution<int64_t>(0, 5)(random));
    auto expected = elements_of(box);
    std::erase_if(expected, [&](const std::vector<int64_t>& element) {
      return std::ranges::any_of(others, [&](const Chunk& other) {
        for (size_t dim = 0; dim < shape.size(); ++dim) {
          const int64_t at = element[dim] - other.offsets[dim];
          if (at < 0 || at >= other.sizes[dim]) return false;
        }
        return true;
      });
    });
    ASSERT_EQ(elements_of(subtract(box[0], others)), expected);
  }
}

TEST(FindOverlaps, IsAllPairsOnRandomBoxes) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 5000; ++trial) {
    Sizes shape(std::uniform_int_distribution<size_t>(0, 3)(random));
    for (int64_t& size : shape) size = std::uniform_int_distribution<int64_t>(1, 20)(random);
    const auto wanted = random_boxes(random, shape, std::uniform_int_distribution<int64_t>(0, 5)(random));
    const auto saved = random_boxes(random, shape, std::uniform_int_distribution<int64_t>(0, 12)(random));
    ASSERT_EQ(find_overlaps(wanted, saved), all_pairs(wanted, saved));
  }
}

TEST(FindOverlaps, ReadsEveryWantedElementOnceFromAnyLayout) {
  const ShardLayout saved_layout{{50, 7}, {4, 2}, {{1, 0, 3}, {0, 0, 1}}};
  const ShardLayout wanted_layout{{50, 7}, {3, 3}, {{1, 1, 1}, {0, 0, 2}}};
  std::vector<Chunk> saved;
  for (const Shard& shard : all_shards(saved_layout)) {
    saved.insert(saved.end(), shard.chunks.begin(), shard.chunks.end());
  }
  for (const Shard& shard : all_shards(wanted_layout)) {
    std::set<Sizes> filled;
    int64_t num_filled = 0;
    for (const Overlap& overlap : find_overlaps(shard.chunks, saved)) {
      num_filled += num_elements(overlap.sizes);
      for (int64_t row = 0; row < overlap.sizes[0]; ++row) {
        for (int64_t column = 0; column < overlap.sizes[1]; ++column) {
          filled.insert({overlap.local_offsets[0] + row, overlap.local_offsets[1] + column});
        }
      }
    }
    EXPECT_EQ(num_filled, num_elements(shard.sizes));
    EXPECT_EQ(static_cast<int64_t>(filled.size()), num_filled);
  }
}

TEST(FindOverlaps, RefusesMixedNumbersOfDims) {
  const std::vector<Chunk> one{{{0}, {4}, {0}}};
  const std::vector<Chunk> two{{{0, 0}, {4, 4}, {0, 0}}};
  EXPECT_THROW(find_overlaps(one, two), std::invalid_argument);
}

TEST(FindOverlaps, OneChunkThatSpansAllOthersCostsNothing) {
  constexpr int64_t kCount = 40000;
  std::vector<Chunk> saved{{{0, 0}, {kCount, 1}, {0, 0}}}, wanted;
  for (int64_t row = 0; row < kCount; ++row) {
    saved.push_back({{row, 1}, {1, 1}, {0, 0}});
    wanted.push_back({{row, 0}, {1, 2}, {row, 0}});
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(find_overlaps(wanted, saved).size(), static_cast<size_t>(2 * kCount));
  // Some 20 ms; comparing every pair takes 10 s and more.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST(ChunkIndex, FillsWhatItHoldsOnce) {
  const ChunkIndex halves({{{0, 0}, {2, 4}, {}}, {{2, 0}, {2, 4}, {}}});
  const std::vector<Chunk> rows{{{1, 1}, {2, 3}, {5, 5}}, {{3, 0}, {1, 4}, {0, 0}}};
  EXPECT_TRUE(halves.fills(rows));
  EXPECT_TRUE(halves.fills(std::vector<Chunk>{{{7, 0}, {0, 4}, {0, 0}}}));
  EXPECT_FALSE(halves.fills(std::vector<Chunk>{rows[0], {{3, 3}, {1, 2}, {0, 0}}}));
  EXPECT_FALSE(ChunkIndex({}).fills(rows));
  const ChunkIndex overlapping({{{0, 0}, {3, 4}, {}}, {{2, 0}, {2, 4}, {}}});
  EXPECT_FALSE(overlapping.fills(rows));
  EXPECT_EQ(overlapping.end(), Sizes({4, 4}));
}

TEST(ChunkIndex, CoversTheShapeAtWhichItEnds) {
  const ChunkIndex halves({{{0, 0}, {2, 4}, {}}, {{2, 0}, {2, 4}, {}}});
  for (int time = 0; time < 2; ++time) {
    EXPECT_TRUE(halves.covers(Sizes({4, 4})));
    EXPECT_FALSE(halves.covers(Sizes({4, 5})));
    EXPECT_FALSE(ChunkIndex({{{0, 0}, {3, 4}, {}}, {{2, 0}, {2, 4}, {}}}).covers(Sizes({4, 4})));
  }
}

std::optional<std::pair<size_t, size_t>> find_pair(const std::vector<Chunk>& chunks) {
  std::vector<Box> boxes;
  for (const Chunk& chunk : chunks) boxes.push_back({chunk.offsets, chunk.sizes});
  return find_colliding_pair(boxes);
}

TEST(FindCollidingPair, Examples) {
  EXPECT_FALSE(find_pair({}));
  EXPECT_FALSE(find_pair({{{0, 0}, {2, 2}, {}}}));
  EXPECT_FALSE(find_pair({{{0, 0}, {2, 2}, {}}, {{0, 2}, {2, 2}, {}}, {{2, 0}, {2, 4}, {}}}));
  EXPECT_EQ(find_pair({{{0, 0}, {2, 2}, {}}, {{4, 4}, {1, 1}, {}}, {{1, 1}, {2, 2}, {}}}), std::make_pair(0ul, 2ul));
  EXPECT_EQ(find_pair({{{}, {}, {}}, {{}, {}, {}}}), std::make_pair(0ul, 1ul));
  EXPECT_FALSE(find_pair({{{0}, {4}, {}}, {{2}, {0}, {}}}));
}

TEST(FindCollidingPair, IsAPairThatAllPairsFind) {
  std::mt19937 random(4);
  int num_pairs = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    Sizes shape(std::uniform_int_distribution<size_t>(1, 3)(random));
    for (int64_t& size : shape) size = std::uniform_int_distribution<int64_t>(1, 60)(random);
    auto boxes = random_boxes(random, shape, std::uniform_int_distribution<int64_t>(0, 30)(random));
    for (Chunk& box : boxes) {
      for (int64_t& size : box.sizes) size = 1 + size / 30;
    }
    std::set<std::pair<size_t, size_t>> pairs;
    for (const Overlap& overlap : all_pairs(boxes, boxes)) {
      if (overlap.wanted < overlap.saved) pairs.insert({overlap.wanted, overlap.saved});
    }
    const auto pair = find_pair(boxes);
    ASSERT_EQ(pair.has_value(), !pairs.empty());
    if (pair) {
      ASSERT_TRUE(pairs.count(*pair));
    }
    num_pairs += !pairs.empty();
  }
  EXPECT_GT(num_pairs, 500);
  EXPECT_LT(num_pairs, 2500);
}

TEST(BoxIndex, RefusesABoxThatEndsBeyondInt64) {
  const std::vector<Chunk> saved{{{INT64_MAX}, {2}, {0}}}, wanted{{{0}, {1}, {0}}};
  EXPECT_THROW(find_overlaps(wanted, saved), std::overflow_error);
}

}  // namespace
}  // namespace torchtitan_ext::core
