#include <gtest/gtest.h>

#include "core/option_gaps.h"

namespace torchtitan_ext::core {
namespace {

using Keys = std::vector<std::string>;

TEST(FindOptionGaps, SortsWhatACheckpointLacks) {
  const OptionGaps gaps =
      find_option_gaps({"model.w", "o.param_groups.a.w.lr", "o.param_groups.a.w.gone", "o.state.a.w.avg"},
                       {"model.new", "o.param_groups.a.w.lr", "o.param_groups.a.w.fused", "o.param_groups.c.lr",
                        "o.state.a.w.sum.left", "o.state.c.avg", "o.state.of_nothing.avg"});
  EXPECT_EQ(gaps.fillable, Keys{"o.param_groups.a.w.fused"});
  EXPECT_EQ(gaps.dropped, Keys{"o.param_groups.a.w.gone"});
  EXPECT_EQ(gaps.incomplete, Keys{"o.state.a.w.sum.left"});
  ASSERT_EQ(gaps.missing.size(), 1u);
  EXPECT_EQ(gaps.missing[0].first, "c");
  EXPECT_EQ(gaps.missing[0].second, (Keys{"o.param_groups.c.lr", "o.state.c.avg"}));
}

TEST(FindOptionGaps, AStateBelongsToTheLongestName) {
  const Keys options = {"param_groups.a.lr", "param_groups.a.b.lr"};
  EXPECT_EQ(find_option_gaps({options[1]}, {options[0], options[1], "state.a.b.avg"}).incomplete,
            Keys{"state.a.b.avg"});
  EXPECT_EQ(find_option_gaps({options[0]}, {options[0], options[1], "state.a.b.avg"}).missing[0].first, "a.b");
}

TEST(FindOptionGaps, ThePrefixIsTheShortest) {
  const OptionGaps gaps = find_option_gaps({}, {"x.param_groups.param_groups.w.lr", "param_groups.param_groups.w.lr"});
  ASSERT_EQ(gaps.missing.size(), 2u);
  EXPECT_EQ(gaps.missing[0].first, "w");
  EXPECT_EQ(gaps.missing[1].first, "param_groups.w");
}

TEST(FindOptionGaps, OtherKeysAreIgnored) {
  const OptionGaps gaps = find_option_gaps({"param_groups.lr", "param_groups..lr", "state.", "param_groups.w."},
                                           {"param_groups.w", "param_groups", "xparam_groups.w.lr", ""});
  EXPECT_TRUE(gaps.fillable.empty() && gaps.missing.empty() && gaps.incomplete.empty() && gaps.dropped.empty());
}

}  // namespace
}  // namespace torchtitan_ext::core
