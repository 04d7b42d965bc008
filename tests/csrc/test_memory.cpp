#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "core/memory.h"

namespace torchtitan_ext::core {
namespace {

TEST(MayOverlapItself, Examples) {
  const auto overlaps = [](const Sizes& sizes, const Sizes& strides) { return may_overlap_itself(sizes, strides); };
  EXPECT_FALSE(overlaps({}, {}));
  EXPECT_FALSE(overlaps({3, 4}, {4, 1}));
  EXPECT_FALSE(overlaps({3, 4}, {1, 3}));
  EXPECT_FALSE(overlaps({3, 1}, {1, 0}));
  EXPECT_FALSE(overlaps({3, 0}, {0, 0}));
  EXPECT_TRUE(overlaps({3, 4}, {0, 1}));
  EXPECT_TRUE(overlaps({3, 4}, {3, 1}));
  EXPECT_TRUE(overlaps({2, 2}, {1, 1}));
}

struct Tensor {
  uintptr_t address;
  Sizes sizes;
  Sizes strides;
  int64_t item_bytes;
};

bool share(const std::vector<Tensor>& tensors) {
  std::vector<Memory> memories;
  for (const Tensor& tensor : tensors) {
    memories.push_back({tensor.address, tensor.sizes, tensor.strides, tensor.item_bytes});
  }
  return find_shared_memory(memories).has_value();
}

TEST(FindSharedMemory, InterleavedColumnsDoNotShare) {
  EXPECT_FALSE(share({{0, {4, 2}, {4, 1}, 4}, {8, {4, 2}, {4, 1}, 4}}));
  EXPECT_TRUE(share({{0, {4, 3}, {4, 1}, 4}, {8, {4, 2}, {4, 1}, 4}}));
  EXPECT_FALSE(share({{0, {4}, {1}, 4}, {16, {4}, {1}, 4}}));
  EXPECT_TRUE(share({{0, {4}, {1}, 4}, {100, {4}, {1}, 4}, {12, {1}, {1}, 1}}));
  EXPECT_FALSE(share({{0, {4}, {1}, 4}, {4, {0}, {1}, 4}}));
}

TEST(FindSharedMemory, RandomTensorsMatchByteSets) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int num_sharing = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<Tensor> tensors;
    std::multiset<int64_t> bytes;
    for (int64_t count = draw(2, 4); count-- > 0;) {
      const Tensor tensor{static_cast<uintptr_t>(draw(0, 40)), {draw(0, 3), draw(1, 3)}, {draw(3, 6), 1}, draw(1, 2)};
      for (int64_t row = 0; row < tensor.sizes[0]; ++row) {
        for (int64_t column = 0; column < tensor.sizes[1] * tensor.item_bytes; ++column) {
          bytes.insert(static_cast<int64_t>(tensor.address) + row * tensor.strides[0] * tensor.item_bytes + column);
        }
      }
      tensors.push_back(tensor);
    }
    const bool expected = std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end();
    num_sharing += expected;
    ASSERT_EQ(share(tensors), expected) << "round " << round;
  }
  EXPECT_GT(num_sharing, 1000);
  EXPECT_LT(num_sharing, 19000);
}

constexpr int64_t kMany = int64_t{5} << 20;  // rows: more runs than are listed

TEST(FindSharedMemory, InterleavedTensorsOfManyRunsDoNotShare) {
  EXPECT_FALSE(share({{0, {kMany}, {2}, 4}, {4, {kMany}, {2}, 4}}));  // real and imaginary part
  EXPECT_TRUE(share({{0, {kMany}, {2}, 4}, {4, {kMany}, {2}, 4}, {3, {1}, {1}, 2}}));
  EXPECT_FALSE(share({{0, {kMany, 3}, {10, 1}, 2}, {6, {kMany, 4}, {10, 1}, 2}, {14, {kMany, 3}, {10, 1}, 2}}));
  EXPECT_TRUE(share({{0, {kMany, 3}, {10, 1}, 2}, {6, {kMany, 5}, {10, 1}, 2}, {14, {kMany, 3}, {10, 1}, 2}}));
  EXPECT_FALSE(share({{0, {kMany}, {2}, 4}, {4, {kMany / 2}, {4}, 4}}));  // every second, every fourth
  EXPECT_TRUE(share({{0, {kMany}, {2}, 4}, {12, {kMany / 3}, {3}, 4}}));
}

// The same as the random tensors above, repeated along an outer dim so often that runs are not listed.
TEST(FindSharedMemory, RandomTensorsOfManyRunsMatchByteSets) {
  std::mt19937 random(8);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int num_sharing = 0;
  for (int round = 0; round < 20000; ++round) {
    constexpr int64_t kPeriod = 40;  // bytes: what a tensor repeats at, and more than an inner part of it spans
    std::vector<Tensor> tensors;
    std::multiset<int64_t> bytes;  // modulo the period: far from the ends any two that are equal meet
    for (int64_t count = draw(2, 3); count-- > 0;) {
      const int64_t item = draw(1, 2), inner = draw(1, 3), stride = draw(2, 5);
      const Tensor tensor{static_cast<uintptr_t>(draw(0, 30)), {kMany, inner}, {kPeriod / item, stride}, item};
      for (int64_t index = 0; index < inner; ++index) {
        for (int64_t byte = 0; byte < item; ++byte) {
          bytes.insert((static_cast<int64_t>(tensor.address) + index * stride * item + byte) % kPeriod);
        }
      }
      tensors.push_back(tensor);
    }
    const bool expected = std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end();
    num_sharing += expected;
    ASSERT_EQ(share(tensors), expected) << "round " << round;
  }
  EXPECT_GT(num_sharing, 1000);
  EXPECT_LT(num_sharing, 19000);
}

TEST(FindSharedMemory, AnExpandedTensorIsItsOneRow) {
  EXPECT_FALSE(share({{0, {kMany, 3}, {0, 2}, 4}, {4, {3}, {2}, 4}}));
  EXPECT_TRUE(share({{0, {kMany, 3}, {0, 2}, 4}, {8, {3}, {2}, 4}}));
}

// Every range of a permuted tensor, there and back, against the elements in row-major order.
TEST(AppendRange, EveryRange) {
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> cases = {
      {{}, {}}, {{7}, {1}}, {{7}, {3}}, {{3, 4}, {1, 3}}, {{2, 3, 4}, {1, 8, 2}}, {{2, 1, 5}, {40, 7, 2}}};
  for (const auto& [sizes, strides] : cases) {
    const int64_t count = num_elements(sizes);
    std::vector<int16_t> memory(200);
    for (size_t index = 0; index < memory.size(); ++index) memory[index] = static_cast<int16_t>(index);
    std::vector<int16_t> row_major;
    for (int64_t index = 0; index < count; ++index) {
      int64_t rest = index, offset = 0;
      for (size_t dim = sizes.size(); dim-- > 0; rest /= sizes[dim]) offset += rest % sizes[dim] * strides[dim];
      row_major.push_back(memory[offset]);
    }
    for (int64_t first = 0; first <= count; ++first) {
      for (int64_t last = first; last <= count; ++last) {
        RunList pack, unpack;
        append_range(pack, {0, sizes, strides, 2}, 0, first, last, true);
        append_range(unpack, {0, sizes, strides, 2}, 0, first, last, false);
        std::vector<int16_t> buffer(count + 1, -1), back = memory;
        for (const auto& run : pack.enumerate()) {
          std::memcpy(reinterpret_cast<char*>(buffer.data()) + run.dst_bytes,
                      reinterpret_cast<const char*>(memory.data()) + run.src_bytes, run.num_bytes);
        }
        const std::vector<int16_t> expected(row_major.begin() + first, row_major.begin() + last);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), buffer.begin()));
        ASSERT_EQ(buffer[last - first], -1);
        for (int16_t& value : back) {
          if (std::find(expected.begin(), expected.end(), value) != expected.end()) value = -2;
        }
        for (const auto& run : unpack.enumerate()) {
          std::memcpy(reinterpret_cast<char*>(back.data()) + run.dst_bytes,
                      reinterpret_cast<const char*>(buffer.data()) + run.src_bytes, run.num_bytes);
        }
        ASSERT_EQ(back, memory);
      }
    }
  }
}

// The undefined-behaviour sanitizer speaks up where a stride that counts for nothing is multiplied.
TEST(AppendRange, DimsOfSizeOneMayHaveAnyStride) {
  const Sizes sizes{1, 3, 1, 2}, strides{INT64_MAX, 4, INT64_MAX / 2, 1};
  RunList runs;
  append_range(runs, {0, sizes, strides, 8}, 0, 1, 5, true);
  EXPECT_EQ(runs.num_bytes(), 32);
  EXPECT_EQ(runs.src_extent(), (Interval{8, 72}));
}

}  // namespace
}  // namespace torchtitan_ext::core
