#include "bindings/writes.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
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

// What a rank writes, one row per item: values that are no tensors, then tensors, both in the order of keys.
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
    const auto place = [this](const Row& row) {
      return std::tuple(parts_[row.part].position.has_value(), row.section, row.key);
    };
    std::stable_sort(rows_.begin(), rows_.end(),
                     [&place](const Row& left, const Row& right) { return place(left) < place(right); });
  }

  const std::vector<WritePart>& parts() const { return parts_; }
  size_t num_items() const { return rows_.size(); }
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

  // The size of all tensors, without values and the frames of records.
  int64_t num_bytes() const {
    std::vector<int64_t> of_part;
    for (const WritePart& part : parts_) {
      const bool is_tensor = part.position.has_value();
      of_part.push_back(is_tensor ? checked_mul(num_elements(part.chunk.sizes),
                                                part.entry.attr("dtype").attr("itemsize").cast<int64_t>())
                                  : 0);
    }
    int64_t sum = 0;
    for (const Row& row : rows_) sum = checked_add(sum, of_part[row.part]);
    return sum;
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

  // Queues the records of rows from `first` on, one behind the other, up to about `max_bytes`, or to the first one whose
  // tensor is not at hand. Returns the position behind the last one.
  // Args: tensors: by key the tensor of the CPU of which a row is a box.
  size_t queue(storage::RecordWriter& records, size_t first, int64_t max_bytes, const py::dict& tensors,
               bool takes_sums) const {
    LocalMemories memories;
    std::unordered_map<size_t, Sizes> global_sizes;  // of parts
    const int64_t end_bytes = checked_add(records.queued_bytes(), max_bytes);
    size_t position = first;
    for (; position < rows_.size() && records.queued_bytes() < end_bytes; ++position) {
      const Row& row = rows_[position];
      const auto& [entry, chunk, hint] = parts_[row.part];
      const LocalMemory* const memory = hint ? memories.find(tensors, row.fqn) : nullptr;
      const storage::ElementType* const type = memory == nullptr ? nullptr : storage::find_element_type(memory->dtype);
      if (type == nullptr) break;
      const std::optional<int64_t> begin = memory->find_box(chunk.local_offsets, chunk.sizes);
      if (!begin) break;
      storage::SavedRecord record;
      record.fqn = to_utf8(row.fqn);
      record.offsets = chunk.offsets;
      record.has_offsets = true;
      record.index_hint = static_cast<int64_t>(*hint);
      record.dtype = memory->dtype;
      record.sizes = chunk.sizes;
      std::optional<Sizes> of_tensor;
      if (takes_sums) {
        const auto [known, is_new] = global_sizes.try_emplace(row.part);
        if (is_new) known->second = entry.attr("global_shape").cast<Sizes>();
        of_tensor = known->second;
      }
      records.add_tensor(std::move(record), *type, memory->address + static_cast<uintptr_t>(*begin * type->item_bytes),
                         memory->strides, of_tensor);
    }
    return position;
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
      .def_property_readonly("num_items", &Writes::num_items)
      .def_property_readonly("num_bytes", &Writes::num_bytes)
      .def("local_boxes", &Writes::local_boxes)
      .def("queue", &Writes::queue, py::arg("records"), py::arg("first"), py::arg("max_bytes"), py::arg("tensors"),
           py::arg("takes_sums"));
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
}

}  // namespace torchtitan_ext::bindings
