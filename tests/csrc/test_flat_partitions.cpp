#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/flat_partitions.h"

namespace torchtitan_ext::core {
namespace {

std::vector<int64_t> positions_of(const Sizes& shape, const FlatBox& box) {
  const Sizes strides = row_major_strides(shape);
  std::vector<int64_t> found;
  for (int64_t number = 0; number < num_elements(box.sizes); ++number) {
    int64_t rest = number, position = 0;
    for (size_t dim = shape.size(); dim-- > 0;) {
      position += (box.offsets[dim] + rest % box.sizes[dim]) * strides[dim];
      rest /= box.sizes[dim];
    }
    found.push_back(position);
  }
  return found;
}

// Element by element: which position of which partition holds it.
std::vector<std::pair<size_t, int64_t>> places_of(const Sizes& shape, const std::vector<FlatBox>& boxes) {
  std::vector<std::pair<size_t, int64_t>> places(static_cast<size_t>(num_elements(shape)), {SIZE_MAX, -1});
  for (const FlatBox& box : boxes) {
    int64_t at = box.position;
    for (const int64_t position : positions_of(shape, box)) {
      auto& place = places[static_cast<size_t>(position)];
      EXPECT_EQ(place.first, SIZE_MAX) << "an element stands in two boxes";
      place = {box.partition, at++};
    }
  }
  return places;
}

TEST(FlatPartitions, CutsTheExampleOfTheHeader) {
  const std::vector<Sizes> shapes{{4, 5}};
  const FlatBoxes found = joined_boxes(shapes, {}, std::vector<int64_t>{13, 7});
  const std::vector<FlatBox> expected{
      {{0, 0}, {2, 5}, 0, 0}, {{2, 0}, {1, 3}, 0, 10}, {{2, 3}, {1, 2}, 1, 0}, {{3, 0}, {1, 5}, 1, 2}};
  EXPECT_EQ(found.at(0), expected);
}

TEST(FlatPartitions, JoinedOnesHoldEveryElementAtItsPosition) {
  const std::vector<Sizes> shapes{{3, 4, 5}, {}, {7}, {2, 0, 3}, {1, 1}, {2, 3, 2, 2}};
  const std::vector<int64_t> gaps{3, 0, 1, 2, 0, 0};
  for (int64_t length = 1; length < 40; ++length) {
    std::vector<int64_t> lengths;
    for (int64_t total = 0; total < 130; total += length) lengths.push_back(length);
    lengths.insert(lengths.begin() + 1, 0);  // a rank may hold nothing
    const FlatBoxes found = joined_boxes(shapes, gaps, lengths);
    int64_t begin = 0;
    for (size_t tensor = 0; tensor < shapes.size(); ++tensor) {
      int64_t flat = begin;
      for (const auto& [partition, position] : places_of(shapes[tensor], found[tensor])) {
        const auto number = static_cast<size_t>(flat / length);
        EXPECT_EQ(partition, number == 0 ? 0 : number + 1);
        EXPECT_EQ(position, flat++ % length);
      }
      begin += num_elements(shapes[tensor]) + gaps[tensor];
    }
    EXPECT_EQ(found[3], (std::vector<FlatBox>{{{0, 0, 0}, {2, 0, 3}, 0, 0}}));
  }
}

TEST(FlatPartitions, DealtOnesHoldEveryElementAtItsPosition) {
  const std::vector<Sizes> shapes{{3, 4, 5}, {}, {7}, {2, 0, 3}, {1, 1}, {2, 3, 2, 2}};
  for (int64_t num_partitions = 1; num_partitions < 9; ++num_partitions) {
    int64_t length = 0;
    for (const Sizes& shape : shapes) length += (num_elements(shape) + num_partitions - 1) / num_partitions;
    const std::vector<int64_t> lengths(static_cast<size_t>(num_partitions), length);
    const FlatBoxes found = dealt_boxes(shapes, lengths);
    int64_t begin = 0;
    for (size_t tensor = 0; tensor < shapes.size(); ++tensor) {
      const int64_t part = (num_elements(shapes[tensor]) + num_partitions - 1) / num_partitions;
      int64_t flat = 0;
      for (const auto& [partition, position] : places_of(shapes[tensor], found[tensor])) {
        EXPECT_EQ(partition, static_cast<size_t>(flat / part));
        EXPECT_EQ(position, begin + flat++ % part);
      }
      begin += part;
    }
  }
}

TEST(FlatPartitions, RefuseWhatTheyCannotHold) {
  const std::vector<Sizes> shapes{{3, 2}};
  const auto joined = [&](std::vector<int64_t> gaps, std::vector<int64_t> lengths) {
    return joined_boxes(shapes, gaps, lengths);
  };
  EXPECT_THROW(joined({}, {3, 2}), std::invalid_argument);
  EXPECT_THROW(joined({0, 0}, {6}), std::invalid_argument);
  EXPECT_THROW(joined({-1}, {6}), std::invalid_argument);
  EXPECT_THROW(dealt_boxes(shapes, std::vector<int64_t>{3, 4}), std::invalid_argument);
  EXPECT_THROW(dealt_boxes(shapes, {}), std::invalid_argument);
  EXPECT_THROW(dealt_boxes(std::vector<Sizes>{{-1, 2}}, std::vector<int64_t>{3}), std::invalid_argument);
  EXPECT_THROW(dealt_boxes(std::vector<Sizes>{{INT64_MAX, 2}}, std::vector<int64_t>{3}), std::overflow_error);
}

}  // namespace
}  // namespace torchtitan_ext::core
