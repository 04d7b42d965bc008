#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/noted_parts.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::core {
namespace {

const std::vector<std::vector<int64_t>> kChoices{{0}, {0, 1, Placement::kReplicated}};

// What stock notes of 7 x 3 on dp 3 x tp 2, both on dim 0.
std::vector<NotedPart> seven_rows() {
  return {{0, {0, 0}, {2, 3}, {2, 3}}, {1, {4, 0}, {1, 3}, {1, 3}}, {2, {2, 0}, {2, 3}, {2, 3}},
          {3, {5, 0}, {1, 3}, {1, 3}}, {4, {6, 0}, {1, 3}, {0, 3}}, {5, {7, 0}, {0, 3}, {1, 3}}};
}

TEST(NotedParts, AreWhereTheNestedReadingPutsThem) {
  const TruePlaces found = find_true_places({7, 3}, {3, 2}, kChoices, seven_rows());
  ASSERT_EQ(found.num_ways, 1U);
  std::vector<std::vector<int64_t>> places;
  for (const TruePlace& one : found.places) places.push_back({one.offsets[0], one.sizes[0], one.rank, one.part});
  EXPECT_EQ(places,
            (std::vector<std::vector<int64_t>>{{0, 2, 0, 0}, {2, 2, 2, 2}, {4, 1, 1, 1}, {5, 1, 3, 3}, {6, 1, 5, 5}}));
}

TEST(NotedParts, SayWhatNoPartHas) {
  std::vector<NotedPart> parts = seven_rows();
  parts.erase(parts.begin() + 3);
  const TruePlaces found = find_true_places({7, 3}, {3, 2}, kChoices, parts);
  ASSERT_EQ(found.num_ways, 1U);
  EXPECT_EQ(found.places[3].part, -1);
  EXPECT_EQ(found.places[3].rank, 3);
  EXPECT_EQ(found.places[4].part, 4);
}

TEST(NotedParts, AreNotExplainedByAnotherMesh) {
  EXPECT_EQ(find_true_places({7, 3}, {2, 3}, kChoices, seven_rows()).num_ways, 0U);
  EXPECT_EQ(find_true_places({7, 3}, {2, 2}, kChoices, seven_rows()).num_ways, 0U);  // which lacks ranks
  EXPECT_EQ(find_true_places({7, 3}, {3, 2}, std::vector<std::vector<int64_t>>{{0}, {}}, seven_rows()).num_ways, 0U);
  EXPECT_THROW(find_true_places({7, 3}, {6}, kChoices, seven_rows()), std::invalid_argument);
}

TEST(NotedParts, CanBeInDoubt) {
  // One row of one rank: tp may have cut either dim.
  const std::vector<NotedPart> parts{{0, {0, 0}, {1, 1}, {1, 1}}};
  EXPECT_EQ(find_true_places({2, 2}, {2, 2}, std::vector<std::vector<int64_t>>{{0, 1}, {0, 1}}, parts).num_ways, 2U);
}

}  // namespace
}  // namespace torchtitan_ext::core
