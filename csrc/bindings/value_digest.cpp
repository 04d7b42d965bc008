#include "bindings/value_digest.h"

// Python.h has to come before it.
#include <marshal.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/value_graph.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using core::ValueGraph;

constexpr int kDigestBytes = 16;
// The last version without references between objects: its bytes depend on nothing but the value.
constexpr int kMarshalVersion = 2;
// Longer lists are nodes, so that one that is held many times is looked at once.
constexpr py::ssize_t kMaxInline = 16;
// An object that makes new members whenever it is asked has no end; nothing so deep can be pickled.
constexpr int kMaxDepth = 100'000;

// What tells an object apart, and the objects that it holds.
struct ValueNode {
  std::string label;
  py::object members = py::tuple();
  bool is_ordered = true;
};

ValueGraph::Hash blake2b() {
  return [make = py::module_::import("hashlib").attr("blake2b")](std::string_view bytes) {
    return make(py::bytes(bytes.data(), bytes.size()), py::arg("digest_size") = kDigestBytes)
        .attr("digest")()
        .cast<std::string>();
  };
}

// The name of a class or function; for another callable the name of its class.
std::string qualified_name(const py::handle& value) {
  const py::object name = py::getattr(value, "__qualname__", py::type::of(value).attr("__qualname__"));
  return to_utf8(py::str(value.attr("__module__"))) + "." + to_utf8(py::str(name));
}

std::string class_name(const py::handle& value) { return qualified_name(py::type::of(value)); }

// Atoms are values of these very classes; they hold no other values.
bool is_atom(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyComplex_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value);
}

bool are_atoms(const py::handle& members) {
  for (const py::handle member : members) {
    if (!is_atom(member.ptr())) return false;
  }
  return true;
}

// A new list, also of a subclass of list, which marshal does not take.
py::list listed(const py::handle& members) {
  PyObject* const list = PySequence_List(members.ptr());
  if (list == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::list>(list);
}

class ValueDigester {
 public:
  // Args: `describe` gives the node of an object that is no container.
  explicit ValueDigester(py::object describe) : describe_(std::move(describe)) {
    const py::module_ classes = py::module_::import("collections.abc");
    mapping_ = classes.attr("Mapping");
    set_ = classes.attr("Set");
  }

  std::string digest(const py::object& value) {
    std::vector<std::pair<size_t, int>> pending = {{number_of(value), 0}};
    while (!pending.empty()) {
      const auto [number, depth] = pending.back();
      pending.pop_back();
      if (depth > kMaxDepth) return graph_.hash_parts({"endless" + class_name(value)});
      const ValueNode node = node_of(objects_[number]);
      std::vector<ValueGraph::Member> members;
      for (const py::handle member : node.members) {
        if (std::optional<std::string> text = inline_text(member)) {
          members.emplace_back(std::move(*text));
          continue;
        }
        const size_t num_known = objects_.size();
        members.emplace_back(number_of(member));
        if (objects_.size() > num_known) pending.emplace_back(num_known, depth + 1);
      }
      graph_.describe(number, shortened(node.label), std::move(members), node.is_ordered);
    }
    return graph_.digest();
  }

 private:
  size_t number_of(const py::handle& value) {
    const auto [known, is_new] = numbers_.emplace(value.ptr(), objects_.size());
    if (is_new) {
      objects_.push_back(py::reinterpret_borrow<py::object>(value));
      graph_.add_node();
    }
    return known->second;
  }

  ValueNode node_of(const py::object& value) {
    try {
      if (py::isinstance<ValueNode>(value)) return value.cast<ValueNode>();
      if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value) || py::isinstance(value, mapping_) ||
          py::isinstance(value, set_)) {
        return with_extras(value, container(value));
      }
      return describe_(value).cast<ValueNode>();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
    }
    // It cannot be saved either: the planner says so, with the key.
    return {"unreadable " + class_name(value)};
  }

  // Atoms go into the label at once: a list of a million numbers is one node without members.
  ValueNode container(const py::object& value) {
    if (py::isinstance(value, mapping_)) return mapping(value);
    if (!py::isinstance(value, set_)) return sequence(class_name(value), listed(value));
    const py::list members = listed(value);
    if (!are_atoms(members)) return {"set", members, false};
    std::vector<std::string> atoms;
    for (const py::handle member : members) atoms.push_back(atom(member));
    std::sort(atoms.begin(), atoms.end());
    return {"atoms" + graph_.hash_parts({atoms.begin(), atoms.end()})};
  }

  ValueNode mapping(const py::object& value) {
    const bool has_atoms = are_atoms(value);
    const py::list items = listed(value.attr("items")());
    if (!has_atoms) return {"dict", items, false};
    std::vector<std::pair<std::string, py::object>> sorted;
    for (const py::handle item : items) {
      const auto pair = py::reinterpret_borrow<py::sequence>(item);
      sorted.emplace_back(atom(py::object(pair[0])), py::object(pair[1]));
    }
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& left, const auto& right) { return left.first < right.first; });
    std::vector<std::string_view> keys;
    py::list members;
    for (const auto& [key, member] : sorted) {
      keys.emplace_back(key);
      members.append(member);
    }
    return sequence("dict" + graph_.hash_parts(keys), members);
  }

  ValueNode sequence(const std::string& label, const py::list& members) {
    if (are_atoms(members)) return {label + " of atoms" + atom(members)};
    return {label, members};
  }

  // The node, together with what a subclass of a container holds beside its members.
  static ValueNode with_extras(const py::object& value, ValueNode node) {
    PyObject* const raw = value.ptr();
    if (PyDict_CheckExact(raw) || PyList_CheckExact(raw) || PyTuple_CheckExact(raw) || PyAnySet_CheckExact(raw)) {
      return node;
    }
    py::dict extras, kept;
    extras.attr("update")(py::getattr(value, "__dict__", py::dict()));
    extras["default_factory"] = py::getattr(value, "default_factory", py::none());
    for (const auto& [name, member] : extras) {
      if (!member.is_none()) kept[name] = member;
    }
    if (kept.empty()) return node;
    py::list parts;
    parts.append(std::move(node));
    parts.append(kept);
    return {"with extras", parts};
  }

  // Bytes that stand for an atom, or for a short list or tuple of atoms, which needs no node.
  std::optional<std::string> inline_text(const py::handle& member) const {
    if (is_atom(member.ptr())) return "atom" + atom(member);
    const bool is_tuple = PyTuple_CheckExact(member.ptr());
    if (!is_tuple && !PyList_CheckExact(member.ptr())) return std::nullopt;
    if (PySequence_Fast_GET_SIZE(member.ptr()) > kMaxInline || !are_atoms(member)) return std::nullopt;
    return (is_tuple ? "tuple" : "list") + atom(listed(member));
  }

  // Bytes that stand for an atom or a list of atoms.
  std::string atom(const py::handle& value) const {
    PyObject* const bytes = PyMarshal_WriteObjectToString(value.ptr(), kMarshalVersion);
    if (bytes == nullptr) throw py::error_already_set();
    return shortened(py::reinterpret_steal<py::bytes>(bytes));
  }

  std::string shortened(std::string bytes) const {
    return bytes.size() <= 2 * kDigestBytes ? bytes : "long" + graph_.hash_parts({bytes});
  }

  py::object describe_, mapping_, set_;
  ValueGraph graph_{blake2b()};
  std::unordered_map<PyObject*, size_t> numbers_;
  std::vector<py::object> objects_;  // kept, so that no address is given twice
};

}  // namespace

void define_value_digest(py::module_& module) {
  py::class_<ValueNode>(module, "ValueNode")
      .def(py::init([](std::string label, py::object members) {
             return ValueNode{std::move(label), std::move(members), true};
           }),
           py::arg("label"), py::arg("members") = py::tuple());
  module.def(
      "digest_value",
      [](const py::object& value, const py::object& describe) {
        return py::bytes(ValueDigester(describe).digest(value));
      },
      py::arg("value"), py::arg("describe"));
  module.def("hash_parts", [](const py::args& parts) {
    return py::bytes(ValueGraph(blake2b()).hash_parts(parts.cast<std::vector<std::string_view>>()));
  });
  module.def("qualified_name", [](const py::object& value) { return py::bytes(qualified_name(value)); });
}

}  // namespace torchtitan_ext::bindings
