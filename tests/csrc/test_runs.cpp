#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>

#include "core/runs.h"

namespace torchtitan_ext::core {
namespace {

// The oracle: destination byte -> source byte, one element after the other.
using ByteMap = std::map<int64_t, int64_t>;
using RunVector = std::vector<Run>;  // inside a test "Run" is a method of its base class

void copy_box(ByteMap& bytes, const Sizes& sizes, int64_t src, const Sizes& src_strides, int64_t dst,
              const Sizes& dst_strides, int64_t item_bytes, size_t dim = 0) {
  if (dim == sizes.size()) {
    for (int64_t byte = 0; byte < item_bytes; ++byte) bytes[dst + byte] = src + byte;
    return;
  }
  for (int64_t index = 0; index < sizes[dim]; ++index) {
    copy_box(bytes, sizes, src + index * src_strides[dim], src_strides, dst + index * dst_strides[dim], dst_strides,
             item_bytes, dim + 1);
  }
}

ByteMap bytes_of(const RunList& list) {
  ByteMap bytes;
  for (const Run& run : list.enumerate()) {
    for (int64_t byte = 0; byte < run.num_bytes; ++byte) {
      EXPECT_EQ(bytes.count(run.dst_bytes + byte), 0u) << "a byte is written twice";
      bytes[run.dst_bytes + byte] = run.src_bytes + byte;
    }
  }
  return bytes;
}

void append(RunList& list, const Sizes& sizes, int64_t src, const Sizes& src_strides, int64_t dst,
            const Sizes& dst_strides, int64_t item_bytes) {
  const auto in_elements = [item_bytes](Sizes strides) {
    for (int64_t& stride : strides) stride /= item_bytes;
    return strides;
  };
  const Sizes src_elements = in_elements(src_strides);
  const Sizes dst_elements = in_elements(dst_strides);
  list.append_box(sizes, {src, src_elements}, {dst, dst_elements}, item_bytes);
}

TEST(Runs, ColumnsOfARowMajorTensorAreOneNest) {
  RunList list;
  append(list, {3, 2}, 8, {32, 4}, 0, {8, 4}, 4);
  ASSERT_EQ(list.nests().size(), 1u);
  EXPECT_EQ(list.nests()[0].run_bytes, 8);
  EXPECT_EQ(list.loops(), (std::vector<Loop>{{3, 32, 8}}));
  EXPECT_EQ(list.enumerate(), (RunVector{{8, 0, 8}, {40, 8, 8}, {72, 16, 8}}));
}

TEST(Runs, ContiguousBoxesAreOneRun) {
  RunList list;
  append(list, {2, 3, 4}, 96, {48, 16, 4}, 0, {48, 16, 4}, 4);
  EXPECT_EQ(list.enumerate(), (RunVector{{96, 0, 96}}));
}

TEST(Runs, PermutedAlikeOnBothSidesAreOneRun) {
  RunList list;
  append(list, {4, 3, 2}, 0, {4, 16, 48}, 0, {4, 16, 48}, 4);
  EXPECT_EQ(list.enumerate(), (RunVector{{0, 0, 96}}));
}

TEST(Runs, AZeroDimTensorIsOneItem) {
  RunList list;
  append(list, {}, 8, {}, 16, {}, 8);
  EXPECT_EQ(list.enumerate(), (RunVector{{8, 16, 8}}));
}

TEST(Runs, EmptyBoxesAddNothing) {
  RunList list;
  append(list, {3, 0}, 0, {0, 4}, 0, {0, 4}, 4);
  EXPECT_TRUE(list.nests().empty());
  EXPECT_EQ(list.num_bytes(), 0);
  EXPECT_EQ(list.src_extent(), (Interval{0, 0}));
}

TEST(Runs, NeighboursJoin) {
  RunList rows;
  append(rows, {2, 8}, 0, {32, 4}, 0, {32, 4}, 4);
  append(rows, {1, 8}, 64, {32, 4}, 64, {32, 4}, 4);
  EXPECT_EQ(rows.enumerate(), (RunVector{{0, 0, 96}}));

  RunList halves;  // the left and the right half of every row make whole rows, which make one run
  append(halves, {4, 4}, 0, {32, 4}, 0, {32, 4}, 4);
  append(halves, {4, 4}, 16, {32, 4}, 16, {32, 4}, 4);
  EXPECT_EQ(halves.enumerate(), (RunVector{{0, 0, 128}}));

  RunList columns;  // two bands of the same columns
  append(columns, {2, 2}, 0, {32, 4}, 0, {8, 4}, 4);
  append(columns, {3, 2}, 64, {32, 4}, 16, {8, 4}, 4);
  ASSERT_EQ(columns.nests().size(), 1u);
  EXPECT_EQ(columns.loops(), (std::vector<Loop>{{5, 32, 8}}));
}

TEST(Runs, NestsOfOtherStridesDoNotJoin) {
  RunList list;  // the second begins where the first would go on, on both sides
  append(list, {2, 1}, 0, {32, 4}, 0, {8, 4}, 4);
  append(list, {2, 1}, 64, {32, 4}, 16, {12, 4}, 4);
  append(list, {2, 1}, 128, {24, 4}, 40, {12, 4}, 4);
  EXPECT_EQ(list.enumerate(), (RunVector{{0, 0, 4}, {32, 8, 4}, {64, 16, 4}, {96, 28, 4}, {128, 40, 4}, {152, 52, 4}}));
}

TEST(Runs, AThousandEvenStepsAreOneNest) {
  RunList list;
  for (int64_t row = 0; row < 1000; ++row) append(list, {8}, row * 96, {4}, row * 32, {4}, 4);
  ASSERT_EQ(list.nests().size(), 1u);
  EXPECT_EQ(list.loops(), (std::vector<Loop>{{1000, 96, 32}}));
  EXPECT_EQ(list.nests()[0].num_runs, 1000);
  EXPECT_EQ(list.num_bytes(), 32000);
  EXPECT_EQ(list.src_extent(), (Interval{0, 999 * 96 + 32}));
  EXPECT_EQ(list.dst_extent(), (Interval{0, 32000}));
}

TEST(Runs, PairsOfTensorsDoNotJoin) {
  RunList list;
  append(list, {8}, 0, {4}, 0, {4}, 4);
  list.start_pair();
  append(list, {8}, 32, {4}, 32, {4}, 4);
  EXPECT_EQ(list.nests().size(), 2u);
}

TEST(Runs, OverflowIsRefusedAndAddsNothing) {
  const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
  RunList list;
  EXPECT_THROW(append(list, {huge}, 0, {8}, 0, {8}, 8), std::overflow_error);
  EXPECT_THROW(append(list, {4, 2}, 0, {huge, 4}, 0, {8, 4}, 4), std::overflow_error);
  EXPECT_THROW(append(list, {2, 2}, huge, {huge, 4}, 0, {16, 4}, 4), std::overflow_error);
  EXPECT_TRUE(list.nests().empty());
}

// Chunks of a random grid over random permuted tensors: any list of boxes copies exactly what the oracle copies.
TEST(Runs, RandomBoxesMatchTheOracle) {
  std::mt19937 random(20240607);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 20000; ++round) {
    const int64_t num_dims = draw(0, 4);
    const int64_t item_bytes = int64_t{1} << draw(0, 4);
    Sizes global(num_dims);
    for (int64_t& size : global) size = draw(1, 5);
    const auto random_strides = [&](bool gaps) {
      Sizes order(num_dims), strides(num_dims);
      for (int64_t dim = 0; dim < num_dims; ++dim) order[dim] = dim;
      if (draw(0, 1)) std::shuffle(order.begin(), order.end(), random);
      int64_t stride = item_bytes;
      for (int64_t index = num_dims; index-- > 0;) {
        if (gaps && draw(0, 3) == 0) stride += item_bytes * draw(0, 3);
        strides[order[index]] = stride;
        stride *= global[order[index]];
      }
      return strides;
    };
    const Sizes src_strides = random_strides(true);
    const Sizes dst_strides = random_strides(draw(0, 1) == 0);

    // Cut one dim into pieces and copy some of them, in order or not.
    std::vector<Chunk> chunks;
    const int64_t cut_dim = num_dims == 0 ? -1 : draw(0, num_dims - 1);
    if (cut_dim < 0) chunks.push_back({});
    for (int64_t at = 0; cut_dim >= 0 && at < global[cut_dim];) {
      const int64_t size = draw(1, global[cut_dim] - at);
      Chunk chunk{Sizes(num_dims, 0), global, {}};
      chunk.offsets[cut_dim] = at;
      chunk.sizes[cut_dim] = size;
      if (draw(0, 3) != 0) chunks.push_back(chunk);
      at += size;
    }
    if (draw(0, 3) == 0) std::shuffle(chunks.begin(), chunks.end(), random);

    RunList list;
    ByteMap expected;
    for (const Chunk& chunk : chunks) {
      int64_t src = 1024, dst = 512;
      for (int64_t dim = 0; dim < num_dims; ++dim) {
        src += chunk.offsets[dim] * src_strides[dim];
        dst += chunk.offsets[dim] * dst_strides[dim];
      }
      append(list, chunk.sizes, src, src_strides, dst, dst_strides, item_bytes);
      copy_box(expected, chunk.sizes, src, src_strides, dst, dst_strides, item_bytes);
    }
    ASSERT_EQ(bytes_of(list), expected) << "round " << round;
    ASSERT_EQ(list.num_bytes(), static_cast<int64_t>(expected.size()));
    if (!expected.empty()) {
      ASSERT_EQ(list.dst_extent(), (Interval{expected.begin()->first, expected.rbegin()->first + 1}));
    }
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
