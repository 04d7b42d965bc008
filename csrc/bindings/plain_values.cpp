#include "bindings/plain_values.h"

#include <bit>
#include <unordered_map>
#include <vector>

#include "bindings/convert.h"
#include "core/check.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using core::PickleGraph;
using core::PlainKind;

// Deeper than any state dict; a value that contains itself ends here too.
constexpr int kMaxDepth = 200;
// Longer than any path into a state dict. Hashing a tuple walks through it, and those in it, whenever it is a key.
constexpr size_t kMaxKeyMembers = 64;

class PlainWriter {
 public:
  explicit PlainWriter(core::PickleWriter& out) : out_(out) {}

  void write(PyObject* value, int depth) {
    if (depth > kMaxDepth) throw NotPlain("is nested too deeply");
    if (value == Py_None) return out_.none();
    if (PyBool_Check(value)) return out_.boolean(value == Py_True);
    if (PyLong_CheckExact(value)) return write_integer(value);
    if (PyFloat_CheckExact(value)) return out_.number(PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) return out_.text(to_utf8(value));
    if (PyBytes_CheckExact(value))
      return out_.bytes(static_cast<std::string_view>(py::reinterpret_borrow<py::bytes>(value)));
    write_container(value, depth);
  }

 private:
  void write_integer(PyObject* value) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) throw NotPlain("has an integer beyond int64");
    out_.integer(number);
  }

  void write_container(PyObject* value, int depth) {
    if (const auto known = shared_.find(value); known != shared_.end()) return out_.get(known->second);
    const PlainKind kind = PyTuple_CheckExact(value)  ? PlainKind::kTuple
                           : PyList_CheckExact(value) ? PlainKind::kList
                           : PyDict_CheckExact(value) ? PlainKind::kDict
                                                      : PlainKind::kNone;
    if (kind == PlainKind::kNone) throw NotPlain(core::concat("is of type ", Py_TYPE(value)->tp_name));
    const auto count = static_cast<size_t>(PyObject_Size(value)) * (kind == PlainKind::kDict ? 2 : 1);
    out_.begin(kind, count);
    if (kind == PlainKind::kDict) {
      PyObject *key = nullptr, *member = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &member) != 0;) {
        write(key, depth + 1);
        write(member, depth + 1);
      }
    } else {
      for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(value); ++at) {
        write(PySequence_Fast_GET_ITEM(value, at), depth + 1);
      }
    }
    out_.end(kind, count);
    // What nobody else holds does not come again.
    if (Py_REFCNT(value) > 1) shared_.emplace(value, out_.put(false));
  }

  core::PickleWriter& out_;
  std::unordered_map<PyObject*, uint32_t> shared_;
};

bool may_be_key(const py::handle& value) {
  const auto is_scalar = [](const py::handle& one) {
    return !PyTuple_Check(one.ptr()) && !PyList_Check(one.ptr()) && !PyDict_Check(one.ptr());
  };
  if (!PyTuple_Check(value.ptr())) return is_scalar(value);
  const auto members = py::reinterpret_borrow<py::tuple>(value);
  if (members.size() > kMaxKeyMembers) return false;
  for (const auto& member : members) {
    if (!is_scalar(member)) return false;
  }
  return true;
}

class PickledValues {
 public:
  explicit PickledValues(const PickleGraph& graph) : graph_(graph) {}

  py::object of(PickleGraph::Id id, int depth) {
    if (id == PickleGraph::kAbsent) return py::none();
    TTE_CHECK(depth < kMaxDepth, ".metadata", "plain values are nested deeper than ", kMaxDepth,
              ", or contain themselves");
    if (const auto known = known_.find(id); known != known_.end()) return known->second;
    py::object value = made(id, depth);
    known_.emplace(id, value);
    return value;
  }

 private:
  py::object made(PickleGraph::Id id, int depth) {
    using Kind = PickleGraph::Kind;
    switch (graph_.kind(id)) {
      case Kind::kNone:
        return py::none();
      case Kind::kBool:
        return py::bool_(graph_.integer(id) != 0);
      case Kind::kInt:
        return py::int_(graph_.integer(id));
      case Kind::kFloat:
        return py::float_(graph_.number(id));
      case Kind::kText:
        return to_str(graph_.text(id));
      case Kind::kBytes:
        return py::bytes(graph_.text(id).data(), graph_.text(id).size());
      case Kind::kTuple:
      case Kind::kList: {
        py::list members;
        for (auto member : graph_.members(id)) members.append(of(member, depth + 1));
        if (graph_.kind(id) == Kind::kTuple) return py::tuple(members);
        return members;
      }
      case Kind::kDict: {
        py::dict members;
        const auto pairs = graph_.members(id);
        for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
          const py::object key = of(pairs[index], depth + 1);
          TTE_CHECK(may_be_key(key), ".metadata", "a key of a dict is no text, number or short tuple of them");
          members[key] = of(pairs[index + 1], depth + 1);
        }
        return members;
      }
      case Kind::kCall:
        if (is_path(graph_.callee(id))) return of(graph_.arguments(id), depth + 1);
        break;
      case Kind::kName:
        break;
    }
    const auto name = graph_.kind(id) == Kind::kCall ? graph_.callee(id) : id;
    const bool is_name = graph_.kind(name) == Kind::kName;
    throw std::invalid_argument(core::concat(".metadata: names ", is_name ? graph_.module_of(name) : "a call", ".",
                                             is_name ? graph_.name_of(name) : "",
                                             ", expected plain values; nothing was run"));
  }

  bool is_path(PickleGraph::Id id) const {
    if (graph_.kind(id) != PickleGraph::Kind::kName || graph_.name_of(id) != "PosixPath") return false;
    return graph_.module_of(id) == "pathlib" || graph_.module_of(id) == "pathlib._local";
  }

  const PickleGraph& graph_;
  std::unordered_map<PickleGraph::Id, py::object> known_;
};

class EncodedValues {
 public:
  explicit EncodedValues(storage::ByteReader& reader) : reader_(reader) {}

  py::object of(int depth) {
    if (depth >= kMaxDepth) fail("values are nested too deeply");
    const auto kind = static_cast<PlainKind>(reader_.number<uint8_t>());
    switch (kind) {
      case PlainKind::kNone:
        return py::none();
      case PlainKind::kBool:
        return py::bool_(reader_.number<uint8_t>() != 0);
      case PlainKind::kInt:
        return py::int_(reader_.number<int64_t>());
      case PlainKind::kFloat:
        return py::float_(std::bit_cast<double>(reader_.number<uint64_t>()));
      case PlainKind::kText:
        return to_str(reader_.text());
      case PlainKind::kBytes: {
        const auto value = reader_.text();
        return py::bytes(value.data(), value.size());
      }
      case PlainKind::kTuple:
      case PlainKind::kList:
      case PlainKind::kDict:
        return container(kind, depth);
      case PlainKind::kSame: {
        const auto number = reader_.number<uint32_t>();
        if (number >= shared_.size()) fail("a value stands for one that was not there before");
        return shared_[number];
      }
    }
    fail("a value is of an unknown kind");
  }

 private:
  [[noreturn]] void fail(const char* what) const { storage::throw_format_error(reader_.where(), reader_.byte(), what); }

  py::object container(PlainKind kind, int depth) {
    const bool is_shared = reader_.number<uint8_t>() != 0;
    const uint64_t count = reader_.count(reader_.number<uint64_t>(), 1);
    py::list members;
    py::dict pairs;
    for (uint64_t index = 0; index < count; index += kind == PlainKind::kDict ? 2 : 1) {
      py::object member = of(depth + 1);
      if (kind != PlainKind::kDict) {
        members.append(member);
        continue;
      }
      if (!may_be_key(member)) fail("a key of a dict is no text, number or short tuple of them");
      pairs[member] = of(depth + 1);
    }
    py::object value = kind == PlainKind::kDict   ? py::object(pairs)
                       : kind == PlainKind::kList ? py::object(members)
                                                  : py::object(py::tuple(members));
    if (is_shared) shared_.push_back(value);
    return value;
  }

  storage::ByteReader& reader_;
  std::vector<py::object> shared_;
};

}  // namespace

void write_plain(const py::handle& value, core::PickleWriter& out) { PlainWriter(out).write(value.ptr(), 0); }

py::object plain_of_pickle(const PickleGraph& graph, PickleGraph::Id value) {
  return PickledValues(graph).of(value, 0);
}

py::object plain_of_bytes(storage::ByteReader& reader) { return EncodedValues(reader).of(0); }

}  // namespace torchtitan_ext::bindings
