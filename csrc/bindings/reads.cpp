#include "bindings/reads.h"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/convert.h"
#include "bindings/reports.h"
#include "core/check.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

// The keys of tensors that are saved with the shape and the dtype of their entries.
py::set find_saved_alike(const py::dict& entries, const MetadataColumns& columns) {
  struct Form {
    bool is_tensor = false;
    uint32_t sizes = HashedNumbers::kNone;
    std::optional<uint32_t> dtype;
  };
  EntryTypes types;
  std::unordered_map<PyObject*, Form> forms;  // keys that are held alike share their entry
  py::set alike;
  for (const auto& [fqn, entry] : entries) {
    const auto [form, is_new] = forms.try_emplace(entry.ptr());
    if (is_new && types.of(entry) == EntryType::kTensor) {
      const std::string dtype = py::str(entry.attr("dtype")).attr("removeprefix")("torch.").cast<std::string>();
      form->second = {true, columns.sizes.find(entry.attr("report").attr("global_shape").cast<Sizes>()),
                      columns.names.find(dtype)};
    }
    const uint32_t number = form->second.is_tensor ? columns.find_key(to_utf8(fqn)) : HashedNumbers::kNone;
    if (number == HashedNumbers::kNone) continue;
    const SavedKey& key = columns.keys()[number];
    if (key.is_tensor && key.sizes == form->second.sizes && key.dtype == form->second.dtype) alike.add(fqn);
  }
  return alike;
}

// One Python object for equal sizes: thousands of them would wake the garbage collector.
class SizeObjects {
 public:
  explicit SizeObjects(py::object size_class) : size_class_(std::move(size_class)) {}

  const py::object& operator()(const Sizes& sizes) {
    py::object& object = objects_[sizes];
    if (!object) object = size_class_(to_tuple(sizes));
    return object;
  }

 private:
  py::object size_class_;
  std::map<Sizes, py::object> objects_;
};

ReadAlike find_parts(const py::object& entry, const py::object& chunk_list, std::vector<Chunk> wanted) {
  ReadAlike alike{entry, chunk_list, std::move(wanted), {}, 0};
  alike.parts = alike.saved().find_overlaps(alike.wanted);
  for (const Overlap& part : alike.parts) alike.num_elements += num_elements(part.sizes);
  return alike;
}

Reads find_reads(const Names& names, const py::dict& entries, const py::dict& saved_names, SavedChunks& saved,
                 const py::dict& decided) {
  py::dict values;
  std::vector<Reads::Tensor> tensors;
  auto known = std::make_shared<Reads::Alike>();
  EntryTypes types;
  for (const py::list& of_section : names) {
    for (const py::handle name : of_section) {
      const auto fqn = py::reinterpret_borrow<py::object>(name);
      const py::object entry = entry_of(entries, fqn);
      const py::object renamed = find_in(saved_names, fqn);
      const py::object& saved_name = renamed ? renamed : fqn;
      const EntryType type = types.of(entry);
      if (type == EntryType::kObject) {
        values[fqn] = saved_name;
        continue;
      }
      std::optional<std::vector<ShardStep>> steps;
      std::optional<Sizes> order;
      if (const py::object stated = find_in(decided, fqn)) {
        steps = to_steps(stated.cast<std::vector<StepTuple>>());
        order.emplace();
        for (const ShardStep& step : *steps) order->insert(order->end(), {step.axis, step.dim, step.split_factor});
      }
      const py::object chunk_list = saved.find(saved_name);
      TTE_CHECK(!chunk_list.is_none(), "find_reads", to_utf8(fqn),
                " is planned as a tensor and not saved as one, please report");
      const auto [place, is_new] = known->try_emplace({entry.ptr(), chunk_list.ptr(), std::move(order)});
      if (is_new) place->second = find_parts(entry, chunk_list, held_chunks(entry, type, steps ? &*steps : nullptr));
      tensors.push_back({fqn, saved_name, &place->second});
    }
  }
  return {std::move(values), std::move(tensors), std::move(known)};
}

}  // namespace

Reads::Reads(py::dict values, std::vector<Tensor> tensors, std::shared_ptr<const Alike> alike)
    : values_(std::move(values)), tensors_(std::move(tensors)), alike_(std::move(alike)) {}

size_t Reads::num_items() const {
  size_t count = values_.size();
  for (const Tensor& tensor : tensors_) count += tensor.alike->parts.size();
  return count;
}

std::vector<Unfilled> Reads::unfilled() const {
  std::map<const ReadAlike*, bool> is_filled;
  std::vector<Unfilled> result;
  for (const auto& [fqn, _, alike] : tensors_) {
    const auto [found, is_new] = is_filled.try_emplace(alike);
    if (is_new) found->second = alike->saved().fills(alike->wanted);
    if (found->second) continue;
    int64_t num_wanted = 0;
    for (const Chunk& chunk : alike->wanted) num_wanted += core::num_elements(chunk.sizes);
    result.push_back({fqn, num_wanted, alike->num_elements});
  }
  return result;
}

py::dict Reads::columns(const py::object& size_class) const {
  constexpr std::array kOfParts{"offsets",         "positions",     "local_offsets", "chunk_offsets",
                                "chunk_positions", "saved_offsets", "sizes"};
  std::array<py::list, kOfParts.size()> of_parts;
  py::list fqns, saved_names;
  SizeObjects to_size(size_class);
  std::unordered_map<const ReadAlike*, std::vector<std::array<py::object, kOfParts.size()>>> rows_of;
  for (const auto& [fqn, saved_name, alike] : tensors_) {
    const auto [rows, is_new] = rows_of.try_emplace(alike);
    if (is_new) {
      for (const Overlap& part : alike->parts) {
        rows->second.push_back({to_size(alike->wanted[part.wanted].offsets), py::int_(part.wanted),
                                to_size(part.local_offsets), to_size(alike->saved().chunks()[part.saved].offsets),
                                py::int_(part.saved), to_size(part.saved_offsets), to_size(part.sizes)});
      }
    }
    for (const auto& row : rows->second) {
      fqns.append(fqn);
      saved_names.append(saved_name);
      for (size_t column = 0; column < row.size(); ++column) of_parts[column].append(row[column]);
    }
  }
  py::dict columns;
  columns["fqns"] = fqns;
  columns["saved_names"] = saved_names;
  for (size_t column = 0; column < of_parts.size(); ++column) columns[kOfParts[column]] = of_parts[column];
  return columns;
}

void define_reads(py::module_& module) {
  module.def("find_saved_alike", &find_saved_alike, py::arg("entries"), py::arg("columns"));
  py::class_<Unfilled>(module, "Unfilled")
      .def_readonly("fqn", &Unfilled::fqn)
      .def_readonly("num_wanted", &Unfilled::num_wanted)
      .def_readonly("num_read", &Unfilled::num_read);
  py::class_<Reads>(module, "Reads", "What a rank reads, until it is read.")
      .def_property_readonly("values", &Reads::values)
      .def_property_readonly("num_items", &Reads::num_items)
      .def("values_alone", &Reads::values_alone)
      .def("tensors_alone", &Reads::tensors_alone)
      .def("unfilled", &Reads::unfilled)
      .def("columns", &Reads::columns, py::arg("size_class"));
  module.def("find_reads", &find_reads, py::arg("names"), py::arg("entries"), py::arg("saved_names"), py::arg("saved"),
             py::arg("decided"));
}

}  // namespace torchtitan_ext::bindings
