#include "core/pickle_graph.h"

#include <cstring>

#include "core/check.h"

namespace torchtitan_ext::core {

using Id = PickleGraph::Id;
using Kind = PickleGraph::Kind;

// The stack machine. Operations have the names of CPython's `pickletools`.
class PickleMachine {
 public:
  explicit PickleMachine(PickleGraph& graph) : graph_(graph), data_(graph.data_) {}

  void run() {
    require(data_.size() < UINT32_MAX, "is larger than 4 GiB");
    require(byte() == 0x80, "does not begin as a pickle of protocol 2 or later");
    const uint8_t protocol = byte();
    require(protocol >= 2 && protocol <= 5, "has a protocol other than 2 to 5");
    empty_tuple_ = add({.kind = Kind::kTuple});
    // About what metadata comes to; memory that is not touched costs nothing.
    graph_.nodes_.reserve(data_.size() / 12);
    graph_.segments_.reserve(data_.size() / 16);
    graph_.member_ids_.reserve(data_.size() / 4);
    while (step(byte())) {
    }
    require(stack_.size() == 1 && marks_.empty(), "does not end with one value");
    require(at_ == data_.size(), "goes on behind its end");
    graph_.root_ = stack_.back();
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw std::invalid_argument(concat("pickle: at byte ", at_, " the stream ", what));
  }

  void require(bool condition, std::string_view what) const {
    if (!condition) fail(what);
  }

  // ---- the stream ----
  uint8_t byte() {
    require(at_ < data_.size(), "ends early");
    return static_cast<uint8_t>(data_[at_++]);
  }

  uint64_t unsigned_of(size_t num_bytes) {
    require(num_bytes <= data_.size() - at_, "ends early");
    uint64_t value = 0;
    std::memcpy(&value, data_.data() + at_, num_bytes);
    at_ += num_bytes;
    return value;
  }

  Id text_of(Kind kind, uint64_t length) {
    require(length <= data_.size() - at_, "ends within a text");
    const Id id = add({.kind = kind, .first = static_cast<Id>(length), .payload = at_});
    at_ += length;
    return id;
  }

  Id line() {
    const size_t end = data_.find('\n', at_);
    require(end != std::string_view::npos, "ends within a name");
    const Id id = text_of(Kind::kText, end - at_);
    ++at_;
    return id;
  }

  int64_t long_integer() {
    const uint8_t num_bytes = byte();
    require(num_bytes <= 8, "has an integer beyond int64");
    uint64_t value = unsigned_of(num_bytes);
    if (num_bytes > 0 && num_bytes < 8 && (value >> (8 * num_bytes - 1)) & 1) value |= ~uint64_t{0} << (8 * num_bytes);
    return static_cast<int64_t>(value);
  }

  // ---- the graph ----
  Id add(PickleGraph::Node node) {
    require(graph_.nodes_.size() < PickleGraph::kSmall, "has too many values");
    graph_.nodes_.push_back(node);
    return static_cast<Id>(graph_.nodes_.size() - 1);
  }

  void push(PickleGraph::Node node) { stack_.push_back(add(node)); }

  void push_integer(int64_t value) {
    if (value >= 0 && value < PickleGraph::kSmallEnd) {
      stack_.push_back(static_cast<Id>(value) | PickleGraph::kSmall);
    } else {
      push({.kind = Kind::kInt, .payload = static_cast<uint64_t>(value)});
    }
  }

  // Nothing but what takes the last mark away reaches below it.
  size_t last_mark() const { return marks_.empty() ? 0 : marks_.back(); }

  Id pop() {
    require(stack_.size() > last_mark(), "takes a value from an empty stack");
    const Id id = stack_.back();
    stack_.pop_back();
    return id;
  }

  Id top(Kind kind, std::string_view what) const {
    require(stack_.size() > last_mark() && graph_.kind(stack_.back()) == kind, what);
    return stack_.back();
  }

  // Moves the values above a place of the stack into a container.
  void extend(Id container, size_t from) {
    auto& node = graph_.nodes_[container];
    const auto count = static_cast<Id>(stack_.size() - from);
    if (count == 0) return;
    const auto segment = static_cast<Id>(graph_.segments_.size());
    graph_.segments_.push_back({static_cast<Id>(graph_.member_ids_.size()), count, PickleGraph::kAbsent});
    graph_.member_ids_.insert(graph_.member_ids_.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
    if (node.second == PickleGraph::kAbsent) {
      node.first = segment;
    } else {
      graph_.segments_[node.second].next = segment;
    }
    node.second = segment;
    stack_.resize(from);
  }

  size_t pop_mark() {
    require(!marks_.empty(), "has no mark to go back to");
    const size_t from = marks_.back();
    marks_.pop_back();
    return from;
  }

  void tuple(size_t count) {
    require(stack_.size() >= last_mark() + count, "takes a value from an empty stack");
    const size_t from = stack_.size() - count;
    const Id id = add({.kind = Kind::kTuple});
    extend(id, from);
    stack_.push_back(id);
  }

  // Members for the list or dict below them.
  void extend_below(Kind kind, size_t from, std::string_view what) {
    require(from > last_mark() && from <= stack_.size() && graph_.kind(stack_[from - 1]) == kind, what);
    require(kind != Kind::kDict || (stack_.size() - from) % 2 == 0, "has a key without a value");
    extend(stack_[from - 1], from);
  }

  void name(Id module, Id name) {
    require(graph_.kind(module) == Kind::kText && graph_.kind(name) == Kind::kText,
            "names something by other than texts");
    push({.kind = Kind::kName, .first = module, .second = name});
  }

  void call() {
    const Id arguments = top(Kind::kTuple, "calls without a tuple of arguments");
    pop();
    const Id callee = pop();
    const Kind kind = graph_.kind(callee);
    require(kind == Kind::kName || kind == Kind::kCall, "calls what is no name");
    push({.kind = Kind::kCall, .first = callee, .second = arguments});
  }

  void build() {
    const Id state = pop();
    const Id object = top(Kind::kCall, "gives a state to what is no object");
    require(graph_.nodes_[object].third == PickleGraph::kAbsent, "gives an object two states");
    graph_.nodes_[object].third = state;
  }

  void remember(uint64_t index) {
    require(stack_.size() > last_mark(), "remembers a value of an empty stack");
    require(index < data_.size(), "remembers under a number that is too large");
    if (index >= memo_.size()) memo_.resize(index + 1, PickleGraph::kAbsent);
    memo_[index] = stack_.back();
  }

  void recall(uint64_t index) {
    require(index < memo_.size() && memo_[index] != PickleGraph::kAbsent, "recalls what was not remembered");
    stack_.push_back(memo_[index]);
  }

  // Carries out one operation; false at the end of the stream.
  bool step(uint8_t operation) {
    switch (operation) {
      case '.':
        return false;  // STOP
      case 0x95:       // FRAME
        require(unsigned_of(8) <= data_.size(), "has a frame beyond its end");
        break;
      case '(':
        marks_.push_back(stack_.size());
        break;  // MARK
      case 'N':
        push({.kind = Kind::kNone});
        break;  // NONE
      case 0x88:
        push({.kind = Kind::kBool, .payload = 1});
        break;  // NEWTRUE
      case 0x89:
        push({.kind = Kind::kBool});
        break;  // NEWFALSE
      case 'K':
        push_integer(byte());
        break;  // BININT1
      case 'M':
        push_integer(static_cast<int64_t>(unsigned_of(2)));
        break;  // BININT2
      case 'J':
        push_integer(static_cast<int32_t>(unsigned_of(4)));
        break;  // BININT
      case 0x8a:
        push_integer(long_integer());
        break;     // LONG1
      case 'G': {  // BINFLOAT, big-endian
        uint64_t bits = 0;
        for (int index = 0; index < 8; ++index) bits = bits << 8 | byte();
        push({.kind = Kind::kFloat, .payload = bits});
        break;
      }
      case 0x8c:
        stack_.push_back(text_of(Kind::kText, byte()));
        break;  // SHORT_BINUNICODE
      case 'X':
        stack_.push_back(text_of(Kind::kText, unsigned_of(4)));
        break;  // BINUNICODE
      case 0x8d:
        stack_.push_back(text_of(Kind::kText, unsigned_of(8)));
        break;  // BINUNICODE8
      case 'C':
        stack_.push_back(text_of(Kind::kBytes, byte()));
        break;  // SHORT_BINBYTES
      case 'B':
        stack_.push_back(text_of(Kind::kBytes, unsigned_of(4)));
        break;  // BINBYTES
      case 0x8e:
        stack_.push_back(text_of(Kind::kBytes, unsigned_of(8)));
        break;  // BINBYTES8
      case ')':
        stack_.push_back(empty_tuple_);
        break;  // EMPTY_TUPLE
      case 0x85:
        tuple(1);
        break;  // TUPLE1
      case 0x86:
        tuple(2);
        break;  // TUPLE2
      case 0x87:
        tuple(3);
        break;  // TUPLE3
      case 't':
        tuple(stack_.size() - pop_mark());
        break;  // TUPLE
      case ']':
        push({.kind = Kind::kList});
        break;  // EMPTY_LIST
      case '}':
        push({.kind = Kind::kDict});
        break;  // EMPTY_DICT
      case 'a':
        append(1, Kind::kList, "appends to what is no list");
        break;  // APPEND
      case 's':
        append(2, Kind::kDict, "sets a key of what is no dict");
        break;  // SETITEM
      case 'e':
        extend_below(Kind::kList, pop_mark(), "appends to what is no list");
        break;  // APPENDS
      case 'u':
        extend_below(Kind::kDict, pop_mark(), "sets a key of what is no dict");
        break;     // SETITEMS
      case 'c': {  // GLOBAL
        const Id module = line();
        name(module, line());
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const Id of_name = pop();
        name(pop(), of_name);
        break;
      }
      case 'R':  // REDUCE
      case 0x81:
        call();
        break;  // NEWOBJ
      case 'b':
        build();
        break;  // BUILD
      case 'q':
        remember(byte());
        break;  // BINPUT
      case 'r':
        remember(unsigned_of(4));
        break;  // LONG_BINPUT
      case 0x94:
        remember(memo_.size());
        break;  // MEMOIZE
      case 'h':
        recall(byte());
        break;  // BINGET
      case 'j':
        recall(unsigned_of(4));
        break;  // LONG_BINGET
      default:
        fail(concat("has operation ", int{operation}, ", which plain data does not need"));
    }
    return true;
  }

  void append(size_t count, Kind kind, std::string_view what) {
    require(stack_.size() > count, what);
    extend_below(kind, stack_.size() - count, what);
  }

  PickleGraph& graph_;
  std::string_view data_;
  size_t at_ = 0;
  Id empty_tuple_ = 0;
  std::vector<Id> stack_;
  std::vector<size_t> marks_;
  std::vector<Id> memo_;
};

PickleGraph::PickleGraph(std::string_view data) : data_(data) { PickleMachine(*this).run(); }

std::vector<Id> PickleGraph::members(Id id) const {
  std::vector<Id> found;
  for (Id at = nodes_[id].first; at != kAbsent; at = segments_[at].next) {
    const auto begin = member_ids_.begin() + segments_[at].begin;
    found.insert(found.end(), begin, begin + segments_[at].count);
  }
  return found;
}

std::span<const Id> PickleGraph::members(Id id, std::vector<Id>& scratch) const {
  const Node& node = nodes_[id];
  if (node.first == kAbsent) return {};
  if (node.first == node.second) {
    return std::span(member_ids_).subspan(segments_[node.first].begin, segments_[node.first].count);
  }
  scratch = members(id);
  return scratch;
}

size_t PickleGraph::num_members(Id id) const {
  size_t count = 0;
  for (Id at = nodes_[id].first; at != kAbsent; at = segments_[at].next) count += segments_[at].count;
  return count;
}

Id PickleGraph::find(std::span<const Id> pairs, std::string_view key) const {
  Id found = kAbsent;
  for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
    if (kind(pairs[index]) == Kind::kText && text(pairs[index]) == key) found = pairs[index + 1];
  }
  return found;
}

}  // namespace torchtitan_ext::core
