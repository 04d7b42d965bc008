#include "core/torch_pickle.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Steps that a pickle may take beyond one for each of its operations: to hash tuples within each other, to look at the
// arguments of calls, which may be the same ones again, and to copy names. So many take about a second; honest pickles
// take fewer than they have bytes.
constexpr uint64_t kFewestSteps = 1 << 24;
constexpr uint64_t kStepsPerByte = 16;

constexpr const char* kManyArguments = "calls have so many arguments, or so long ones, that it takes too long to read";

constexpr uint64_t kMost = uint64_t{1} << 62;  // sums of two fit

struct EndlessPickle : std::invalid_argument {
  using invalid_argument::invalid_argument;
};

enum class Kind : uint8_t { kAnything, kInt, kText, kName, kStorage, kTuple, kList, kRange };

// `at` depends on the kind: the number of a kInt, of the members of a kRange, where a kText begins in the data, the index of a container, name or
// storage among its like.
struct Value {
  Kind kind = Kind::kAnything;
  uint32_t length = 0;  // of a kText
  int64_t at = 0;
};

struct Container {
  std::vector<Value> members;
  uint64_t cost = 1;  // to hash it
};

struct Name {
  std::string_view module, name;
};

struct Storage {
  std::string_view name, storage_class;
};

class Machine {
 public:
  // Reads one pickle that begins at `at`. Without `tensors`, persistent ids have no meaning.
  Machine(std::string_view data, size_t at, std::vector<PickledTensor>* tensors)
      : data_(data), at_(at), num_left_(kFewestSteps + kStepsPerByte * data.size()), tensors_(tensors) {
    containers_.emplace_back();  // the empty tuple
  }

  // Returns where the pickle ends.
  size_t run() {
    while (step(static_cast<uint8_t>(bytes(1)[0]))) {
    }
    return at_;
  }

 private:
  static void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  }

  // ---- the stream ----
  std::string_view bytes(uint64_t count) {
    require(count <= data_.size() - at_, "it ends early");
    const std::string_view found = data_.substr(at_, count);
    at_ += count;
    return found;
  }

  uint64_t number(size_t num_bytes) {
    uint64_t value = 0;
    std::memcpy(&value, bytes(num_bytes).data(), num_bytes);
    return value;
  }

  // The length of a text, of bytes or of an integer, which begins with it.
  uint64_t length_of(uint8_t operation) {
    const bool is_long = operation == 0x8d || operation == 0x8e || operation == 0x96;
    const bool is_short = operation == 'U' || operation == 0x8c || operation == 'C' || operation == 0x8a;
    return number(is_long ? 8 : is_short ? 1 : 4);
  }

  std::string_view line() {
    const size_t end = data_.find('\n', at_);
    require(end != std::string_view::npos, "it ends early");
    const std::string_view found = bytes(end - at_);
    ++at_;
    return found;
  }

  // A number as text, such as "12" and "12L".
  void push_digits(std::string_view text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool is_number = error == std::errc() && (end == text.data() + text.size() || *end == 'L');
    push(is_number ? Value{Kind::kInt, 0, value} : Value{});
  }

  // Little-endian with a sign; what int64 does not hold is no size of a tensor.
  void push_integer(std::string_view little) {
    uint64_t value = 0;
    if (little.size() > sizeof value) return push({});
    std::memcpy(&value, little.data(), little.size());
    const bool is_negative = !little.empty() && (little.back() & 0x80) != 0;
    if (is_negative && little.size() < sizeof value) value |= ~uint64_t{0} << (8 * little.size());
    push({Kind::kInt, 0, static_cast<int64_t>(value)});
  }

  void push_text(std::string_view text) {
    require(text.size() <= UINT32_MAX, "a text is larger than 4 GiB");
    push({Kind::kText, static_cast<uint32_t>(text.size()), text.data() - data_.data()});
  }

  // ---- the stack: values, and the places of marks in it ----
  void push(Value value) { stack_.push_back(value); }

  size_t last_mark() const { return marks_.empty() ? 0 : marks_.back(); }

  Value& top(size_t below = 0) {
    require(stack_.size() > last_mark() + below, "it takes a value from an empty stack");
    return stack_[stack_.size() - 1 - below];
  }

  Value pop() {
    const Value value = top();
    stack_.pop_back();
    return value;
  }

  std::vector<Value> pop_values(size_t count) {
    if (count > 0) top(count - 1);
    const std::vector<Value> found(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return found;
  }

  std::vector<Value> pop_mark() {
    require(!marks_.empty(), "it has no mark to go back to");
    const size_t count = stack_.size() - marks_.back();
    std::vector<Value> found = pop_values(count);
    marks_.pop_back();
    return found;
  }

  // ---- values ----
  std::string_view text(const Value& value, const char* what) const {
    require(value.kind == Kind::kText, what);
    return data_.substr(static_cast<size_t>(value.at), value.length);
  }

  bool is_container(const Value& value) const { return value.kind == Kind::kTuple || value.kind == Kind::kList; }
  Container& container(const Value& value) { return containers_[static_cast<size_t>(value.at)]; }
  uint64_t cost(const Value& value) { return value.kind == Kind::kTuple ? container(value).cost : 1; }

  void push_container(Kind kind, std::vector<Value> members) {
    Container made;
    for (const Value& member : members) made.cost = std::min(made.cost + cost(member), kMost);
    made.members = std::move(members);
    containers_.push_back(std::move(made));
    push({kind, 0, static_cast<int64_t>(containers_.size() - 1)});
  }

  void push_name(std::string_view module, std::string_view name) {
    names_.push_back({module, name});
    push({Kind::kName, 0, static_cast<int64_t>(names_.size() - 1)});
  }

  void append(const std::vector<Value>& members) {
    const Value holder = top();
    if (holder.kind != Kind::kList) return;
    auto& held = container(holder).members;
    held.insert(held.end(), members.begin(), members.end());
  }

  void spend(uint64_t steps, const char* what) {
    if (steps > num_left_) throw EndlessPickle(what);
    num_left_ -= steps;
  }

  void hash(const Value& key) {
    spend(cost(key), "keys of dicts, or members of sets, are tuples that take too long to hash");
  }

  // Every `stride`-th of these is hashed.
  void hash_all(const std::vector<Value>& members, size_t stride = 1) {
    for (size_t index = 0; index < members.size(); index += stride) hash(members[index]);
  }

  // What is called may hash the members of a list, or of lists in it: pairs of keys and values.
  void call(const Value& callee, const std::vector<Value>& arguments) {
    spend(arguments.size(), kManyArguments);
    for (const Value& argument : arguments) {
      if (argument.kind == Kind::kRange && static_cast<uint64_t>(argument.at) > kFewestSteps)
        throw EndlessPickle("something is made of a range of numbers that takes too long to count");
      if (argument.kind != Kind::kList) continue;
      for (const Value& member : container(argument).members) {
        hash(member.kind == Kind::kList ? Value{} : member);
        if (member.kind == Kind::kList) hash_all(container(member).members);
      }
    }
    if (tensors_ != nullptr && callee.kind == Kind::kName) {
      const auto& [module, name] = names_[static_cast<size_t>(callee.at)];
      const bool makes_tensor =
          name == "_rebuild_tensor" || name == "_rebuild_tensor_v2" || name == "_rebuild_tensor_v3";
      if (module == "torch._utils" && makes_tensor) add_tensor(arguments);
    }
    if (callee.kind == Kind::kName) {
      const std::string_view name = names_[static_cast<size_t>(callee.at)].name;
      if (name == "range" || name == "xrange") return push({Kind::kRange, 0, num_numbers(arguments)});
      if (name == "Fraction" && !arguments.empty() && has_large_exponent(arguments.front()))
        throw EndlessPickle("a fraction has an exponent that takes too long to work out");
    }
    push({});
  }

  // Of a range, or more than it can have where an argument is no number of 64 bits.
  static int64_t num_numbers(const std::vector<Value>& arguments) {
    for (const Value& argument : arguments) {
      if (argument.kind != Kind::kInt) return static_cast<int64_t>(kMost);
    }
    if (arguments.empty()) return 0;
    const int64_t first = arguments.size() > 1 ? arguments[0].at : 0;
    const int64_t last = arguments[arguments.size() > 1 ? 1 : 0].at;
    const int64_t step = arguments.size() > 2 ? arguments[2].at : 1;
    const double num =
        step == 0 ? 0 : (static_cast<double>(last) - static_cast<double>(first)) / static_cast<double>(step);
    return static_cast<int64_t>(std::clamp(num, 0.0, static_cast<double>(kMost)));
  }

  // `Fraction("1e999999999")` is worked out; the text of a Fraction has no exponent.
  bool has_large_exponent(const Value& value) {
    if (value.kind != Kind::kText) return false;
    const std::string_view number = text(value, "");
    spend(number.size(), kManyArguments);
    const size_t at = number.find_first_of("eE");
    return at != std::string_view::npos && number.size() - at > 6;
  }

  // ---- storages ----
  int64_t whole(const Value& value) const {
    require(value.kind == Kind::kInt && value.at >= 0, "a tensor has sizes, strides or an offset that no tensor has");
    return value.at;
  }

  const std::vector<Value>& numbers(const Value& value) {
    require(is_container(value), "a tensor has sizes or strides that no tensor has");
    spend(container(value).members.size(), kManyArguments);
    for (const Value& member : container(value).members) whole(member);
    return container(value).members;
  }

  void add(const Storage& storage, std::string_view dtype, int64_t num_elements) {
    spend(storage.name.size() + storage.storage_class.size() + dtype.size(), kManyArguments);
    tensors_->push_back(
        {std::string(storage.name), std::string(storage.storage_class), std::string(dtype), num_elements});
  }

  // ("storage", storage class, name, device, number of elements)
  void add_storage(const Value& id) {
    const char* const no_storage = "a persistent id does not name a storage";
    require(is_container(id) && container(id).members.size() == 5, no_storage);
    const auto& members = container(id).members;
    require(text(members[0], no_storage) == "storage" && members[1].kind == Kind::kName, no_storage);
    storages_.push_back({text(members[2], no_storage), names_[static_cast<size_t>(members[1].at)].name});
    add(storages_.back(), "uint8", whole(members[4]));
    push({Kind::kStorage, 0, static_cast<int64_t>(storages_.size() - 1)});
  }

  // (storage, offset, sizes, strides, ...); of _rebuild_tensor_v3, whose storages are untyped, the dtype behind two more.
  void add_tensor(const std::vector<Value>& arguments) {
    require(arguments.size() >= 4 && arguments[0].kind == Kind::kStorage, "a tensor has no storage");
    const auto &sizes = numbers(arguments[2]), &strides = numbers(arguments[3]);
    const bool has_dtype = arguments.size() > 6 && arguments[6].kind == Kind::kName;
    const std::string_view dtype = has_dtype ? names_[static_cast<size_t>(arguments[6].at)].name : "";
    const Storage& storage = storages_[static_cast<size_t>(arguments[0].at)];
    const int64_t offset = whole(arguments[1]);
    // An empty tensor may begin behind the end of its storage.
    if (std::ranges::any_of(sizes, [](const Value& size) { return size.at == 0; })) return add(storage, dtype, 0);
    require(sizes.size() == strides.size(), "a tensor has other numbers of sizes and strides");
    int64_t needed = checked_add(offset, 1);
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      needed = checked_add(needed, checked_mul(sizes[dim].at - 1, strides[dim].at));
    }
    add(storage, dtype, needed);
  }

  void persistent(const Value& id) {
    if (tensors_ == nullptr) return push({});
    add_storage(id);
  }

  // ---- the memo ----
  void remember(uint64_t index) { memo_[index] = top(); }

  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    require(found != memo_.end(), "it recalls what was not remembered");
    push(found->second);
  }

  uint64_t index_of(std::string_view digits) const {
    uint64_t index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    require(error == std::errc(), "it has a number that is none");
    return index;
  }

  // Carries out one operation, whose names are those of CPython's `pickletools`; false at the end of the pickle.
  bool step(uint8_t operation) {
    switch (operation) {
      case '.':  // STOP
        top();
        return false;
      case 0x80:  // PROTO
        require(number(1) <= 5, "it has a protocol above 5");
        break;
      case 0x95:  // FRAME
        number(8);
        break;
      case '(':  // MARK
        marks_.push_back(stack_.size());
        break;
      case '0':  // POP
        if (stack_.size() > last_mark()) {
          pop();
        } else {
          pop_mark();
        }
        break;
      case '1':  // POP_MARK
        pop_mark();
        break;
      case '2':  // DUP
        push(Value(top()));
        break;
      case 'N':   // NONE
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
      case '}':   // EMPTY_DICT
      case 0x8f:  // EMPTY_SET
        push({});
        break;
      case 'I':  // INT
      case 'L':  // LONG
        push_digits(line());
        break;
      case 'K':  // BININT1
      case 'M':  // BININT2
        push({Kind::kInt, 0, static_cast<int64_t>(number(operation == 'K' ? 1 : 2))});
        break;
      case 'J':  // BININT
        push_integer(bytes(4));
        break;
      case 0x8a:  // LONG1
      case 0x8b:  // LONG4
        push_integer(bytes(length_of(operation)));
        break;
      case 'F':  // FLOAT
        line();
        push({});
        break;
      case 'G':  // BINFLOAT
        bytes(8);
        push({});
        break;
      case 'S': {  // STRING, in quotes
        const std::string_view quoted = line();
        push_text(quoted.size() < 2 ? quoted : quoted.substr(1, quoted.size() - 2));
        break;
      }
      case 'V':  // UNICODE
        push_text(line());
        break;
      case 'U':   // SHORT_BINSTRING
      case 'T':   // BINSTRING
      case 0x8c:  // SHORT_BINUNICODE
      case 'X':   // BINUNICODE
      case 0x8d:  // BINUNICODE8
        push_text(bytes(length_of(operation)));
        break;
      case 'C':   // SHORT_BINBYTES
      case 'B':   // BINBYTES
      case 0x8e:  // BINBYTES8
      case 0x96:  // BYTEARRAY8
        bytes(length_of(operation));
        push({});
        break;
      case ')':  // EMPTY_TUPLE
        push({.kind = Kind::kTuple});
        break;
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        push_container(Kind::kTuple, pop_values(operation - 0x84u));
        break;
      case 't':  // TUPLE
        push_container(Kind::kTuple, pop_mark());
        break;
      case ']':  // EMPTY_LIST
        push_container(Kind::kList, {});
        break;
      case 'l':  // LIST
        push_container(Kind::kList, pop_mark());
        break;
      case 'd':   // DICT
      case 0x91:  // FROZENSET
        hash_all(pop_mark(), operation == 'd' ? 2 : 1);
        push({});
        break;
      case 'a':  // APPEND
        append(pop_values(1));
        break;
      case 'e':  // APPENDS
        append(pop_mark());
        break;
      case 's':  // SETITEM
        hash(pop_values(2)[0]);
        break;
      case 'u':   // SETITEMS
      case 0x90:  // ADDITEMS
        hash_all(pop_mark(), operation == 'u' ? 2 : 1);
        break;
      case 'c': {  // GLOBAL
        const std::string_view module = line();
        push_name(module, line());
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const auto names = pop_values(2);
        push_name(text(names[0], "it names something by no text"), text(names[1], "it names something by no text"));
        break;
      }
      case 'R': {  // REDUCE
        const auto called = pop_values(2);
        require(is_container(called[1]), "it calls without a tuple of arguments");
        call(called[0], container(called[1]).members);
        break;
      }
      case 0x81:    // NEWOBJ
      case 0x92: {  // NEWOBJ_EX
        const auto made = pop_values(operation == 0x81 ? 2 : 3);
        // What is no container has no members: neither has the empty tuple.
        call(made[0], containers_[is_container(made[1]) ? static_cast<size_t>(made[1].at) : 0].members);
        break;
      }
      case 'i':  // INST
        line();
        line();
        pop_mark();
        push({});
        break;
      case 'o':  // OBJ
        require(!pop_mark().empty(), "it makes an object without a class");
        push({});
        break;
      case 'b':  // BUILD
        pop();
        break;
      case 'P':  // PERSID
        line();
        persistent({});
        break;
      case 'Q':  // BINPERSID
        persistent(pop());
        break;
      case 'g':  // GET
        recall(index_of(line()));
        break;
      case 'h':  // BINGET
      case 'j':  // LONG_BINGET
        recall(number(operation == 'h' ? 1 : 4));
        break;
      case 'p':  // PUT
        remember(index_of(line()));
        break;
      case 'q':  // BINPUT
      case 'r':  // LONG_BINPUT
        remember(number(operation == 'q' ? 1 : 4));
        break;
      case 0x94:  // MEMOIZE
        remember(memo_.size());
        break;
      default:  // extensions and buffers, which no file brings along
        throw std::invalid_argument(concat("it has the operation ", int{operation}, ", which no file needs"));
    }
    return true;
  }

  std::string_view data_;
  size_t at_;
  uint64_t num_left_;  // steps
  std::vector<PickledTensor>* tensors_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Value> memo_;
  std::vector<Container> containers_;
  std::vector<Name> names_;
  std::vector<Storage> storages_;
};

}  // namespace

void check_pickle_keys(std::string_view data, int num_pickles) {
  try {
    size_t at = 0;
    for (int index = 0; index < num_pickles; ++index) at = Machine(data, at, nullptr).run();
  } catch (const EndlessPickle&) {
    throw;
  } catch (const std::invalid_argument&) {  // for those to say who unpickle it
  }
}

std::vector<PickledTensor> find_pickled_tensors(std::string_view data) {
  std::vector<PickledTensor> tensors;
  try {
    Machine(data, 0, &tensors).run();
  } catch (const EndlessPickle&) {
    throw;
  } catch (const std::exception& error) {
    throw std::invalid_argument(concat("its pickle cannot be read: ", error.what()));
  }
  return tensors;
}

}  // namespace torchtitan_ext::core
