#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

#include "core/cover.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::core {
namespace {

Chunk box(Sizes offsets, Sizes sizes) { return {std::move(offsets), std::move(sizes), {}}; }

// The oracle: count every element.
std::optional<CoverDefect> count_elements(const Sizes& shape, const std::vector<Chunk>& chunks) {
  Sizes element(shape.size(), 0);
  for (int64_t index = 0; index < num_elements(shape); ++index) {
    CoverDefect defect;
    defect.element = element;
    for (size_t position = 0; position < chunks.size(); ++position) {
      bool inside = true;
      for (size_t dim = 0; dim < shape.size(); ++dim) {
        inside &= chunks[position].offsets[dim] <= element[dim] &&
                  element[dim] < chunks[position].offsets[dim] + chunks[position].sizes[dim];
      }
      if (inside) defect.chunks.push_back(position);
    }
    if (defect.chunks.size() != 1) {
      defect.kind = defect.chunks.empty() ? CoverDefect::Kind::kGap : CoverDefect::Kind::kOverlap;
      return defect;
    }
    for (size_t dim = shape.size(); dim-- > 0;) {
      if (++element[dim] < shape[dim]) break;
      element[dim] = 0;
    }
  }
  return std::nullopt;
}

void expect_same(const std::optional<CoverDefect>& got, const std::optional<CoverDefect>& expected) {
  ASSERT_EQ(got.has_value(), expected.has_value());
  if (!got) return;
  EXPECT_EQ(got->kind, expected->kind);
  EXPECT_EQ(got->element, expected->element);
  EXPECT_EQ(got->chunks, expected->chunks);
}

TEST(FindCoverDefect, FindsTheFirstDefectThatCountingFindsInRandomBoxes) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 5000; ++trial) {
    Sizes shape;
    const int64_t num_dims = pick(0, 3);
    for (int64_t dim = 0; dim < num_dims; ++dim) shape.push_back(pick(1, 6));
    std::vector<Chunk> chunks;
    for (int64_t count = pick(0, 4); count > 0; --count) {
      Chunk chunk;
      for (const int64_t size : shape) {
        chunk.offsets.push_back(pick(0, size - 1));
        chunk.sizes.push_back(pick(0, size - chunk.offsets.back()));
      }
      chunks.push_back(chunk);
    }
    expect_same(find_cover_defect(shape, chunks), count_elements(shape, chunks));
  }
}

TEST(FindCoverDefect, AcceptsAllShardsOfRandomLayoutsAndMissesNoneThatIsTakenAway) {
  std::mt19937 random(8);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 3000; ++trial) {
    const Sizes shape{pick(1, 12), pick(1, 12)};
    const Sizes mesh{pick(1, 4), pick(1, 4)};
    const ShardLayout layout{shape, mesh, {{1, pick(0, 1), pick(1, 3)}, {0, pick(0, 1), pick(1, 3)}}};
    std::vector<Chunk> chunks;
    for (const Shard& shard : all_shards(layout)) chunks.insert(chunks.end(), shard.chunks.begin(), shard.chunks.end());
    ASSERT_FALSE(find_cover_defect(shape, chunks).has_value());
    chunks.erase(chunks.begin() + pick(0, static_cast<int64_t>(chunks.size()) - 1));
    expect_same(find_cover_defect(shape, chunks), count_elements(shape, chunks));
  }
}

// 2 x 2 x ... of 3: every chunk partial in every dim.
std::vector<Chunk> grid(size_t num_dims) {
  std::vector<Chunk> chunks;
  for (size_t which = 0; which < size_t{1} << num_dims; ++which) {
    Chunk& chunk = chunks.emplace_back();
    for (size_t dim = 0; dim < num_dims; ++dim) {
      const bool second = (which >> dim) & 1;
      chunk.offsets.push_back(second ? 2 : 0);
      chunk.sizes.push_back(second ? 1 : 2);
    }
  }
  return chunks;
}

TEST(FindCoverDefect, ManyPartialDims) {
  const Sizes wide(12, 3);
  std::vector<Chunk> chunks = grid(12);  // 4,096 chunks of 4,096 corners
  EXPECT_FALSE(find_cover_defect(wide, chunks));
  chunks[100].sizes[0] -= 1;
  const auto gap = find_cover_defect(wide, chunks);
  ASSERT_TRUE(gap);
  EXPECT_EQ(gap->kind, CoverDefect::Kind::kGap);
  EXPECT_TRUE(gap->chunks.empty());

  std::mt19937 random(9);
  const Sizes shape(7, 3);
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<Chunk> one_off = grid(7);
    Chunk& chunk = one_off[random() % one_off.size()];
    const size_t dim = random() % 7;
    if (chunk.offsets[dim] > 0) {
      chunk.offsets[dim] -= 1;  // over a neighbour and away from the end
      const auto defect = find_cover_defect(shape, one_off);
      ASSERT_TRUE(defect);
      EXPECT_EQ(defect->kind, CoverDefect::Kind::kOverlap);
      EXPECT_EQ(defect->chunks.size(), 2u);
    } else {
      chunk.sizes[dim] += trial % 2 == 0 ? 1 : -1;
      expect_same(find_cover_defect(shape, one_off), count_elements(shape, one_off));
    }
  }
}

TEST(FindCoverDefect, VolumesThatAddUpDoNotDeceiveIt) {
  const auto defect = find_cover_defect(Sizes{4}, std::vector<Chunk>{box({0}, {3}), box({2}, {1})});
  ASSERT_TRUE(defect);
  EXPECT_EQ(defect->kind, CoverDefect::Kind::kOverlap);
  EXPECT_EQ(defect->element, Sizes{2});
  EXPECT_EQ(defect->chunks, (std::vector<size_t>{0, 1}));
}

TEST(FindCoverDefect, BoxesOutsideTheTensor) {
  for (const Chunk& chunk : {box({-1}, {2}), box({0}, {5}), box({5}, {0}), box({0}, {-1}), box({3}, {INT64_MAX})}) {
    const auto defect = find_cover_defect(Sizes{4}, std::vector<Chunk>{chunk});
    ASSERT_TRUE(defect);
    EXPECT_EQ(defect->kind, CoverDefect::Kind::kOutOfBounds);
  }
}

TEST(FindCoverDefect, ZeroDimAndEmptyTensors) {
  EXPECT_FALSE(find_cover_defect(Sizes{}, std::vector<Chunk>{box({}, {})}));
  EXPECT_EQ(find_cover_defect(Sizes{}, std::vector<Chunk>{})->kind, CoverDefect::Kind::kGap);
  EXPECT_EQ(find_cover_defect(Sizes{}, std::vector<Chunk>{box({}, {}), box({}, {})})->kind,
            CoverDefect::Kind::kOverlap);
  EXPECT_FALSE(find_cover_defect(Sizes{0, 3}, std::vector<Chunk>{}));
  EXPECT_FALSE(find_cover_defect(Sizes{0, 3}, std::vector<Chunk>{box({0, 0}, {0, 3})}));
}

TEST(FindCoverDefect, RefusesChunksOfAnotherNumberOfDims) {
  EXPECT_THROW(find_cover_defect(Sizes{4}, std::vector<Chunk>{box({0, 0}, {4, 1})}), std::invalid_argument);
}

}  // namespace
}  // namespace torchtitan_ext::core
