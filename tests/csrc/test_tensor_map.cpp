#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string_view>

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

// What a pattern stands for, as it is defined: each star tries all lengths, from the shortest on. Takes exponential time.
bool stands_for(std::string_view pattern, std::string_view name, std::vector<std::string>& texts) {
  if (pattern.empty()) return name.empty();
  const bool is_any = pattern.starts_with("**");
  if (pattern[0] == '#') {
    size_t digits = 0;
    while (digits < name.size() && name[digits] >= '0' && name[digits] <= '9') ++digits;
    if (digits == 0 || (digits > 1 && name[0] == '0')) return false;
    return stands_for(pattern.substr(1), name.substr(digits), texts);
  }
  if (pattern[0] != '*') {
    return !name.empty() && name[0] == pattern[0] && stands_for(pattern.substr(1), name.substr(1), texts);
  }
  for (size_t length = 1; length <= name.size(); ++length) {
    if (!is_any && name[length - 1] == '.') return false;
    texts.emplace_back(name.substr(0, length));
    if (stands_for(pattern.substr(is_any ? 2 : 1), name.substr(length), texts)) return true;
    texts.pop_back();
  }
  return false;
}

TEST(NamePattern, RandomNamesMatchAsDefined) {
  std::mt19937 random(7);
  const auto drawn = [&](std::string_view letters, size_t most) {
    std::string text;
    for (size_t length = random() % (most + 1); text.size() < length;) text += letters[random() % letters.size()];
    return text;
  };
  size_t num_matches = 0;
  for (int round = 0; round < 200000; ++round) {
    std::string text = drawn("a.1***", 7);
    if (random() % 3 == 0) text.insert(random() % (text.size() + 1), "#");
    const std::string name = drawn("a.10", 9);
    std::vector<std::string> texts;
    const bool expected = stands_for(text, name, texts);
    const auto match = NamePattern(text).match(name);
    ASSERT_EQ(match.has_value(), expected) << text << " of " << name;
    if (match) {
      ASSERT_EQ(match->texts, texts) << text << " of " << name;
      ASSERT_EQ(NamePattern(text).fill(*match), name) << text;
      ++num_matches;
    }
  }
  EXPECT_GT(num_matches, 5000u);
}

TEST(NamePattern, ManyStarsTakeNoTime) {
  const std::string name(300, 'a');
  for (const char* star : {"*", "**"}) {
    std::string text;
    for (int count = 0; count < 12; ++count) text += std::string(star) + "a";
    EXPECT_TRUE(NamePattern(text).match(name));
    EXPECT_FALSE(NamePattern(text + "b").match(name));  // by the definition some 300^12 / 12! ways
  }
}

TEST(NamePattern, NumbersThatAreAddedTo) {
  const NamePattern later("h.*{+10}.w");
  EXPECT_EQ(later.match("h.13.w")->texts, std::vector<std::string>{"3"});
  EXPECT_EQ(later.fill({{"3"}, 0}), "h.13.w");
  EXPECT_FALSE(later.match("h.9.w"));
  EXPECT_FALSE(later.match("h.010.w"));
  EXPECT_FALSE(later.match("h.x.w"));
  const NamePattern earlier("h.*{-2}.w");
  EXPECT_EQ(earlier.match("h.0.w")->texts, std::vector<std::string>{"2"});
  EXPECT_THROW(earlier.fill({{"1"}, 0}), std::invalid_argument);
  for (const char* text : {"h.*{10}", "h.*{+}", "h.*{+1", "h.*{+01}", "h.**{+1}", "h.*{*1}"}) {
    EXPECT_THROW(NamePattern{text}, std::invalid_argument) << text;
  }
}

std::vector<std::string> names_of(const ResolvedTransform& resolved) {
  std::vector<std::string> names;
  for (const MappedTensor& target : resolved.targets) names.push_back(target.name);
  std::ranges::sort(names);
  return names;
}

TEST(Transform, OthersAreWhatNoRuleTakes) {
  TransformStep concat;
  concat.op = TransformStep::Op::kConcat;
  const TransformRule others{{"**"}, {"**"}, {}, true};
  const TransformRule fused{{"h.*.q", "h.*.k"}, {"h.*.qk"}, {concat}};
  const std::vector<TransformSource> sources = {
      {"h.0.q", "float32", {2}}, {"h.0.k", "float32", {1}}, {"h.0.w", "float32", {3}}, {"norm", "float32", {1}},
      {"h.x.w", "float32", {2}}, {"gone", "float32", {1}},  {"step", "", {}}};
  // The order of the rules does not matter to what is left for the others; among them it does.
  const TransformRule later{{"h.*.w"}, {"h.*{+10}.w"}, {}, true};
  for (const std::vector<TransformRule>& rules : {std::vector{others, fused}, std::vector{fused, others}}) {
    const ResolvedTransform resolved = resolve({{rules, {"gone"}}}, sources);
    EXPECT_TRUE(resolved.problems.empty());
    EXPECT_EQ(names_of(resolved), (std::vector<std::string>{"h.0.qk", "h.0.w", "h.x.w", "norm", "step"}));
  }
  const ResolvedTransform moved = resolve({{{later, others, fused}, {"gone"}}}, sources);
  EXPECT_TRUE(moved.problems.empty());
  EXPECT_EQ(names_of(moved), (std::vector<std::string>{"h.0.qk", "h.10.w", "h.x.w", "norm", "step"}));
  const ResolvedTransform below = resolve({{{{{"h.*.w"}, {"h.*{-1}.w"}, {}}, others}, {}}}, sources);
  ASSERT_EQ(below.problems.size(), 1u);
  EXPECT_EQ(below.problems[0].key, "h.0.w");
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
