#include <gtest/gtest.h>

#include <limits>

#include "core/flat_parts.h"

namespace torchtitan_ext::core {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(FlatParts, TakesWhatLiesInTheBuffer) {
  EXPECT_EQ(why_no_part({0, 24, 4, {2, 3}}, 24), "");
  EXPECT_EQ(why_no_part({8, 16, 16, {}}, 24), "");
  EXPECT_EQ(why_no_part({24, 0, 4, {0, 7}}, 24), "");
}

TEST(FlatParts, RefusesWhatDoesNot) {
  EXPECT_EQ(why_no_part({1, 24, 4, {2, 3}}, 24), "it has 24 bytes from byte 1, the buffer has 24");
  EXPECT_EQ(why_no_part({kMost, 24, 4, {2, 3}}, kMost),
            "it has 24 bytes from byte 9223372036854775807, the buffer has "
            "9223372036854775807");
  EXPECT_EQ(why_no_part({25, 0, 4, {0}}, 24), "it has 0 bytes from byte 25, the buffer has 24");
  EXPECT_EQ(why_no_part({0, 20, 4, {2, 3}}, 24), "its elements are 24 bytes, and 20 are given");
  EXPECT_EQ(why_no_part({0, 0, 4, {-1}}, 24), "it has a dim of -1 elements");
  EXPECT_EQ(why_no_part({0, -4, 4, {1}}, 24), "a negative number stands for bytes");
  EXPECT_EQ(why_no_part({0, 0, 8, {kMost, 0, 4}}, 24), "it has more elements than can be counted");
}

}  // namespace
}  // namespace torchtitan_ext::core
