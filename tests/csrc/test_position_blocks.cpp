#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/position_blocks.h"

namespace torchtitan_ext::core {
namespace {

TEST(PositionBlocks, CodesWhatTheHeaderShows) {
  const std::vector<int64_t> positions{3, 9, 65536, 65537, 65538};
  const PositionBlocks coded = PositionBlocks::encode(positions);
  EXPECT_EQ(std::vector<int32_t>(coded.blocks().begin(), coded.blocks().end()), (std::vector<int32_t>{0, 2, 1, -3}));
  EXPECT_EQ(std::vector<uint16_t>(coded.offsets().begin(), coded.offsets().end()), (std::vector<uint16_t>{3, 9, 0}));
  EXPECT_EQ(coded.decode(), positions);
}

TEST(PositionBlocks, DecodesWhatItEncoded) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> positions;
    int64_t next = static_cast<int64_t>(random() % 200'000);
    const int64_t step = int64_t{1} << (random() % 18);
    for (uint64_t left = random() % 3'000; left > 0; --left) {
      positions.push_back(next);
      next += 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(step));
    }
    const PositionBlocks coded = PositionBlocks::encode(positions);
    EXPECT_EQ(coded.decode(), positions);
    const PositionBlocks again({coded.blocks().begin(), coded.blocks().end()},
                               {coded.offsets().begin(), coded.offsets().end()});
    EXPECT_EQ(again.decode(), positions);
    EXPECT_EQ(again.size(), static_cast<int64_t>(positions.size()));
  }
}

TEST(PositionBlocks, RefusesWhatNoEncoderWrites) {
  const auto refuses = [](std::vector<int32_t> blocks, std::vector<uint16_t> offsets) {
    EXPECT_THROW(PositionBlocks(std::move(blocks), std::move(offsets)), std::invalid_argument);
  };
  refuses({0}, {});
  refuses({0, 0}, {});
  refuses({0, 2}, {1});
  refuses({0, 1}, {1, 2});
  refuses({0, 2}, {5, 5});
  refuses({0, 2}, {6, 5});
  refuses({1, 1, 1, 1}, {1, 2});
  refuses({-1, 1}, {1});
  refuses({0, -3}, {65534});
  refuses({0, -65537}, {0});
  refuses({0, std::numeric_limits<int32_t>::min()}, {0});
  EXPECT_THROW(PositionBlocks::encode(std::vector<int64_t>{4, 4}), std::invalid_argument);
  EXPECT_THROW(PositionBlocks::encode(std::vector<int64_t>{-1}), std::invalid_argument);
  EXPECT_THROW(PositionBlocks::encode(std::vector<int64_t>{int64_t{1} << 62}), std::invalid_argument);
}

TEST(SelectPositions, FindsWhatABoxHas) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 500; ++round) {
    Sizes shape, offsets, sizes;
    for (uint64_t dims = random() % 5; dims > 0; --dims) {
      shape.push_back(1 + static_cast<int64_t>(random() % 7));
      offsets.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(shape.back())));
      sizes.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(shape.back() - offsets.back() + 1)));
      if (random() % 3 == 0) offsets.back() = 0, sizes.back() = shape.back();
    }
    std::vector<int64_t> positions, in_box, indices;
    for (int64_t position = 0; position < num_elements(shape); ++position) {
      if (random() % 2 == 0) continue;
      positions.push_back(position);
      int64_t rest = position, stride = 1, place = 0;
      bool is_inside = true;
      for (size_t dim = shape.size(); dim-- > 0;) {
        const int64_t at = rest % shape[dim] - offsets[dim];
        is_inside = is_inside && at >= 0 && at < sizes[dim];
        place += at * stride;
        stride *= sizes[dim];
        rest /= shape[dim];
      }
      if (!is_inside) continue;
      in_box.push_back(place);
      indices.push_back(static_cast<int64_t>(positions.size()) - 1);
    }
    const Selection found = select_positions(positions, shape, offsets, sizes);
    EXPECT_EQ(found.in_box, in_box);
    EXPECT_EQ(found.indices, indices);
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
