// The values of a pickle stream as data: nothing is looked up, imported, called or run.
//
// A pickle is a program for a small stack machine. Reading it here builds a graph of nodes instead of Python objects: a
// class is a name, a call is a node that names what would be called and with which arguments, and whoever reads the
// graph decides which names mean something to it. Example: `torch.Size((2, 3))` comes out as
//   call  of name "torch" "Size"  with tuple(tuple(2, 3)).
//
// Every operation of the stream takes at least a byte and makes at most one node, so memory is bounded by the length of
// the data. Strings are views into it. Small integers, most of what metadata holds, are ids without a node.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace torchtitan_ext::core {

class PickleGraph {
 public:
  using Id = uint32_t;
  static constexpr Id kAbsent = UINT32_MAX;
  enum class Kind : uint8_t { kNone, kBool, kInt, kFloat, kText, kBytes, kName, kTuple, kList, kDict, kCall };

  // Reads a stream of protocol 2 to 5. Throws std::invalid_argument with the byte at which it stopped: a stream that
  // ends early, an operation that plain data does not need, an integer beyond int64, data behind the end.
  // `data` must outlive the graph.
  explicit PickleGraph(std::string_view data);

  Id root() const { return root_; }
  size_t num_nodes() const { return nodes_.size(); }
  Kind kind(Id id) const { return (id & kSmall) != 0 ? Kind::kInt : nodes_[id].kind; }

  // Of kBool and kInt.
  int64_t integer(Id id) const {
    return (id & kSmall) != 0 ? int64_t{id & ~kSmall} : std::bit_cast<int64_t>(nodes_[id].payload);
  }
  double number(Id id) const { return std::bit_cast<double>(nodes_[id].payload); }  // of kFloat
  std::string_view text(Id id) const {                                              // of kText and kBytes
    return data_.substr(nodes_[id].payload, nodes_[id].first);
  }

  // Of a kName, for example "torch.distributed.checkpoint.metadata" and "Metadata".
  std::string_view module_of(Id id) const { return text(nodes_[id].first); }
  std::string_view name_of(Id id) const { return text(nodes_[id].second); }

  // Members of a kTuple or kList; of a kDict its keys and values in turn.
  std::vector<Id> members(Id id) const;
  // The same without a copy where they were added at once; others are put together in `scratch`.
  std::span<const Id> members(Id id, std::vector<Id>& scratch) const;
  size_t num_members(Id id) const;

  // Of a kCall: what is called (a name, or another call), the tuple of arguments, and the state that the result is
  // given afterwards, or kAbsent. An object made from its class without arguments is a call of the class.
  Id callee(Id id) const { return nodes_[id].first; }
  Id arguments(Id id) const { return nodes_[id].second; }
  Id state(Id id) const { return nodes_[id].third; }

  // The value of a text key among the members of a kDict, the last one where it stands there twice; kAbsent where there
  // is none.
  Id find(std::span<const Id> pairs, std::string_view key) const;

 private:
  friend class PickleMachine;

  // Integers of the lower 31 bits stand in the id itself; kAbsent is none of them.
  static constexpr Id kSmall = Id{1} << 31;
  static constexpr Id kSmallEnd = ~kSmall;

  // What the fields hold depends on the kind: texts their length and (payload) where they begin; names two texts;
  // tuples, lists and dicts their first and last segment; calls callee, arguments and state.
  struct Node {
    Kind kind = Kind::kNone;
    Id first = kAbsent, second = kAbsent, third = kAbsent;
    uint64_t payload = 0;
  };

  // Members that were added together: a list grows in steps of up to a thousand.
  struct Segment {
    Id begin, count, next;
  };

  std::string_view data_;
  std::vector<Node> nodes_;
  std::vector<Segment> segments_;
  std::vector<Id> member_ids_;
  Id root_ = kAbsent;
};

}  // namespace torchtitan_ext::core
