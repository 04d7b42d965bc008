#include "bindings/writes.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/local_memory.h"
#include "bindings/reports.h"
#include "core/boxes.h"
#include "core/check.h"
#include "core/write_plan.h"
#include "storage/element_types.h"
#include "storage/record_writer.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

// What one item writes of a key. Keys that are held alike share it.
struct WritePart {
  py::object entry;
  Chunk chunk;
  std::optional<size_t> position;  // in the metadata's list; none of an object
};

// What a rank writes, one row per item, in the order of keys.
class Writes {
 public:
  void add(size_t section, const std::vector<uint32_t>& keys, const py::list& names, std::vector<WritePart> parts) {
    for (const uint32_t key : keys) {
      for (size_t part = 0; part < parts.size(); ++part)
        rows_.push_back({section, key, parts_.size() + part, names[key]});
    }
    std::move(parts.begin(), parts.end(), std::back_inserter(parts_));
  }

  void finish() {
    std::stable_sort(rows_.begin(), rows_.end(), [](const Row& left, const Row& right) {
      return std::pair(left.section, left.key) < std::pair(right.section, right.key);
    });
  }

  const std::vector<WritePart>& parts() const { return parts_; }
  py::list fqns() const {
    py::list fqns(rows_.size());
    for (size_t row = 0; row < rows_.size(); ++row) fqns[row] = rows_[row].fqn;
    return fqns;
  }
  std::vector<size_t> part_of() const {
    std::vector<size_t> numbers;
    for (const Row& row : rows_) numbers.push_back(row.part);
    return numbers;
  }

  // Where each written box lies in the rank's local tensor, and its sizes, by key and offsets.
  py::dict local_boxes() const {
    std::vector<py::tuple> offsets;
    std::vector<py::tuple> boxes;
    for (const WritePart& part : parts_) {
      offsets.push_back(to_tuple(part.chunk.offsets));
      boxes.push_back(py::make_tuple(to_tuple(part.chunk.local_offsets), to_tuple(part.chunk.sizes)));
    }
    py::dict result;
    for (const Row& row : rows_) {
      if (parts_[row.part].position) result[py::make_tuple(row.fqn, offsets[row.part])] = boxes[row.part];
    }
    return result;
  }

 private:
  struct Row {
    size_t section;
    uint32_t key;
    size_t part;
    py::object fqn;
  };

  std::vector<WritePart> parts_;
  std::vector<Row> rows_;
};

// What a rank writes of a tensor that is its part. A tensor without elements is one chunk, so that its key exists.
std::vector<Chunk> written_chunks(const py::handle& entry, const std::vector<ShardStep>* steps) {
  const Sizes shape = entry.attr("report").attr("global_shape").cast<Sizes>();
  if (std::ranges::find(shape, 0) == shape.end()) return held_chunks(entry, EntryType::kTensor, steps);
  const Sizes zeros(shape.size(), 0);
  return {{zeros, shape, zeros}};
}

std::vector<WritePart> parts_from(const py::object& entry, std::vector<Chunk> chunks, size_t first_chunk) {
  std::vector<WritePart> parts;
  for (Chunk& chunk : chunks) parts.push_back({entry, std::move(chunk), first_chunk + parts.size()});
  return parts;
}

// Boxes that a tensor states, with their places in its local tensor.
std::vector<WritePart> parts_of_boxes(const py::object& entry, const std::vector<std::pair<size_t, Chunk>>& boxes) {
  const std::vector<Chunk> held = held_chunks(entry, EntryType::kBoxes, nullptr);
  std::vector<WritePart> parts;
  for (const auto& [position, box] : boxes) {
    const auto found = std::find_if(held.rbegin(), held.rend(), [&box](const Chunk& chunk) {
      return chunk.offsets == box.offsets && chunk.sizes == box.sizes;
    });
    parts.push_back(
        {entry, found == held.rend() ? Chunk{box.offsets, box.sizes, Sizes(box.sizes.size(), 0)} : *found, position});
  }
  return parts;
}

// Pieces of the one box of a shard, with their places in the local tensor.
std::vector<WritePart> parts_of_pieces(const py::object& entry, const ClassWrites& writes) {
  const std::vector<Chunk> held = written_chunks(entry, &writes.steps);
  TTE_CHECK(held.size() == 1, "decision", "a shard of ", held.size(), " boxes is divided");
  std::vector<WritePart> parts;
  for (const auto& [position, box] : writes.boxes) {
    std::optional<Chunk> piece = intersect(held.front(), box_of(box));
    TTE_CHECK(piece && piece->sizes == box.sizes, "decision", "a piece does not lie in its shard");
    parts.push_back({entry, *std::move(piece), position});
  }
  return parts;
}

Writes read_writes(const py::bytes& decision, const Names& names, const std::vector<std::vector<uint32_t>>& kind_of,
                   const py::dict& entries) {
  Writes written;
  EntryTypes types;
  for (const ClassWrites& writes : read_decision(static_cast<std::string_view>(decision), kind_of)) {
    const py::list& of_section = names.at(writes.section);
    TTE_CHECK(!writes.keys.empty(), "decision", "a class has none of this rank's keys");
    const py::object entry = entry_of(entries, of_section[writes.keys.front()]);
    std::vector<WritePart> parts;
    switch (types.of(entry)) {
      case EntryType::kBoxes:
        parts = parts_of_boxes(entry, writes.boxes);
        break;
      case EntryType::kTensor:
        parts = writes.boxes.empty() ? parts_from(entry, written_chunks(entry, &writes.steps), writes.first_chunk)
                                     : parts_of_pieces(entry, writes);
        break;
      default:
        parts = {{entry, {}, std::nullopt}};
    }
    written.add(writes.section, writes.keys, of_section, std::move(parts));
  }
  written.finish();
  return written;
}

Writes held_writes(const Names& names, const py::dict& entries) {
  Writes written;
  EntryTypes types;
  for (size_t section = 0; section < names.size(); ++section) {
    for (uint32_t key = 0; key < names[section].size(); ++key) {
      const py::object entry = find_in(entries, names[section][key]);
      if (!entry) continue;  // other ranks hold the key
      const EntryType type = types.of(entry);
      std::vector<WritePart> parts = {{entry, {}, std::nullopt}};
      if (type == EntryType::kBoxes) parts = parts_from(entry, held_chunks(entry, type, nullptr), 0);
      if (type == EntryType::kTensor) parts = parts_from(entry, written_chunks(entry, nullptr), 0);
      written.add(section, {key}, names[section], std::move(parts));
    }
  }
  written.finish();
  return written;
}

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
    const py::object box = find_in(boxes, py::make_tuple(fqn, offsets));
    if (!box) break;
    const auto [local_offsets, sizes] = box.cast<std::pair<py::object, py::object>>();
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

void define_writes(py::module_& module) {
  py::class_<WritePart>(module, "WritePart")
      .def_readonly("entry", &WritePart::entry)
      .def_property_readonly("offsets", [](const WritePart& part) { return to_tuple(part.chunk.offsets); })
      .def_property_readonly("sizes", [](const WritePart& part) { return to_tuple(part.chunk.sizes); })
      .def_readonly("position", &WritePart::position);
  py::class_<Writes>(module, "Writes", "What a rank writes, one row per item.")
      .def_property_readonly("parts", &Writes::parts)
      .def_property_readonly("fqns", &Writes::fqns)
      .def_property_readonly("part_of", &Writes::part_of)
      .def("local_boxes", &Writes::local_boxes);
  module.def("read_writes", &read_writes, py::arg("decision"), py::arg("names"), py::arg("kind_of"),
             py::arg("entries"));
  module.def("held_writes", &held_writes, py::arg("names"), py::arg("entries"));
  module.def(
      "written_boxes",
      [](const py::object& entry, const std::vector<StepTuple>& steps) {
        const std::vector<ShardStep> order = to_steps(steps);
        return to_boxes(written_chunks(entry, &order));
      },
      py::arg("entry"), py::arg("steps"));
  module.def("queue_items", &queue_items, py::arg("records"), py::arg("items"), py::arg("first"), py::arg("max_bytes"),
             py::arg("tensors"), py::arg("boxes"), py::arg("takes_sums"));
}

}  // namespace torchtitan_ext::bindings
