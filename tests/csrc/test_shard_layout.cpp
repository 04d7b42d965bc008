#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

#include "core/shard_layout.h"

namespace torchtitan_ext::core {
namespace {

// The oracle: explicit lists of indices along one dim, cut as torch.chunk does, without intervals.
using Indices = std::vector<int64_t>;

std::vector<Indices> chunk_indices(const Indices& indices, int64_t count) {
  const int64_t length = static_cast<int64_t>(indices.size());
  const int64_t part = (length + count - 1) / count;
  std::vector<Indices> parts(static_cast<size_t>(count));
  for (int64_t position = 0; position < length; ++position) parts[position / part].push_back(indices[position]);
  return parts;
}

Indices indices_of(const ShardLayout& layout, size_t dim, const Sizes& coordinate) {
  Indices held(static_cast<size_t>(layout.global_shape[dim]));
  std::iota(held.begin(), held.end(), 0);
  for (const ShardStep& step : layout.steps) {
    if (step.dim != static_cast<int64_t>(dim)) continue;
    Indices taken;
    for (const Indices& part : chunk_indices(held, step.split_factor)) {
      const Indices piece = chunk_indices(part, layout.mesh_shape[step.axis])[coordinate[step.axis]];
      taken.insert(taken.end(), piece.begin(), piece.end());
    }
    held = taken;
  }
  return held;
}

// The indices along `dim` that the chunks of a shard hold, in the order of the local tensor.
Indices indices_of(const Shard& shard, size_t dim) {
  Indices indices(static_cast<size_t>(shard.sizes[dim]), -1);
  for (const Chunk& chunk : shard.chunks) {
    for (int64_t i = 0; i < chunk.sizes[dim]; ++i) indices[chunk.local_offsets[dim] + i] = chunk.offsets[dim] + i;
  }
  return indices;
}

ShardLayout random_layout(std::mt19937& random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  ShardLayout layout;
  const int64_t num_dims = pick(1, 3);
  for (int64_t dim = 0; dim < num_dims; ++dim) layout.global_shape.push_back(pick(0, 9) == 0 ? 0 : pick(1, 30));
  const int64_t num_axes = pick(1, 4);
  for (int64_t axis = 0; axis < num_axes; ++axis) {
    layout.mesh_shape.push_back(pick(1, 5));
    if (pick(0, 4) == 0) continue;  // a replicating axis
    layout.steps.push_back({axis, pick(0, num_dims - 1), pick(0, 1) == 0 ? 1 : pick(1, 7)});
  }
  std::shuffle(layout.steps.begin(), layout.steps.end(), random);
  return layout;
}

TEST(ShardAt, HoldsWhatTheIndexListsHoldOnRandomLayouts) {
  std::mt19937 random(20260101);
  for (int trial = 0; trial < 20000; ++trial) {
    const ShardLayout layout = random_layout(random);
    Sizes coordinate;
    for (const int64_t size : layout.mesh_shape) {
      coordinate.push_back(std::uniform_int_distribution<int64_t>(0, size - 1)(random));
    }
    const Shard shard = shard_at(layout, coordinate);
    bool is_empty = false;
    for (size_t dim = 0; dim < layout.global_shape.size(); ++dim) {
      const Indices expected = indices_of(layout, dim, coordinate);
      ASSERT_EQ(shard.sizes[dim], static_cast<int64_t>(expected.size()));
      is_empty |= expected.empty();
    }
    ASSERT_EQ(shard.chunks.empty(), is_empty);
    int64_t covered = 0;
    for (const Chunk& chunk : shard.chunks) covered += num_elements(chunk.sizes);
    ASSERT_EQ(covered, num_elements(shard.sizes));
    for (size_t dim = 0; dim < layout.global_shape.size() && !is_empty; ++dim) {
      ASSERT_EQ(indices_of(shard, dim), indices_of(layout, dim, coordinate));
    }
  }
}

TEST(ShardAt, UnevenNestedOrderOfFsdpOverTp) {
  const ShardLayout nested{{9}, {4, 2}, {{1, 0, 1}, {0, 0, 1}}};
  EXPECT_EQ(shard_at(nested, Sizes{3, 1}), (Shard{{1}, {{{8}, {1}, {0}}}}));
  EXPECT_EQ(shard_at(nested, Sizes{3, 0}), (Shard{{0}, {}}));
}

TEST(ShardAt, KeepsSeveralBoxesInLocalOrder) {
  const ShardLayout strided{{12, 4}, {2}, {{0, 0, 3}}};
  EXPECT_EQ(shard_at(strided, Sizes{1}),
            (Shard{{6, 4}, {{{2, 0}, {2, 4}, {0, 0}}, {{6, 0}, {2, 4}, {2, 0}}, {{10, 0}, {2, 4}, {4, 0}}}}));
}

TEST(ShardAt, MergesWhatTouches) {
  // One rank along the axis: 3 blocks of all rows are all rows.
  EXPECT_EQ(shard_at({{12}, {1}, {{0, 0, 3}}}, Sizes{0}), (Shard{{12}, {{{0}, {12}, {0}}}}));
}

TEST(ShardAt, ZeroDimTensorIsOneChunk) { EXPECT_EQ(shard_at({{}, {2}, {}}, Sizes{1}), (Shard{{}, {{{}, {}, {}}}})); }

TEST(ShardAt, TakesDimsAndSplitFactorsNearInt64) {
  const int64_t huge = int64_t{1} << 62;
  EXPECT_EQ(shard_at({{huge}, {2}, {{0, 0, 1}}}, Sizes{1}), (Shard{{huge / 2}, {{{huge / 2}, {huge / 2}, {0}}}}));
  EXPECT_EQ(shard_at({{3}, {2}, {{0, 0, huge}}}, Sizes{0}), (Shard{{3}, {{{0}, {3}, {0}}}}));
  EXPECT_THROW(shard_at({{huge, huge}, {2}, {}}, Sizes{0}), std::overflow_error);
}

TEST(ShardAt, RefusesWhatMakesNoSense) {
  EXPECT_THROW(shard_at({{4}, {2}, {{1, 0, 1}}}, Sizes{0}), std::invalid_argument);             // no such axis
  EXPECT_THROW(shard_at({{4}, {2}, {{0, 1, 1}}}, Sizes{0}), std::invalid_argument);             // no such dim
  EXPECT_THROW(shard_at({{4}, {2}, {{0, 0, 0}}}, Sizes{0}), std::invalid_argument);             // split factor 0
  EXPECT_THROW(shard_at({{4}, {2}, {{0, 0, 1}, {0, 0, 1}}}, Sizes{0}), std::invalid_argument);  // axis twice
  EXPECT_THROW(shard_at({{4}, {2}, {}}, Sizes{2}), std::invalid_argument);                      // coordinate outside
  EXPECT_THROW(shard_at({{4}, {2}, {}}, Sizes{0, 0}), std::invalid_argument);
  EXPECT_THROW(shard_at({{-4}, {2}, {}}, Sizes{0}), std::invalid_argument);
  EXPECT_THROW(shard_at({{4}, {0}, {}}, Sizes{0}), std::invalid_argument);
}

TEST(AllShards, IsShardAtForEveryCoordinateInRowMajorOrder) {
  const ShardLayout layout{{7, 5}, {2, 3}, {{1, 1, 1}, {0, 0, 1}}};
  const std::vector<Shard> shards = all_shards(layout);
  ASSERT_EQ(shards.size(), 6u);
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t column = 0; column < 3; ++column) {
      EXPECT_EQ(shards[row * 3 + column], shard_at(layout, Sizes{row, column}));
    }
  }
}

std::vector<ShardStep> nested(std::vector<Placement> placements, Sizes mesh) {
  return read_placements(placements, mesh, Reading::kNested);
}

TEST(ReadPlacements, FsdpOverTp) {
  const std::vector<Placement> placements{{0, 2}, {0, 1}};
  EXPECT_EQ(nested(placements, {4, 2}), (std::vector<ShardStep>{{1, 0, 1}, {0, 0, 1}}));
  EXPECT_EQ(read_placements(placements, Sizes{4, 2}, Reading::kLeftToRight),
            (std::vector<ShardStep>{{0, 0, 2}, {1, 0, 1}}));
}

TEST(ReadPlacements, ReplicasAndOtherDimsDoNotPay) {
  EXPECT_EQ(nested({{-1, 1}, {0, 2}, {0, 1}}, {2, 4, 2}), (std::vector<ShardStep>{{2, 0, 1}, {1, 0, 1}}));
  EXPECT_EQ(nested({{0, 2}, {1, 1}}, {4, 2}), (std::vector<ShardStep>{{0, 0, 2}, {1, 1, 1}}));
}

TEST(ReadPlacements, FsdpOverExpertAndTensorParallel) {
  EXPECT_EQ(nested({{0, 6}, {0, 1}, {0, 1}}, {2, 3, 2}), (std::vector<ShardStep>{{1, 0, 1}, {2, 0, 1}, {0, 0, 1}}));
}

TEST(ReadPlacements, InterleavedTpUnderFsdp) {
  EXPECT_EQ(nested({{0, 2}, {0, 3}}, {2, 2}), (std::vector<ShardStep>{{1, 0, 3}, {0, 0, 1}}));
}

TEST(ReadPlacements, AFactorThatNothingPaysForStays) {
  EXPECT_EQ(nested({{0, 3}}, {2}), (std::vector<ShardStep>{{0, 0, 3}}));
  EXPECT_EQ(nested({{0, 3}, {0, 1}}, {2, 2}), (std::vector<ShardStep>{{0, 0, 3}, {1, 0, 1}}));
  EXPECT_EQ(nested({{0, 1}, {0, 3}}, {2, 2}), (std::vector<ShardStep>{{0, 0, 1}, {1, 0, 3}}));
}

TEST(ReadPlacements, RefusesAnotherNumberOfAxes) { EXPECT_THROW(nested({{0, 1}}, {2, 2}), std::invalid_argument); }

std::vector<Observation> observe(const ShardLayout& layout) {
  std::vector<Observation> seen;
  Sizes coordinate(layout.mesh_shape.size(), 0);
  for (const Shard& shard : all_shards(layout)) {
    seen.push_back({coordinate, shard.sizes});
    for (size_t axis = coordinate.size(); axis-- > 0;) {
      if (++coordinate[axis] < layout.mesh_shape[axis]) break;
      coordinate[axis] = 0;
    }
  }
  return seen;
}

// What FIELD 1 measured: of the two readings of FSDP2 over TP, local sizes always tell which is true.
TEST(ResolveSteps, TellsTheTwoReadingsOfFsdpOverTpApartOnEveryUnevenLayout) {
  int64_t num_different = 0;
  for (int64_t rows = 0; rows <= 150; ++rows) {
    for (int64_t dp = 1; dp <= 6; ++dp) {
      for (int64_t tp = 1; tp <= 6; ++tp) {
        const std::vector<Placement> placements{{0, tp}, {0, 1}};
        const std::vector<std::vector<ShardStep>> candidates{
            read_placements(placements, Sizes{dp, tp}, Reading::kNested),
            read_placements(placements, Sizes{dp, tp}, Reading::kLeftToRight)};
        for (size_t truth = 0; truth < candidates.size(); ++truth) {
          const ShardLayout layout{{rows}, {dp, tp}, candidates[truth]};
          const Resolution resolution = resolve_steps({rows}, {dp, tp}, candidates, observe(layout));
          ASSERT_EQ(resolution.outcome, Resolution::Outcome::kDecided) << rows << " rows on " << dp << " x " << tp;
          ASSERT_EQ(all_shards({{rows}, {dp, tp}, candidates[resolution.first]}), all_shards(layout));
          num_different += resolution.first != 0;
        }
      }
    }
  }
  EXPECT_GT(num_different, 0);
}

TEST(ResolveSteps, DoubtsInterleavedTpUnderFsdp) {
  const std::vector<std::vector<ShardStep>> candidates{{{1, 0, 3}, {0, 0, 1}}, {{0, 0, 2}, {1, 0, 3}}};
  const Resolution resolution = resolve_steps({24}, {2, 2}, candidates, observe({{24}, {2, 2}, candidates[0]}));
  EXPECT_EQ(resolution.outcome, Resolution::Outcome::kInDoubt);
  EXPECT_NE(shard_at({{24}, {2, 2}, candidates[0]}, resolution.coordinate),
            shard_at({{24}, {2, 2}, candidates[1]}, resolution.coordinate));
}

TEST(ResolveSteps, SaysWhereNothingFits) {
  const std::vector<std::vector<ShardStep>> candidates{{{0, 0, 1}}};
  const Resolution resolution = resolve_steps({8}, {2}, candidates, std::vector<Observation>{{{0}, {4}}, {{1}, {5}}});
  EXPECT_EQ(resolution.outcome, Resolution::Outcome::kNoMatch);
  EXPECT_EQ(resolution.coordinate, Sizes{1});
}

TEST(ResolveSteps, AnEmptyLocalTensorFitsWhateverItsShape) {
  const std::vector<std::vector<ShardStep>> candidates{{{0, 0, 1}}};
  EXPECT_EQ(resolve_steps({1, 3}, {2}, candidates, std::vector<Observation>{{{0}, {1, 3}}, {{1}, {0}}}).outcome,
            Resolution::Outcome::kDecided);
  EXPECT_EQ(resolve_steps({4}, {2}, candidates, std::vector<Observation>{{{0}, {2}}, {{1}, {0}}}).outcome,
            Resolution::Outcome::kNoMatch);
}

}  // namespace
}  // namespace torchtitan_ext::core
