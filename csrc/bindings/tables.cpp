#include "bindings/tables.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/reports.h"
#include "core/key_columns.h"
#include "core/replica_digests.h"
#include "core/section_builder.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

// The sections of a table: tensors on meshes, other values, and values that each rank keeps under a name of its own.
// A key that only one rank has then leaves the bytes of the others as they are. Only the first section has a part.
enum SectionName : size_t { kOnMeshes, kOthers, kOwn, kNumSections };

// What ranks have in common and what is a rank's own, as bytes; the order of keys that positions in a decision refer to.
struct EncodedColumns {
  std::vector<py::bytes> sections;
  py::bytes part;
  std::array<py::list, kNumSections> names;
  std::array<std::vector<uint32_t>, kNumSections> kind_of;
  std::vector<py::str> odd_paths;  // keys whose path is no cut of the key at dots
};

// The text's own bytes, or those of `buffer` where it has surrogates.
std::string_view view_of(const py::handle& text, std::string& buffer) {
  Py_ssize_t size = 0;
  if (const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) return {bytes, static_cast<size_t>(size)};
  PyErr_Clear();
  return buffer = to_utf8(text);
}

// How a path cuts its key: per part how many dots it holds, and whether it is an index. None where that is not enough.
std::optional<PathForm> form_of_path(std::string_view key, const py::tuple& path) {
  PathForm form;
  std::string buffer;
  size_t begin = 0;
  for (const py::handle part : path) {
    std::string_view text;
    const bool is_position = PyLong_CheckExact(part.ptr());
    if (is_position) {
      int overflow = 0;
      const long long position = PyLong_AsLongLongAndOverflow(part.ptr(), &overflow);
      if (overflow != 0 || position < 0 || position >= 1LL << 32) return std::nullopt;
      text = buffer = std::to_string(position);
    } else if (PyUnicode_Check(part.ptr())) {
      text = view_of(part, buffer);
    } else {
      return std::nullopt;
    }
    if (!form.parts.empty() && (begin >= key.size() || key[begin++] != '.')) return std::nullopt;
    if (key.substr(begin, text.size()) != text) return std::nullopt;
    begin += text.size();
    form.parts.emplace_back(is_position ? 0 : std::count(text.begin(), text.end(), '.'), is_position);
  }
  if (begin != key.size()) return std::nullopt;
  return form;
}

class TableBuilder {
 public:
  void add_entry(const py::handle& fqn, const py::handle& entry, const py::handle& path, bool is_own) {
    const auto [found, is_new] = held_[is_own].try_emplace(entry.ptr());
    Held& held = found->second;
    if (is_new) read_entry(entry, is_own, held);
    add(held.section, fqn, held.number, path);
    if (held.is_unusual) sections_[held.section].add_unusual(held.local_sizes);
    if (held.kind.type == EntryType::kBoxes)
      sections_[held.section].add_boxes(to_chunks(entry.attr("boxes").cast<std::vector<BoxTuple>>()));
  }
  // A key that has a path, and no value on this rank.
  void add_path(const py::handle& fqn, const py::handle& path) {
    add(kOthers, fqn, sections_[kOthers].add_kind({}, {}), path);
  }

  EncodedColumns finish() {
    for (size_t section = 0; section < kNumSections; ++section) {
      const KeyColumns& columns = sections_[section].columns();
      encoded_.sections.emplace_back(encode_columns(columns));
      encoded_.kind_of[section] = columns.kind_of;
    }
    encoded_.part = encode_part(sections_[kOnMeshes].part());
    return std::move(encoded_);
  }

 private:
  // What an entry says of each key that has it. Keys that are held alike share entries, so few of them are read.
  struct Held {
    py::object entry;  // its address stays its own
    Kind kind;
    size_t section = kOthers;
    uint32_t number = 0;  // of the kind, in the section
    Sizes local_sizes;
    bool is_unusual = false;
  };

  void add(size_t section, const py::handle& fqn, uint32_t kind, const py::handle& path) {
    std::string buffer;
    const std::string_view name = view_of(fqn, buffer);
    std::optional<PathForm> form;
    if (!path.is_none()) {
      form = form_of_path(name, py::reinterpret_borrow<py::tuple>(path));
      if (!form) encoded_.odd_paths.push_back(py::reinterpret_borrow<py::str>(fqn));
    }
    sections_[section].add_key(name, kind, form);
    encoded_.names[section].append(fqn);
  }

  void read_entry(const py::handle& entry, bool is_own, Held& held) {
    held.entry = py::reinterpret_borrow<py::object>(entry);
    Kind& kind = held.kind;
    kind.type = types_.of(entry);
    if (kind.type != EntryType::kObject) {
      const py::object dtype = entry.attr("dtype");
      kind.dtype = py::str(dtype);
      kind.itemsize = dtype.attr("itemsize").cast<int64_t>();
      kind.requires_grad = entry.attr("requires_grad").cast<bool>();
    }
    if (kind.type == EntryType::kTensor) read_report(entry.attr("report"), held);
    if (kind.type == EntryType::kBoxes) kind.shape = entry.attr("global_shape").cast<Sizes>();
    const bool is_on_mesh = kind.type == EntryType::kBoxes || kind.mesh != Kind::kPlain;
    held.section = is_on_mesh ? kOnMeshes : is_own ? kOwn : kOthers;
    held.number = sections_[held.section].add_kind(kind, held.local_sizes);
    held.is_unusual = sections_[held.section].part().local_sizes[held.number] != held.local_sizes;
  }

  void read_report(const py::object& report, Held& held) {
    read_layout(report, held.kind);
    const py::object mesh = report.attr("mesh");
    if (mesh.is_none()) return;
    held.local_sizes = report.attr("local_sizes").cast<Sizes>();
    const auto [form, is_new] = meshes_.try_emplace(mesh.ptr());
    if (is_new) form->second = read_mesh(mesh);
    const auto& [mesh_form, origin] = form->second;
    held.kind.mesh = sections_[kOnMeshes].add_mesh(mesh_form, {origin, report.attr("coordinate").cast<Sizes>()});
  }

  std::array<SectionBuilder, kNumSections> sections_;
  EncodedColumns encoded_;
  std::array<std::unordered_map<PyObject*, Held>, 2> held_;             // of other keys, of keys of the rank's own
  std::unordered_map<PyObject*, std::pair<MeshForm, int64_t>> meshes_;  // the entries hold them
  EntryTypes types_;
};

EncodedColumns encode_columns_py(const py::dict& entries, const py::dict& paths, const py::set& own) {
  TableBuilder table;
  for (const auto& [fqn, entry] : entries) {
    const py::object path = find_in(paths, fqn);
    table.add_entry(fqn, entry, path ? path : py::none(), own.contains(fqn));
  }
  for (const auto& [fqn, path] : paths) {
    if (!entries.contains(fqn)) table.add_path(fqn, path);
  }
  return table.finish();
}

py::bytes encode_digests_py(const py::list& names, const std::vector<uint32_t>& kind_of, const py::dict& digests) {
  std::vector<std::string_view> views;
  for (const py::handle name : names) {
    const py::object digest = find_in(digests, name);  // which the dict keeps
    views.push_back(digest ? std::string_view(py::reinterpret_borrow<py::bytes>(digest)) : std::string_view());
  }
  const auto last = std::max_element(kind_of.begin(), kind_of.end());
  return py::bytes(encode_digests(kind_of, last == kind_of.end() ? 0 : size_t{*last} + 1, views));
}

}  // namespace

void define_tables(py::module_& module) {
  py::class_<EncodedColumns>(module, "EncodedColumns")
      .def_readonly("sections", &EncodedColumns::sections)
      .def_readonly("part", &EncodedColumns::part)
      .def_readonly("names", &EncodedColumns::names)
      .def_readonly("kind_of", &EncodedColumns::kind_of)
      .def_readonly("odd_paths", &EncodedColumns::odd_paths);
  module.def("encode_columns", &encode_columns_py, py::arg("entries"), py::arg("paths"), py::arg("own"));
  module.def("encode_digests", &encode_digests_py, py::arg("names"), py::arg("kind_of"), py::arg("digests"));
}

}  // namespace torchtitan_ext::bindings
