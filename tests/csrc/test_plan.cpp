#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "core/plan.h"

namespace torchtitan_ext::core {
namespace {

TEST(AssignWriters, BalancesBytesAmongHolders) {
  std::vector<ReplicatedShard> shards;
  for (int64_t size = 1; size <= 100; ++size) shards.push_back({{0, 1, 2, 3}, size});
  std::vector<int64_t> load_bytes(4, 0);
  const auto writers = assign_writers(shards, 4);
  for (size_t index = 0; index < shards.size(); ++index) load_bytes[writers[index]] += shards[index].num_bytes;
  const auto [least, most] = std::minmax_element(load_bytes.begin(), load_bytes.end());
  EXPECT_LE(*most - *least, 100);
}

TEST(AssignWriters, OnlyHoldersWriteAndTiesGoToTheLowestRank) {
  const std::vector<ReplicatedShard> shards{{{2}, 10}, {{1, 2}, 5}, {{0, 1}, 0}};
  EXPECT_EQ(assign_writers(shards, 3), (std::vector<int64_t>{2, 1, 0}));
  EXPECT_THROW(assign_writers(std::vector<ReplicatedShard>{{{}, 1}}, 1), std::invalid_argument);
  EXPECT_THROW(assign_writers(std::vector<ReplicatedShard>{{{1}, 1}}, 1), std::invalid_argument);
}

}  // namespace
}  // namespace torchtitan_ext::core
