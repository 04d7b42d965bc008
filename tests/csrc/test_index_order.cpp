#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/element_hash.h"
#include "core/index_order.h"

namespace torchtitan_ext::core {
namespace {

using Indices = std::vector<int64_t>;

Indices indices_at(int64_t num_samples, uint64_t seed, uint64_t epoch, const Indices& places) {
  Indices indices(places.size());
  IndexOrder(num_samples, seed, epoch).indices_at(places, indices);
  return indices;
}

Indices all_places(int64_t num_samples) {
  Indices places(static_cast<size_t>(num_samples));
  std::iota(places.begin(), places.end(), 0);
  return places;
}

// The definition of the header, slow and obvious.
int64_t oracle(int64_t num_samples, uint64_t seed, uint64_t epoch, int64_t place) {
  const auto count = static_cast<uint64_t>(num_samples);
  uint64_t a = 2;
  while (a * a < count) a += 2;
  uint64_t b = 1;
  while (a * b < count) ++b;
  const uint64_t key = hash_word(hash_word(seed, 0), epoch);
  auto number = static_cast<uint64_t>(place);
  do {
    uint64_t left = number / b;
    uint64_t right = number % b;
    for (uint64_t round = 0; round < 24; round += 2) {
      left = (left + ((hash_word(hash_word(key, round), right) >> 32) * a >> 32)) % a;
      right = (right + ((hash_word(hash_word(key, round + 1), left) >> 32) * b >> 32)) % b;
    }
    number = left * b + right;
  } while (number >= count);
  return static_cast<int64_t>(number);
}

TEST(IndexOrder, EachIndexOnce) {
  for (int64_t count = 0; count <= 300; ++count) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Indices indices = indices_at(count, seed, 3, all_places(count));
      std::ranges::sort(indices);
      EXPECT_EQ(indices, all_places(count)) << count;
    }
  }
  for (const int64_t count : {1000, 4096, 65537, 100000}) {
    Indices indices = indices_at(count, 7, 0, all_places(count));
    std::ranges::sort(indices);
    EXPECT_EQ(indices, all_places(count)) << count;
  }
}

TEST(IndexOrder, IsWhatTheHeaderSays) {
  for (const int64_t count : {1, 2, 3, 5, 7, 16, 17, 1000, 123457}) {
    for (const uint64_t seed : {0ULL, 5ULL, ~0ULL}) {
      const Indices places = {0, count / 2, count - 1};
      const Indices indices = indices_at(count, seed, 2, places);
      for (size_t at = 0; at < places.size(); ++at) EXPECT_EQ(indices[at], oracle(count, seed, 2, places[at]));
    }
  }
}

// Checkpoints name this order: these numbers never change.
TEST(IndexOrder, Golden) {
  EXPECT_EQ(indices_at(10, 0, 0, all_places(10)), (Indices{6, 7, 0, 3, 9, 1, 5, 2, 4, 8}));
  EXPECT_EQ(indices_at(1000000000, 42, 7, {0, 1, 2, 500000000, 999999999}),
            (Indices{129250502, 52361177, 375021139, 727184324, 751425848}));
  EXPECT_EQ(indices_at(int64_t{1} << 62, 1, 1, {0, 1, (int64_t{1} << 62) - 1}),
            (Indices{4570655992341147881, 4160835287996700210, 1506672888237911705}));
}

TEST(IndexOrder, AnyPlacesInAnyNumber) {
  const Indices all = indices_at(1000, 1, 2, all_places(1000));
  for (size_t count = 0; count < 20; ++count) {
    Indices places;
    Indices expected;
    for (size_t at = 0; at < count; ++at) {
      places.push_back(static_cast<int64_t>(at * 37 % 1000));
      expected.push_back(all[at * 37 % 1000]);
    }
    EXPECT_EQ(indices_at(1000, 1, 2, places), expected);
  }
}

TEST(IndexOrder, SeedsAndEpochsHaveOrdersOfTheirOwn) {
  const Indices places = all_places(100);
  EXPECT_NE(indices_at(100, 0, 1, places), indices_at(100, 1, 0, places));
  EXPECT_NE(indices_at(100, 0, 0, places), indices_at(100, 0, 1, places));
  EXPECT_NE(indices_at(100, 0, 0, places), indices_at(100, 1, 0, places));
}

TEST(IndexOrder, NoSuchPlace) {
  EXPECT_THROW(indices_at(10, 0, 0, {3, 10}), std::out_of_range);
  EXPECT_THROW(indices_at(10, 0, 0, {-1}), std::out_of_range);
  EXPECT_THROW(indices_at(0, 0, 0, {0}), std::out_of_range);
  EXPECT_THROW(IndexOrder(-1, 0, 0), std::invalid_argument);
}

}  // namespace
}  // namespace torchtitan_ext::core
