// Digests of values, equal for equal values on every rank.
//
// A value is a graph: containers and objects are nodes, what they hold are edges, and an object that is held twice is one
// node. Two values are equal where the trees are that one gets by following the edges, however the nodes are shared:
// x = [1], [x, x] and [[1], [1]] are equal, and so are a = [a] and b = [[b]]. So
//
// 1. each object becomes one node, whatever the number of paths that lead to it;
// 2. a node whose members all have a digest gets the digest of its label and of these: one pass, from the leaves up;
// 3. what is left leads to a cycle. These nodes get colours: all the same at first, then again and again the digest of
//    label and members' colours, until no round tells more nodes apart. Equal nodes have equal colours in every round,
//    so how many nodes stand for one value does not count. The value's digest is that of its colour and of the table
//    from each colour to the next: the smallest graph that unfolds to the same tree.
//
// Example: in a = [0, a] beside b = [0, [0, b]] all three lists have one colour in each round, and the second round tells
// no more apart than the first: both digests are those of a graph with one node.
//
// Steps 1 and 2 are linear in the number of objects and edges; 3 takes as many rounds as there are steps from a node to
// what tells it apart, which is few where pickle can follow at all.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace torchtitan_ext::core {

class ValueGraph {
 public:
  using Hash = std::function<std::string(std::string_view bytes)>;
  // The number of a node, or the bytes that stand for a value without members.
  using Member = std::variant<size_t, std::string>;

  // Digests are what `hash` makes of bytes.
  explicit ValueGraph(Hash hash) : hash_(std::move(hash)) {}

  // The number of a new node. Node 0 is the value itself.
  size_t add_node();

  // What a node is, and what it holds; `is_ordered` says whether the order of its members counts.
  void describe(size_t node, std::string label, std::vector<Member> members, bool is_ordered);

  // The digest of node 0. REQUIRES: each node has been described.
  std::string digest() const;

  // The digest of some parts and their lengths.
  std::string hash_parts(const std::vector<std::string_view>& parts) const;

 private:
  struct Node {
    std::string label;
    std::vector<Member> members;
    bool is_ordered = true;
  };

  // Given the names of a node's members.
  std::string digest_of(const Node& node, const std::vector<std::string>& names) const;
  // Per node; empty for those that lead to a cycle.
  std::vector<std::string> digests_from_leaves() const;
  std::string digest_of_cycles(const std::vector<std::string>& digests) const;

  Hash hash_;
  std::vector<Node> nodes_;
};

}  // namespace torchtitan_ext::core
