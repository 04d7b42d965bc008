#include "bindings/read_list.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/local_memory.h"
#include "bindings/reads.h"
#include "core/boxes.h"
#include "core/check.h"
#include "core/metadata_columns.h"
#include "storage/casts.h"
#include "storage/element_types.h"
#include "storage/run_reader.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using core::HashedNumbers;
using core::MetadataColumns;
using core::Overlap;
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

// The record of a part, by its number in the columns; nothing where there is none, or one that an extension has changed.
std::optional<Found> find_record(const MetadataColumns& columns, uint32_t number) {
  if (number == HashedNumbers::kNone) return std::nullopt;
  const SavedPart& part = columns.parts()[number];
  if (part.transforms != SavedPart::kNone) return std::nullopt;
  return Found{columns.names[part.path], part.offset_bytes, part.length_bytes, py::none()};
}

// What is left to the caller: the position of an item in its list, and its record.
using Left = std::tuple<size_t, int64_t, int64_t, py::object>;

class ReadList {
 public:
  // What a planner decided, by files and as it lies in them.
  ReadList(const Reads& reads, const MetadataColumns& columns) {
    size_t position = 0;
    for (const auto& [fqn, saved_name] : reads.values()) {
      add_item(position++, fqn, nullptr, find_record(columns, columns.find_part(to_utf8(saved_name), std::nullopt)));
    }
    std::unordered_map<const ReadAlike*, std::vector<uint32_t>> offsets_of;  // of the chunk of each part
    for (const auto& [fqn, saved_name, alike] : reads.tensors()) {
      const auto [offsets, is_new] = offsets_of.try_emplace(alike);
      if (is_new) {
        for (const Overlap& part : alike->parts) {
          offsets->second.push_back(columns.sizes.find(alike->saved().chunks()[part.saved].offsets));
        }
      }
      const std::optional<uint32_t> name = columns.names.find(to_utf8(saved_name));
      for (size_t part = 0; part < alike->parts.size(); ++part) {
        const uint32_t of_part = offsets->second[part];
        const bool is_known = name && of_part != HashedNumbers::kNone;
        add_item(position++, fqn, &alike->parts[part],
                 find_record(columns, is_known ? columns.find_part(*name, of_part) : HashedNumbers::kNone));
      }
    }
    sort();
  }

  // The items of any planner, by files in the order of their first items.
  // Args: byte_io: the type of items that are values and no tensors.
  ReadList(const py::list& items, const py::object& byte_io, const MetadataColumns& columns) {
    add_items(items, byte_io, [&columns](size_t, const py::object& item) {
      const py::object place = item.attr("storage_index"), offsets = place.attr("offset");
      return find_record(columns,
                         columns.find_part(to_utf8(place.attr("fqn")),
                                           offsets.is_none() ? std::nullopt : std::optional(to_sizes(offsets))));
    });
  }

  // With records that the caller has found, one for each item.
  ReadList(const py::list& items, const py::object& byte_io, const py::list& records) {
    TTE_CHECK(items.size() == records.size(), "ReadList", "got ", records.size(), " records of ", items.size(),
              " items");
    add_items(items, byte_io, [&records](size_t position, const py::object&) {
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

  // The keys of the state dict of which parts of tensors are read.
  py::set fqns() const {
    py::set fqns;
    for (const File& file : files_) {
      for (const Row& row : file.rows) {
        if (row.part != nullptr) fqns.add(row.fqn);
      }
    }
    return fqns;
  }

  // The position of the first item without a record that can be read so.
  std::optional<size_t> lost() const { return lost_; }

  // The records of tensors in a file: their sizes by their offsets.
  py::dict records(size_t file) const {
    py::dict found;
    for (const Row& row : files_.at(file).rows) {
      if (row.part != nullptr) found[py::int_(row.offset)] = py::int_(row.num_bytes);
    }
    return found;
  }

  // Args: tensors: the plain tensors in the file's records, by the offsets of these.
  void set_tensors(size_t file, const py::dict& tensors) {
    for (Row& row : files_.at(file).rows) {
      if (row.part == nullptr) continue;
      const py::object tensor = find_in(tensors, py::int_(row.offset));
      row.set_tensor(tensor ? tensor : py::none());
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
  std::vector<size_t> in_file_order() {
    sort();
    std::vector<size_t> order = without_record_;
    for (const File& file : files_) {
      for (const Row& row : file.rows) order.push_back(row.position);
    }
    return order;
  }

  // Adds what the items want of a file, for `touch`: no memory is named.
  void touch(RunReader& runs, int64_t number, size_t file) const {
    for (const Row& row : files_.at(file).rows) {
      if (row.tensor == nullptr || row.tensor->strides != storage::capped_strides(row.tensor->sizes)) {
        runs.add_bytes(number, row.offset, row.num_bytes, 0);
      } else {
        runs.add_box(number, {row.tensor->data_offset, row.tensor->item_bytes, row.tensor->sizes, row.tensor->strides,
                              row.part->saved_offsets, row.part->sizes, 0, row.tensor->strides, nullptr});
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
    size_t position = 0;            // of the item
    py::object fqn;                 // of the target
    const Overlap* part = nullptr;  // none of a value
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

  template <typename Find>
  void add_items(const py::list& items, const py::object& byte_io, const Find& find) {
    for (size_t position = 0; position < items.size(); ++position) {
      const py::object item = items[position];
      const Overlap* part = nullptr;
      if (!byte_io.is(py::object(item.attr("type")))) {
        parts_.push_back({0, 0, item.attr("storage_offsets").cast<Sizes>(), item.attr("dest_offsets").cast<Sizes>(),
                          item.attr("lengths").cast<Sizes>()});
        part = &parts_.back();
        TTE_CHECK(part->saved_offsets.size() == part->sizes.size(), "item", "got ", part->saved_offsets.size(),
                  " offsets and ", part->sizes.size(), " sizes");
      }
      add_item(position, item.attr("dest_index").attr("fqn"), part, find(position, item));
    }
  }

  void add_item(size_t position, const py::handle& fqn, const Overlap* part, std::optional<Found> found) {
    if (!found) {
      lost_ = lost_.value_or(position);
      without_record_.push_back(position);
      return;
    }
    const auto [at, is_new] = number_of_.try_emplace(found->file, files_.size());
    if (is_new) files_.push_back({std::move(found->file), {}});
    Row& row = files_[at->second].rows.emplace_back(
        Row{position, py::reinterpret_borrow<py::object>(fqn), part, found->offset, found->num_bytes});
    if (part == nullptr) return;
    row.num_elements = core::num_elements(part->sizes);
    row.set_tensor(std::move(found->tensor));
  }

  void sort() {
    std::ranges::sort(files_, {}, [](const File& file) { return std::string_view(file.name); });
    for (File& file : files_) std::ranges::stable_sort(file.rows, {}, &Row::offset);
  }

  // Whether the reader itself can fill the item's target; then its box is added.
  bool add_row(RunReader& runs, int64_t number, const Row& row, const py::dict& targets) {
    if (row.tensor == nullptr) return false;
    const LocalMemory* const target = targets_.find(targets, row.fqn);
    if (target == nullptr) return false;
    const bool is_cast = target->dtype != row.tensor->dtype;
    const storage::Cast* const cast = is_cast ? storage::find_cast(row.tensor->dtype, target->dtype) : nullptr;
    const std::optional<int64_t> first = target->find_box(row.part->local_offsets, row.part->sizes);
    if ((is_cast && cast == nullptr) || !first) return false;
    const int64_t item_bytes = cast == nullptr ? row.tensor->item_bytes : cast->dst_bytes;
    runs.add_box(number, {row.tensor->data_offset, row.tensor->item_bytes, row.tensor->sizes, row.tensor->strides,
                          row.part->saved_offsets, row.part->sizes,
                          target->address + static_cast<uintptr_t>(*first * item_bytes), target->strides, cast});
    return true;
  }

  std::deque<Overlap> parts_;  // of items
  std::vector<File> files_;
  std::unordered_map<std::string, size_t> number_of_;  // of a file, before they are sorted
  std::vector<size_t> without_record_;
  std::optional<size_t> lost_;
  LocalMemories targets_;
};

}  // namespace

void define_read_list(py::module_& module) {
  py::class_<ReadList::Added>(module, "AddedRows")
      .def_readonly("end", &ReadList::Added::end)
      .def_readonly("num_bytes", &ReadList::Added::num_bytes)
      .def_readonly("left", &ReadList::Added::left);
  py::class_<ReadList>(module, "ReadList", "What a rank reads, with its records.")
      .def(py::init<const Reads&, const MetadataColumns&>(), py::arg("reads"), py::arg("columns"),
           py::keep_alive<1, 2>())
      .def(py::init<const py::list&, const py::object&, const MetadataColumns&>(), py::arg("items"), py::arg("byte_io"),
           py::arg("columns"))
      .def(py::init<const py::list&, const py::object&, const py::list&>(), py::arg("items"), py::arg("byte_io"),
           py::arg("records"))
      .def_property_readonly("files", &ReadList::files)
      .def_property_readonly("fqns", &ReadList::fqns)
      .def_property_readonly("lost", &ReadList::lost)
      .def_property_readonly("num_bytes", &ReadList::num_bytes)
      .def("records", &ReadList::records, py::arg("file"))
      .def("set_tensors", &ReadList::set_tensors, py::arg("file"), py::arg("tensors"))
      .def("num_rows", &ReadList::num_rows, py::arg("file"))
      .def("in_file_order", &ReadList::in_file_order)
      .def("touch", &ReadList::touch, py::arg("runs"), py::arg("number"), py::arg("file"))
      .def("add", &ReadList::add, py::arg("runs"), py::arg("number"), py::arg("file"), py::arg("first"),
           py::arg("max_bytes"), py::arg("targets"));
}

}  // namespace torchtitan_ext::bindings
