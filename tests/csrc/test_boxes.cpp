#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
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

std::vector<Overlap> find_overlaps(const std::vector<Chunk>& wanted, const std::vector<Chunk>& saved) {
  return ChunkIndex(saved).find_overlaps(wanted);
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
  std::vector<Box> boxes;
  for (const Chunk& chunk : saved) boxes.push_back(box_of(chunk));
  const BoxIndex index(boxes, 2);
  std::vector<size_t> found;
  size_t num_found = 0, num_compared = 0;
  for (const Chunk& chunk : wanted) {
    num_compared += index.find(box_of(chunk), found);
    num_found += found.size();
  }
  EXPECT_EQ(num_found, static_cast<size_t>(2 * kCount));
  // A path through the tree for each, where every pair would be 40,000 comparisons for each.
  EXPECT_LT(num_compared, static_cast<size_t>(100 * kCount));
  EXPECT_EQ(find_overlaps(wanted, saved).size(), num_found);
}

TEST(Boxes, LieInsideOfTensorsWithAsManyDims) {
  const Sizes tensor{4, 3};
  const auto inside = [&](const Sizes& offsets, const Sizes& sizes) { return lies_inside({offsets, sizes}, tensor); };
  EXPECT_TRUE(inside({0, 0}, {4, 3}) && inside({3, 1}, {1, 2}) && inside({4, 0}, {0, 3}));
  EXPECT_FALSE(inside({1, 0}, {4, 3}) || inside({-1, 0}, {1, 1}) || inside({0, 0}, {1, -1}) || inside({5, 0}, {0, 1}));
  EXPECT_FALSE(inside({0}, {4}) || inside({0, 0}, {4}) || inside({0, 0, 0}, {4, 3, 1}));
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(inside({kHuge, 0}, {kHuge, 1}));
  EXPECT_TRUE(lies_inside({{}, {}}, {}));
}

TEST(Boxes, LieRowByRow) {
  EXPECT_EQ(row_major_strides(Sizes{2, 3, 4}), (Sizes{12, 4, 1}));
  EXPECT_EQ(row_major_strides(Sizes{2, 0, 4}), (Sizes{4, 4, 1}));
  EXPECT_EQ(row_major_strides({}), Sizes{});
  EXPECT_THROW(row_major_strides(Sizes{1, int64_t{1} << 62, 4}), std::overflow_error);
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

// The elements of a box in row-major order.
std::vector<Sizes> walk(const Chunk& box) {
  std::vector<Sizes> elements;
  for (int64_t number = 0; number < num_elements(box.sizes); ++number) {
    Sizes element = box.offsets;
    int64_t rest = number;
    for (size_t dim = box.sizes.size(); dim-- > 0; rest /= box.sizes[dim]) element[dim] += rest % box.sizes[dim];
    elements.push_back(std::move(element));
  }
  return elements;
}

Sizes random_shape(std::mt19937& random, int64_t least, int64_t most) {
  Sizes shape(std::uniform_int_distribution<size_t>(0, 3)(random));
  for (int64_t& size : shape) size = std::uniform_int_distribution<int64_t>(least, most)(random);
  return shape;
}

std::vector<Box> views_of(const std::vector<Chunk>& chunks) {
  std::vector<Box> boxes;
  for (const Chunk& chunk : chunks) boxes.push_back(box_of(chunk));
  return boxes;
}

TEST(Intersect, LeavesWhatBothHoldInItsPlaces) {
  std::mt19937 random(6);
  for (int trial = 0; trial < 3000; ++trial) {
    const auto boxes = random_boxes(random, random_shape(random, 1, 7), 2);
    auto expected = elements_of(std::span(boxes).first(1));
    const std::vector<Sizes> others = walk(boxes[1]);
    std::erase_if(expected, [&](const std::vector<int64_t>& element) {
      const Sizes place(element.begin(), element.begin() + static_cast<std::ptrdiff_t>(boxes[0].sizes.size()));
      return std::ranges::find(others, place) == others.end();
    });
    const std::optional<Chunk> both = intersect(boxes[0], box_of(boxes[1]));
    ASSERT_EQ(both.has_value(), !expected.empty());
    if (both) {
      ASSERT_EQ(elements_of(std::span(&*both, 1)), expected);
      ASSERT_EQ(intersect({boxes[0].offsets, boxes[0].sizes, {}}, box_of(boxes[1])),
                (Chunk{both->offsets, both->sizes, {}}));
    }
  }
}

TEST(OverlappingGroups, AreThoseThatSharedElementsJoin) {
  std::mt19937 random(8);
  for (int trial = 0; trial < 2000; ++trial) {
    const auto boxes = random_boxes(random, random_shape(random, 1, 12), trial % 9);
    std::vector<std::set<uint32_t>> expected;
    for (uint32_t box = 0; box < boxes.size(); ++box) {
      std::set<uint32_t> joined = {box};
      std::erase_if(expected, [&](const std::set<uint32_t>& group) {
        const bool meets = std::ranges::any_of(
            group, [&](uint32_t other) { return !all_pairs({boxes[box]}, {boxes[other]}).empty(); });
        if (meets) joined.insert(group.begin(), group.end());
        return meets;
      });
      expected.push_back(std::move(joined));
    }
    std::vector<std::set<uint32_t>> found;
    for (const auto& group : overlapping_groups(views_of(boxes))) {
      ASSERT_TRUE(std::ranges::is_sorted(group));
      found.emplace_back(group.begin(), group.end());
    }
    std::ranges::sort(found);
    std::ranges::sort(expected);
    ASSERT_EQ(found, expected);
  }
}

TEST(Partition, TellsOfEachElementWhichBoxesHoldIt) {
  std::mt19937 random(9);
  for (int trial = 0; trial < 3000; ++trial) {
    const auto boxes = random_boxes(random, random_shape(random, 1, 7), trial % 7);
    std::map<Sizes, std::vector<uint32_t>> expected, found;
    for (uint32_t box = 0; box < boxes.size(); ++box) {
      for (const Sizes& element : walk(boxes[box])) expected[element].push_back(box);
    }
    const auto cells = partition(views_of(boxes), SIZE_MAX);
    for (const Cell& cell : *cells) {
      for (const Sizes& element : walk(cell.box)) {
        ASSERT_TRUE(found.emplace(element, cell.holders).second) << "two cells hold one element";
      }
    }
    ASSERT_EQ(found, expected);
    ASSERT_TRUE(partition(views_of(boxes), cells->size()));
    if (cells->size() > 1) {
      ASSERT_FALSE(partition(views_of(boxes), cells->size() - 1));
    }
  }
}

TEST(Partition, GivesWhatSeveralHoldFirst) {
  const std::vector<Chunk> rows{{{0}, {6}, {}}, {{4}, {6}, {}}, {{20}, {0}, {}}};
  const auto cells = partition(views_of(rows), 3);
  ASSERT_EQ(cells->size(), 3u);
  EXPECT_EQ((*cells)[0].box, (Chunk{{4}, {2}, {}}));
  EXPECT_EQ((*cells)[0].holders, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ((*cells)[1].box, (Chunk{{0}, {4}, {}}));
  EXPECT_EQ((*cells)[2].box, (Chunk{{6}, {4}, {}}));
}

// The definition: whole rows of the outermost dim, as many as fit, or each row in parts.
void cut_slowly(Chunk box, size_t dim, int64_t most, std::vector<Chunk>& parts) {
  if (num_elements(box.sizes) <= most || dim == box.sizes.size()) return parts.push_back(box);
  const int64_t begin = box.offsets[dim], end = begin + box.sizes[dim];
  const int64_t rows = std::max<int64_t>(most / (num_elements(box.sizes) / box.sizes[dim]), 1);
  for (box.offsets[dim] = begin; box.offsets[dim] < end; box.offsets[dim] += rows) {
    box.sizes[dim] = std::min(rows, end - box.offsets[dim]);
    Chunk part = box;
    if (!part.local_offsets.empty()) part.local_offsets[dim] += part.offsets[dim] - begin;
    cut_slowly(std::move(part), dim + 1, most, parts);
  }
}

TEST(BoxParts, AreRowsOrPartsOfRowsInRowMajorOrder) {
  std::mt19937 random(10);
  for (int trial = 0; trial < 5000; ++trial) {
    const Sizes shape = random_shape(random, 1, 9);
    Chunk box = random_boxes(random, shape, 1)[0];
    if (trial % 2 == 0) box.local_offsets.clear();
    const auto most = std::uniform_int_distribution<int64_t>(0, 60)(random);
    std::vector<Chunk> expected, found;
    cut_slowly(box, 0, most, expected);
    const BoxParts parts(box, most);
    std::vector<Sizes> elements;
    for (int64_t number = 0; number < parts.size(); ++number) {
      found.push_back(parts.at(number));
      ASSERT_LE(num_elements(found.back().sizes), std::max<int64_t>(most, 1));
      for (Sizes& element : walk(found.back())) elements.push_back(std::move(element));
    }
    ASSERT_EQ(found, expected);
    ASSERT_EQ(elements, walk(box));
  }
}

TEST(BoxParts, OfABoxWithoutElementsAreTheBox) {
  const Chunk box{{3, 1}, {0, 7}, {}};
  const BoxParts parts(box, 2);
  ASSERT_EQ(parts.size(), 1);
  EXPECT_EQ(parts.at(0), box);
}

TEST(BoxParts, MayBeMoreThanMemoryHasRoomFor) {
  const BoxParts parts({{5, 0, 0}, {INT64_C(1) << 31, INT64_C(1) << 20, 3}, {}}, 2);
  EXPECT_EQ(parts.size(), INT64_C(1) << 52);
  EXPECT_EQ(parts.at(parts.size() - 1), (Chunk{{(INT64_C(1) << 31) + 4, (INT64_C(1) << 20) - 1, 2}, {1, 1, 1}, {}}));
}

std::vector<std::pair<Sizes, Sizes>> in_file_order(const Sizes& sizes, const Sizes& strides) {
  std::vector<std::pair<Sizes, Sizes>> boxes;
  for (const Chunk& box : boxes_in_file_order(sizes, strides)) boxes.emplace_back(box.offsets, box.sizes);
  return boxes;
}

TEST(BoxesInFileOrder, AreCutWhereWindowsHaveElementsInCommon) {
  using Boxes = std::vector<std::pair<Sizes, Sizes>>;
  constexpr int64_t kMany = INT64_C(1) << 40;
  EXPECT_EQ(in_file_order({3, 4}, {2, 1}), (Boxes{{{0, 0}, {3, 2}}, {{0, 2}, {3, 2}}}));
  EXPECT_EQ(in_file_order({4, 3}, {1, 4}), (Boxes{{{0, 0}, {4, 3}}}));
  EXPECT_EQ(in_file_order({3, kMany}, {1, 1}).size(), 3u);
  EXPECT_EQ(in_file_order({kMany, 3}, {1, 2}).size(), 3u);
  EXPECT_EQ(in_file_order({2, 3}, {0, 1}).size(), 1u);
}

// The smaller strides lead to less than one step of the next one.
bool is_in_file_order(const Sizes& sizes, const Sizes& strides) {
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 1) steps.emplace_back(strides[dim], sizes[dim]);
  }
  std::ranges::sort(steps);
  int64_t reach = 0;
  for (const auto& [stride, size] : steps) {
    if (reach >= stride) return false;
    reach += stride * (size - 1);
  }
  return true;
}

TEST(BoxesInFileOrder, HoldEveryElementOnce) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 3000; ++trial) {
    Sizes sizes(std::uniform_int_distribution<size_t>(0, 4)(random)), strides(sizes.size());
    for (int64_t& size : sizes) size = std::uniform_int_distribution<int64_t>(0, 5)(random);
    for (int64_t& stride : strides) stride = std::uniform_int_distribution<int64_t>(1, 30)(random);
    std::vector<Sizes> seen;
    for (const auto& [offsets, part] : in_file_order(sizes, strides)) {
      ASSERT_TRUE(is_in_file_order(part, strides));
      for (Sizes& element : walk({offsets, part, {}})) seen.push_back(std::move(element));
    }
    std::ranges::sort(seen);
    ASSERT_EQ(seen, walk({Sizes(sizes.size(), 0), sizes, {}}));
  }
}

TEST(BoxIndex, RefusesABoxThatEndsBeyondInt64) {
  const std::vector<Chunk> saved{{{INT64_MAX}, {2}, {0}}}, wanted{{{0}, {1}, {0}}};
  EXPECT_THROW(find_overlaps(wanted, saved), std::overflow_error);
}

}  // namespace
}  // namespace torchtitan_ext::core
