#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/value_graph.h"

namespace torchtitan_ext::core {
namespace {

ValueGraph new_graph() {
  return ValueGraph([](std::string_view bytes) { return std::to_string(std::hash<std::string_view>()(bytes)); });
}

// Lists that hold each other in a ring, each after an atom of its own; node 0 is the first.
std::string digest_of_ring(const std::vector<std::string>& atoms) {
  ValueGraph graph = new_graph();
  for (size_t node = 0; node < atoms.size(); ++node) graph.add_node();
  for (size_t node = 0; node < atoms.size(); ++node) {
    graph.describe(node, "list", {atoms[node], (node + 1) % atoms.size()}, true);
  }
  return graph.digest();
}

// A node with two members of one label, which hold these atoms.
std::string digest_of_pair(const std::string& first, const std::string& second, bool is_ordered) {
  ValueGraph graph = new_graph();
  for (int node = 0; node < 3; ++node) graph.add_node();
  graph.describe(0, "pair", {size_t{1}, size_t{2}}, is_ordered);
  graph.describe(1, "list", {first}, true);
  graph.describe(2, "list", {second}, true);
  return graph.digest();
}

TEST(ValueGraph, AMemberThatIsHeldTwiceCountsAsTwoEqualMembers) {
  ValueGraph graph = new_graph();
  graph.add_node();
  graph.add_node();
  graph.describe(0, "pair", {size_t{1}, size_t{1}}, true);
  graph.describe(1, "list", {"a"}, true);
  EXPECT_EQ(graph.digest(), digest_of_pair("a", "a", true));
}

TEST(ValueGraph, OrderCountsOnlyWhereItIsSaidTo) {
  EXPECT_NE(digest_of_pair("a", "b", true), digest_of_pair("b", "a", true));
  EXPECT_EQ(digest_of_pair("a", "b", false), digest_of_pair("b", "a", false));
}

TEST(ValueGraph, CyclesAreEqualWhereTheyUnfoldAlike) {
  EXPECT_EQ(digest_of_ring({"a"}), digest_of_ring({"a", "a", "a"}));
  EXPECT_EQ(digest_of_ring({"a", "b"}), digest_of_ring({"a", "b", "a", "b"}));
  EXPECT_NE(digest_of_ring({"a", "b"}), digest_of_ring({"b", "a"}));
  EXPECT_NE(digest_of_ring({"a", "a", "b"}), digest_of_ring({"a", "b"}));
}

}  // namespace
}  // namespace torchtitan_ext::core
