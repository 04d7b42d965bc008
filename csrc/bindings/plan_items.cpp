#include "bindings/plan_items.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/check.h"
#include "core/metadata_columns.h"
#include "storage/casts.h"
#include "storage/element_types.h"
#include "storage/record_writer.h"
#include "storage/run_reader.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using core::MetadataColumns;
using core::SavedPart;
using core::Sizes;
using storage::PlainTensor;
using storage::RunReader;

// A record in a file, as the Record of checkpoint_files.py.
struct Found {
  std::string file;
  int64_t offset = 0;
  int64_t num_bytes = 0;
  py::object tensor = py::none();
};

// The names of a dtype's objects are asked for once.
class DtypeNames {
 public:
  const std::string& of(const py::object& dtype) {
    auto& [kept, name] = names_[dtype.ptr()];
    if (!kept) {
      kept = dtype;
      name = py::str(dtype).attr("removeprefix")("torch.").cast<std::string>();
    }
    return name;
  }

 private:
  std::unordered_map<PyObject*, std::pair<py::object, std::string>> names_;
};

// The memory of a rank's own tensor, and how its elements lie there.
struct LocalMemory {
  uintptr_t address = 0;
  Sizes sizes, strides;
  std::string dtype;

  // Elements from the first one to that of a box; nothing where the box does not lie in the tensor.
  std::optional<int64_t> find_box(const Sizes& offsets, const Sizes& box_sizes) const {
    if (offsets.size() != sizes.size() || box_sizes.size() != sizes.size()) return std::nullopt;
    int64_t first = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (offsets[dim] < 0 || offsets[dim] > sizes[dim] - box_sizes[dim]) return std::nullopt;
      first += offsets[dim] * strides[dim];
    }
    return first;
  }
};

// Each tensor is asked once. The caller keeps all of them.
class LocalMemories {
 public:
  // By its key in a dict; null where it has none.
  const LocalMemory* find(const py::dict& tensors, const py::object& fqn) {
    PyObject* const tensor = PyDict_GetItemWithError(tensors.ptr(), fqn.ptr());
    if (tensor == nullptr) return nullptr;
    LocalMemory& memory = memories_[tensor];
    if (memory.dtype.empty()) {
      const auto held = py::reinterpret_borrow<py::object>(tensor);
      memory = {held.attr("data_ptr")().cast<uintptr_t>(), to_sizes(held.attr("shape")),
                to_sizes(held.attr("stride")()), dtypes_.of(held.attr("dtype"))};
    }
    return &memory;
  }

 private:
  std::unordered_map<PyObject*, LocalMemory> memories_;
  DtypeNames dtypes_;
};

// What is left to the caller: the position of an item in the list, and its record.
using Left = std::tuple<size_t, int64_t, int64_t, py::object>;

// The items of one rank by files, in the order of their first items.
class ReadList {
 public:
  // Args: byte_io: the type of items that are values and no tensors.
  ReadList(const py::list& items, const py::object& byte_io, const MetadataColumns& columns) : items_(items) {
    const auto find = [&columns](const py::object& place) -> std::optional<Found> {
      const py::object offsets = place.attr("offset");
      const uint32_t number = columns.find_part(to_utf8(place.attr("fqn")),
                                                offsets.is_none() ? std::nullopt : std::optional(to_sizes(offsets)));
      if (number == core::HashedNumbers::kNone) return std::nullopt;
      const SavedPart& part = columns.parts()[number];
      if (part.transforms != SavedPart::kNone) return std::nullopt;
      return Found{columns.names[part.path], part.offset_bytes, part.length_bytes, py::none()};
    };
    add_items(byte_io, [&](size_t, const py::object& item) { return find(item.attr("storage_index")); });
  }

  // With records that the caller has found, one for each item.
  ReadList(const py::list& items, const py::object& byte_io, const py::list& records) : items_(items) {
    TTE_CHECK(items.size() == records.size(), "ReadList", "got ", records.size(), " records of ", items.size(),
              " items");
    add_items(byte_io, [&](size_t position, const py::object&) {
      const py::object record = records[position];
      return std::optional(Found{to_utf8(record.attr("file")), record.attr("offset").cast<int64_t>(),
                                 record.attr("num_bytes").cast<int64_t>(), record.attr("tensor")});
    });
  }

  std::vector<py::str> files() const {
    std::vector<py::str> names;
    for (const File& file : files_) names.push_back(to_str(file.name));
    return names;
  }

  // The position of the first item without a record that can be read so.
  std::optional<size_t> lost() const { return lost_; }

  // The records of tensors in a file: their sizes by their offsets.
  py::dict records(size_t file) const {
    py::dict found;
    for (const Row& row : files_.at(file).rows) {
      if (!row.is_value) found[py::int_(row.offset)] = py::int_(row.num_bytes);
    }
    return found;
  }

  // Args: tensors: the plain tensors in the file's records, by the offsets of these.
  void set_tensors(size_t file, const py::dict& tensors) {
    for (Row& row : files_.at(file).rows) {
      if (row.is_value) continue;
      const py::int_ offset(row.offset);
      PyObject* const tensor = PyDict_GetItemWithError(tensors.ptr(), offset.ptr());
      row.set_tensor(tensor == nullptr ? py::none() : py::reinterpret_borrow<py::object>(tensor));
    }
  }

  // The bytes that the items want, without gaps.
  int64_t num_bytes() const {
    int64_t sum = 0;
    for (const File& file : files_) {
      for (const Row& row : file.rows) sum = core::checked_add(sum, row.wanted_bytes());
    }
    return sum;
  }

  // Positions of items as their records lie in the files, by the files' names; items without a record come first.
  std::vector<size_t> in_file_order() const {
    std::vector<const File*> by_name;
    for (const File& file : files_) by_name.push_back(&file);
    std::ranges::sort(by_name, {}, [](const File* file) { return std::string_view(file->name); });
    std::vector<size_t> order = without_record_;
    for (const File* file : by_name) {
      std::vector<const Row*> rows;
      for (const Row& row : file->rows) rows.push_back(&row);
      std::ranges::stable_sort(rows, {}, [](const Row* row) { return row->offset; });
      for (const Row* row : rows) order.push_back(row->position);
    }
    return order;
  }

  // Adds what the items want of a file, for `touch`: no memory is named.
  void touch(RunReader& runs, int64_t number, size_t file) const {
    for (const Row& row : files_.at(file).rows) {
      if (row.tensor == nullptr || row.tensor->strides != storage::capped_strides(row.tensor->sizes)) {
        runs.add_bytes(number, row.offset, row.num_bytes, 0);
      } else {
        const Wanted wanted = wanted_of(row);
        runs.add_box(number, {row.tensor->data_offset, row.tensor->item_bytes, row.tensor->sizes, row.tensor->strides,
                              wanted.saved_offsets, wanted.sizes, 0, row.tensor->strides, nullptr});
      }
    }
  }

  // What `add` did: one past the last row, the bytes that were added, and what was not.
  struct Added {
    size_t end = 0;
    int64_t num_bytes = 0;
    std::vector<Left> left;
  };
  // Adds rows of a file from `first` on, of about `max_bytes`. Args: targets: by key the tensor of the CPU whose boxes the
  // items fill as they lie.
  Added add(RunReader& runs, int64_t number, size_t file, size_t first, int64_t max_bytes, const py::dict& targets) {
    const std::vector<Row>& rows = files_.at(file).rows;
    Added added{first, 0, {}};
    int64_t wanted_bytes = 0;
    while (added.end < rows.size() && wanted_bytes < max_bytes) {
      const Row& row = rows[added.end++];
      wanted_bytes = core::checked_add(wanted_bytes, row.wanted_bytes());
      if (add_row(runs, number, row, targets)) {
        added.num_bytes += row.wanted_bytes();
      } else {
        added.left.emplace_back(row.position, row.offset, row.num_bytes, row.tensor_object);
      }
    }
    return added;
  }

  size_t num_rows(size_t file) const { return files_.at(file).rows.size(); }

 private:
  struct Row {
    size_t position = 0;  // of the item
    bool is_value = false;
    int64_t offset = 0;
    int64_t num_bytes = 0;
    int64_t num_elements = 0;
    const PlainTensor* tensor = nullptr;
    py::object tensor_object = py::none();  // owns it

    void set_tensor(py::object object) {
      tensor = object.is_none() ? nullptr : &object.cast<const PlainTensor&>();
      tensor_object = std::move(object);
    }
    int64_t wanted_bytes() const {
      return tensor == nullptr ? num_bytes : core::checked_mul(num_elements, tensor->item_bytes);
    }
  };
  struct File {
    std::string name;
    std::vector<Row> rows;
  };
  struct Wanted {
    Sizes saved_offsets, sizes;
  };

  template <typename Find>
  void add_items(const py::object& byte_io, const Find& find) {
    std::unordered_map<std::string, size_t> number_of;
    for (size_t position = 0; position < items_.size(); ++position) {
      const py::object item = items_[position];
      std::optional<Found> found = find(position, item);
      if (!found) {
        lost_ = lost_.value_or(position);
        without_record_.push_back(position);
        continue;
      }
      const auto [at, is_new] = number_of.try_emplace(found->file, files_.size());
      if (is_new) files_.push_back({std::move(found->file), {}});
      const bool is_value = byte_io.is(py::object(item.attr("type")));
      Row& row = files_[at->second].rows.emplace_back(
          Row{position, is_value, found->offset, found->num_bytes, 0, nullptr, py::none()});
      if (row.is_value) continue;
      row.num_elements = core::num_elements(to_sizes(item.attr("lengths")));
      row.set_tensor(std::move(found->tensor));
    }
  }

  Wanted wanted_of(const Row& row) const {
    const py::object item = items_[row.position];
    Wanted wanted{to_sizes(item.attr("storage_offsets")), to_sizes(item.attr("lengths"))};
    TTE_CHECK(wanted.saved_offsets.size() == wanted.sizes.size(), "item", "got ", wanted.saved_offsets.size(),
              " offsets and ", wanted.sizes.size(), " sizes");
    return wanted;
  }

  // Whether the reader itself can fill the item's target; then its box is added.
  bool add_row(RunReader& runs, int64_t number, const Row& row, const py::dict& targets) {
    if (row.tensor == nullptr) return false;
    const py::object item = items_[row.position];
    const LocalMemory* const target = targets_.find(targets, item.attr("dest_index").attr("fqn"));
    if (target == nullptr) return false;
    const bool is_cast = target->dtype != row.tensor->dtype;
    const storage::Cast* const cast = is_cast ? storage::find_cast(row.tensor->dtype, target->dtype) : nullptr;
    const Wanted wanted = wanted_of(row);
    const std::optional<int64_t> first = target->find_box(to_sizes(item.attr("dest_offsets")), wanted.sizes);
    if ((is_cast && cast == nullptr) || !first) return false;
    const int64_t item_bytes = cast == nullptr ? row.tensor->item_bytes : cast->dst_bytes;
    runs.add_box(number, {row.tensor->data_offset, row.tensor->item_bytes, row.tensor->sizes, row.tensor->strides,
                          wanted.saved_offsets, wanted.sizes,
                          target->address + static_cast<uintptr_t>(*first * item_bytes), target->strides, cast});
    return true;
  }

  py::list items_;
  std::vector<File> files_;
  std::vector<size_t> without_record_;
  std::optional<size_t> lost_;
  LocalMemories targets_;
};

// Queues the records of write items from `first` on, one behind the other, up to about `max_bytes`, or to the first item
// whose tensor is not at hand. Returns the position behind the last one.
// Args:
//   tensors: by key the tensor of the CPU of which an item writes a box.
//   boxes: by key and offsets where that box lies in the tensor, and its sizes.
size_t queue_items(storage::RecordWriter& records, const py::list& items, size_t first, int64_t max_bytes,
                   const py::dict& tensors, const py::dict& boxes, bool takes_sums) {
  LocalMemories memories;
  const int64_t end_bytes = core::checked_add(records.queued_bytes(), max_bytes);
  size_t position = first;
  for (; position < items.size() && records.queued_bytes() < end_bytes; ++position) {
    const py::object item = items[position], data = item.attr("tensor_data"), index = item.attr("index");
    const py::object fqn = index.attr("fqn"), offsets = index.attr("offset"), hint = index.attr("index");
    const LocalMemory* const memory = data.is_none() || offsets.is_none() ? nullptr : memories.find(tensors, fqn);
    const storage::ElementType* const type = memory == nullptr ? nullptr : storage::find_element_type(memory->dtype);
    if (type == nullptr) break;
    PyObject* const box = PyDict_GetItemWithError(boxes.ptr(), py::make_tuple(fqn, offsets).ptr());
    if (box == nullptr) break;
    const auto [local_offsets, sizes] = py::handle(box).cast<std::pair<py::object, py::object>>();
    storage::SavedRecord record;
    record.fqn = to_utf8(fqn);
    record.offsets = to_sizes(offsets);
    record.has_offsets = true;
    record.index_hint = hint.is_none() ? -1 : hint.cast<int64_t>();
    record.dtype = memory->dtype;
    record.sizes = to_sizes(sizes);
    const std::optional<int64_t> begin = memory->find_box(to_sizes(local_offsets), record.sizes);
    if (!begin || record.offsets.size() != record.sizes.size()) break;
    std::optional<Sizes> global_sizes;
    if (takes_sums) global_sizes = to_sizes(data.attr("size"));
    records.add_tensor(std::move(record), *type, memory->address + static_cast<uintptr_t>(*begin * type->item_bytes),
                       memory->strides, global_sizes);
  }
  return position;
}

}  // namespace

void define_plan_items(py::module_& module) {
  py::class_<ReadList::Added>(module, "AddedRows")
      .def_readonly("end", &ReadList::Added::end)
      .def_readonly("num_bytes", &ReadList::Added::num_bytes)
      .def_readonly("left", &ReadList::Added::left);
  py::class_<ReadList>(module, "ReadList", "The items that a rank reads, with their records.")
      .def(py::init<const py::list&, const py::object&, const MetadataColumns&>(), py::arg("items"), py::arg("byte_io"),
           py::arg("columns"))
      .def(py::init<const py::list&, const py::object&, const py::list&>(), py::arg("items"), py::arg("byte_io"),
           py::arg("records"))
      .def_property_readonly("files", &ReadList::files)
      .def_property_readonly("lost", &ReadList::lost)
      .def_property_readonly("num_bytes", &ReadList::num_bytes)
      .def("records", &ReadList::records, py::arg("file"))
      .def("set_tensors", &ReadList::set_tensors, py::arg("file"), py::arg("tensors"))
      .def("num_rows", &ReadList::num_rows, py::arg("file"))
      .def("in_file_order", &ReadList::in_file_order)
      .def("touch", &ReadList::touch, py::arg("runs"), py::arg("number"), py::arg("file"))
      .def("add", &ReadList::add, py::arg("runs"), py::arg("number"), py::arg("file"), py::arg("first"),
           py::arg("max_bytes"), py::arg("targets"));
  module.def("queue_items", &queue_items, py::arg("records"), py::arg("items"), py::arg("first"), py::arg("max_bytes"),
             py::arg("tensors"), py::arg("boxes"), py::arg("takes_sums"));
}

}  // namespace torchtitan_ext::bindings
