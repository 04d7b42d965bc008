#include <gtest/gtest.h>

#include <numeric>

#include "core/name_pattern.h"
#include "core/tensor_map.h"
#include "core/transform.h"

namespace torchtitan_ext::core {
namespace {

std::vector<int64_t> positions(const TensorMap& map) {
  std::vector<int64_t> found;
  for (const auto& [source, position] : enumerate(map)) found.push_back(source < 0 ? -1 : position);
  return found;
}

TEST(TensorMap, RotaryRowsAreOnePiece) {
  const TensorMap map = TensorMap::whole(0, {4, 3}).reshaped({2, 2, 3}).permuted(Sizes{1, 0, 2}).reshaped({4, 3});
  ASSERT_EQ(map.pieces.size(), 1u);
  EXPECT_EQ(map.pieces[0].loops.size(), 3u);
  EXPECT_EQ(positions(map), (std::vector<int64_t>{0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11}));
  const TensorMap rows = map.sliced(Sizes{1, 0}, Sizes{2, 3});
  EXPECT_EQ(rows.pieces.size(), 2u);
  EXPECT_EQ(positions(rows), (std::vector<int64_t>{6, 7, 8, 3, 4, 5}));
}

TEST(TensorMap, ThereAndBackIsTheSource) {
  const TensorMap there = TensorMap::whole(0, {6, 10}).permuted(Sizes{1, 0}).reshaped({5, 2, 6});
  EXPECT_EQ(there.reshaped({10, 6}).permuted(Sizes{1, 0}).pieces, TensorMap::whole(0, {6, 10}).pieces);
}

TEST(TensorMap, ReshapesAcrossPiecesAreCutByRows) {
  const TensorMap first = TensorMap::whole(0, {5, 2});
  const TensorMap second = TensorMap::whole(1, {7, 2});
  const std::vector<const TensorMap*> parts = {&first, &second};
  const TensorMap map = TensorMap::concatenated(parts, 0).reshaped({3, 8}).permuted(Sizes{1, 0}).reshaped({24});
  std::vector<int64_t> expected;
  for (int64_t column = 0; column < 8; ++column) {
    for (int64_t row = 0; row < 3; ++row) {
      const int64_t position = row * 8 + column;
      expected.push_back(position < 10 ? position : position - 10);
    }
  }
  EXPECT_EQ(positions(map), expected);
}

TEST(TensorMap, PartsOfChunksFillMemoryOfAnyStrides) {
  const TensorMap map = TensorMap::whole(0, {4, 6}).permuted(Sizes{1, 0});
  const ChunkIndex chunks({{{0, 0}, {4, 3}, {}}, {{0, 3}, {4, 3}, {}}});
  const std::vector<MapSource> sources = {{{4, 6}, &chunks}};
  const Sizes offsets = {1, 0}, sizes = {3, 4}, strides = {8, 2};
  std::vector<int64_t> memory(32, -1);
  for (const MapPart& part : find_parts(map, {offsets, sizes}, strides, sources)) {
    const Chunk& chunk = chunks.chunks()[part.chunk];
    std::vector<int64_t> index(part.loops.size(), 0);
    while (true) {
      Sizes at = part.chunk_offsets;
      int64_t place = part.memory_offset;
      for (size_t loop = 0; loop < index.size(); ++loop) {
        at[static_cast<size_t>(part.loops[loop].dim)] += index[loop] * part.loops[loop].step;
        place += index[loop] * part.loops[loop].memory_stride;
      }
      memory[static_cast<size_t>(place)] = (chunk.offsets[0] + at[0]) * 6 + chunk.offsets[1] + at[1];
      size_t loop = index.size();
      while (loop > 0 && ++index[loop - 1] == part.loops[loop - 1].count) index[--loop] = 0;
      if (loop == 0) break;
    }
  }
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 4; ++column) {
      EXPECT_EQ(memory[static_cast<size_t>(row * 8 + column * 2)], column * 6 + row + 1);
    }
  }
}

TEST(TensorMap, GapsAndOverlapsAreFoundInInterleavedElements) {
  // Each second element by one piece, and all of them by another one.
  const MapPiece even{0, {0, 0}, {{4, {2, 1}}}};
  const MapPiece odd{0, {1, 0}, {{4, {2, 1}}}};
  const MapPiece third{0, {0, 0}, {{3, {3, 1}}}};
  const std::vector<const MapPiece*> both = {&even, &odd};
  const Sizes shape = {2, 4};
  EXPECT_FALSE(find_defect(shape, both, kTarget));
  const std::vector<const MapPiece*> half = {&even};
  EXPECT_EQ(find_defect(shape, half, kTarget)->element, (Sizes{0, 1}));
  const std::vector<const MapPiece*> mixed = {&even, &odd, &third};
  EXPECT_EQ(find_defect(shape, mixed, kTarget)->kind, CoverDefect::Kind::kOverlap);
  EXPECT_FALSE(find_gap(shape, mixed, kTarget));
}

TEST(NamePattern, StarsAreParts) {
  const NamePattern pattern("layers.*.experts.#.w1");
  const auto match = pattern.match("layers.12.experts.7.w1");
  ASSERT_TRUE(match);
  EXPECT_EQ(match->texts, std::vector<std::string>{"12"});
  EXPECT_EQ(match->number, 7);
  EXPECT_EQ(pattern.fill(*match), "layers.12.experts.7.w1");
  EXPECT_FALSE(pattern.match("layers.1.2.experts.7.w1"));
  EXPECT_FALSE(pattern.match("layers.1.experts.07.w1"));
  EXPECT_FALSE(pattern.match("layers.1.experts.x.w1"));
  EXPECT_EQ(NamePattern("**.w").match("a.b.w")->texts, std::vector<std::string>{"a.b"});
  EXPECT_THROW(NamePattern("#.#"), std::invalid_argument);
}

TEST(Transform, ASplitThatEndsInNothingIsRefused) {
  TransformStep unstack;
  unstack.op = TransformStep::Op::kUnstack;
  TransformStep stack;
  stack.op = TransformStep::Op::kStack;
  const std::vector<TransformStage> stages = {{{{{"w"}, {"v"}, {unstack, stack}}}, {}}};
  const ResolvedTransform resolved = resolve(stages, {{"w", "float32", {0, 2}}});
  ASSERT_EQ(resolved.problems.size(), 1u);
  EXPECT_EQ(resolved.problems[0].key, "v");
}

}  // namespace
}  // namespace torchtitan_ext::core
