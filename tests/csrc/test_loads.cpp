#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "core/loads.h"

namespace torchtitan_ext::core {
namespace {

TEST(Loads, OwnMemoryThenTheHostThenTheFewestBytes) {
  Loads loads({0, 0, 1, 1}, {5, 1, 1, 9});
  const std::vector<int64_t> all = {0, 1, 2, 3};
  EXPECT_EQ(loads.bytes_of_host(0), 6);
  EXPECT_EQ(loads.best(all), 1u);
  EXPECT_EQ(loads.best(all, 3), 3u);
  const std::vector<int64_t> others = {0, 1, 2};
  EXPECT_EQ(loads.best(others, 3), 2u);
  loads.add(2, 10);
  EXPECT_EQ(loads.best(others, 3), 2u);  // however much it has: it is on the host
  EXPECT_EQ(loads.best(others), 1u);
  loads.add(1, 4);
  EXPECT_EQ(loads.best(others), 0u);  // of equal ones the lowest
  EXPECT_THROW(Loads({0, 1}, {1}), std::invalid_argument);
  EXPECT_THROW(loads.add(0, std::numeric_limits<int64_t>::max()), std::overflow_error);
}

TEST(Loads, ADealerTakesTheBestOfThemEachTime) {
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    const size_t num_ranks = 1 + random() % 12;
    std::vector<uint32_t> hosts(num_ranks);
    std::vector<int64_t> bytes(num_ranks);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      hosts[rank] = random() % 4;
      bytes[rank] = static_cast<int64_t>(random() % 20);
    }
    Loads loads(hosts, bytes);
    std::vector<int64_t> ranks;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      if (random() % 3 > 0) ranks.push_back(static_cast<int64_t>(rank));
    }
    if (ranks.empty()) ranks.push_back(0);
    std::ranges::shuffle(ranks, random);
    Dealer dealer(loads, ranks);
    for (int thing = 0; thing < 20; ++thing) {
      const int64_t taken = dealer.take(3);
      EXPECT_EQ(taken, ranks[loads.best(ranks)]);
      loads.add(taken, 3);
    }
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
