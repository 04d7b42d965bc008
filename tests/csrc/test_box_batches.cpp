#include <gtest/gtest.h>

#include <random>
#include <set>
#include <stdexcept>

#include "core/box_batches.h"

namespace torchtitan_ext::core {
namespace {

std::vector<std::vector<BoxPart>> batches_of(const std::vector<SizedBox>& boxes, int64_t max_bytes,
                                             size_t max_parts = 100) {
  BoxBatches left(boxes, max_bytes, max_parts);
  std::vector<std::vector<BoxPart>> batches;
  for (auto batch = left.next(); !batch.empty(); batch = left.next()) batches.push_back(std::move(batch));
  EXPECT_TRUE(left.next().empty());
  return batches;
}

TEST(BoxBatches, AreCutAsTheirHeaderSays) {
  const auto batches = batches_of({{{{5}, {2}, {}}, 4}, {{{0, 1}, {1, 25}, {}}, 4}}, 64);
  const std::vector<std::vector<BoxPart>> expected{
      {{0, {5}, {2}, 0, 8, 0, true}}, {{1, {0, 1}, {1, 16}, 0, 64, 0, false}}, {{1, {0, 17}, {1, 9}, 64, 36, 0, true}}};
  EXPECT_EQ(batches, expected);
}

TEST(BoxBatches, HaveEachBoxWithoutElementsAndElementsThatAreTooLarge) {
  const std::vector<SizedBox> boxes{{{{0, 3}, {2, 0}, {}}, 8}, {{{}, {}, {}}, 16}, {{{0}, {2}, {}}, 16}};
  const std::vector<std::vector<BoxPart>> expected{{{0, {0, 3}, {2, 0}, 0, 0, 0, true}},
                                                   {{1, {}, {}, 0, 16, 0, true}},
                                                   {{2, {0}, {1}, 0, 16, 0, false}},
                                                   {{2, {1}, {1}, 16, 16, 0, true}}};
  EXPECT_EQ(batches_of(boxes, 8), expected);
  EXPECT_EQ(batches_of(boxes, 1 << 20, 1).size(), 3u);
  EXPECT_TRUE(batches_of({}, 8).empty());
  EXPECT_THROW(BoxBatches({}, 8, 0), std::invalid_argument);
  EXPECT_THROW(BoxBatches({{{{0}, {1}, {}}, 0}}, 8, 1), std::invalid_argument);
}

TEST(BoxBatches, HoldEachElementOnceAndFitIntoTheBuffer) {
  std::mt19937 random(3);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    std::vector<SizedBox> boxes(static_cast<size_t>(draw(1, 5)));
    for (SizedBox& one : boxes) {
      one.item_bytes = int64_t{1} << draw(0, 4);
      for (int64_t dim = draw(0, 3); dim-- > 0;) {
        one.box.offsets.push_back(draw(0, 9));
        one.box.sizes.push_back(draw(1, 9));
      }
    }
    const int64_t max_bytes = draw(16, 2000);
    const auto max_parts = static_cast<size_t>(draw(1, 6));
    size_t box = 0;
    int64_t first_byte = 0;
    for (const std::vector<BoxPart>& batch : batches_of(boxes, max_bytes, max_parts)) {
      EXPECT_LE(batch.size(), max_parts);
      int64_t end = 0;
      for (const BoxPart& part : batch) {
        ASSERT_EQ(part.box, box);
        EXPECT_EQ(part.first_byte, first_byte);
        EXPECT_EQ(part.num_bytes, num_elements(part.sizes) * boxes[box].item_bytes);
        EXPECT_TRUE(part.begin >= end && part.begin % 64 == 0);
        end = part.begin + part.num_bytes;
        EXPECT_LE(end, max_bytes);
        const Sizes strides = row_major_strides(boxes[box].box.sizes);
        int64_t position = 0;
        for (size_t dim = 0; dim < strides.size(); ++dim) {
          position += (part.offsets[dim] - boxes[box].box.offsets[dim]) * strides[dim];
        }
        EXPECT_EQ(position * boxes[box].item_bytes, first_byte);
        first_byte += part.num_bytes;
        EXPECT_EQ(part.is_last, first_byte == num_elements(boxes[box].box.sizes) * boxes[box].item_bytes);
        if (part.is_last) ++box, first_byte = 0;
      }
    }
    EXPECT_EQ(box, boxes.size());
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
