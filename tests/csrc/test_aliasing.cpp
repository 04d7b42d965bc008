#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "core/aliasing.h"

namespace torchtitan_ext::core {
namespace {

TEST(Aliasing, MayOverlapItself) {
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
  return find_shared_memory(memories).first >= 0;
}

TEST(Aliasing, InterleavedColumnsDoNotShare) {
  EXPECT_FALSE(share({{0, {4, 2}, {4, 1}, 4}, {8, {4, 2}, {4, 1}, 4}}));
  EXPECT_TRUE(share({{0, {4, 3}, {4, 1}, 4}, {8, {4, 2}, {4, 1}, 4}}));
  EXPECT_FALSE(share({{0, {4}, {1}, 4}, {16, {4}, {1}, 4}}));
  EXPECT_TRUE(share({{0, {4}, {1}, 4}, {100, {4}, {1}, 4}, {12, {1}, {1}, 1}}));
  EXPECT_FALSE(share({{0, {4}, {1}, 4}, {4, {0}, {1}, 4}}));
}

TEST(Aliasing, RandomTensorsMatchByteSets) {
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

}  // namespace
}  // namespace torchtitan_ext::core
