#include "bindings/items.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/reports.h"
#include "bindings/saved_chunks.h"
#include "core/boxes.h"
#include "core/check.h"
#include "core/metadata_columns.h"
#include "core/write_plan.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

// The keys of each section of a table, in the order that a decision refers to.
using Names = std::vector<py::list>;

// What a dict has for a key; a null object where it has nothing.
py::object get(const py::dict& values, const py::handle& fqn) {
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(values.ptr(), fqn.ptr()));
}

py::object entry_of(const py::dict& entries, const py::handle& fqn) {
  const py::object entry = get(entries, fqn);
  if (!entry) throw py::key_error(py::str(fqn));
  return entry;
}

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
      const py::object entry = get(entries, names[section][key]);
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

// Keys that are held alike, and were saved alike.
struct ReadAlike {
  py::object entry;  // its address, and that of the list, stay their own
  py::object chunk_list;
  std::vector<Chunk> wanted;
  std::vector<py::tuple> parts;
  int64_t num_read = 0;
};

// A tensor of which the saved chunks do not hold, once, all that the rank wants.
struct Unfilled {
  py::object fqn;
  int64_t num_wanted = 0;
  int64_t num_read = 0;
};

// What a rank reads: values that are no tensors, and one row per part of a saved chunk.
struct Reads {
  py::dict values;  // by key the name in the checkpoint
  py::list fqns;
  py::list saved_names;
  py::list offsets;
  py::list positions;
  py::list local_offsets;
  py::list chunk_offsets;
  py::list chunk_positions;
  py::list saved_offsets;
  py::list sizes;
  std::vector<std::pair<py::object, const ReadAlike*>> tensors;
  std::map<std::tuple<PyObject*, PyObject*, std::optional<Sizes>>, ReadAlike> alike;

  void add(const py::object& fqn, const py::object& saved_name, const ReadAlike& reads) {
    for (const py::tuple& part : reads.parts) {
      fqns.append(fqn);
      saved_names.append(saved_name);
      size_t column = 0;
      for (py::list* const values :
           {&offsets, &positions, &local_offsets, &chunk_offsets, &chunk_positions, &saved_offsets, &sizes}) {
        values->append(part[column++]);
      }
    }
    tensors.emplace_back(fqn, &reads);
  }

  std::vector<Unfilled> unfilled() const {
    std::map<const ReadAlike*, bool> is_filled;
    std::vector<Unfilled> result;
    for (const auto& [fqn, reads] : tensors) {
      const auto [found, is_new] = is_filled.try_emplace(reads);
      if (is_new) found->second = reads->chunk_list.cast<const ChunkIndex&>().fills(reads->wanted);
      if (found->second) continue;
      int64_t num_wanted = 0;
      for (const Chunk& chunk : reads->wanted) num_wanted += num_elements(chunk.sizes);
      result.push_back({fqn, num_wanted, reads->num_read});
    }
    return result;
  }
};

// One Python object for equal sizes: thousands of them would wake the garbage collector.
class SizeObjects {
 public:
  explicit SizeObjects(py::object size_class) : size_class_(std::move(size_class)) {}

  py::object operator()(const Sizes& sizes) {
    py::object& object = objects_[sizes];
    if (!object) object = size_class_(to_tuple(sizes));
    return object;
  }

 private:
  py::object size_class_;
  std::map<Sizes, py::object> objects_;
};

ReadAlike find_parts(const py::object& entry, const py::object& chunk_list, std::vector<Chunk> wanted,
                     SizeObjects& to_size) {
  const auto& saved = chunk_list.cast<const ChunkIndex&>();
  ReadAlike alike{entry, chunk_list, std::move(wanted), {}, 0};
  for (const Overlap& part : saved.find_overlaps(alike.wanted)) {
    alike.parts.push_back(py::make_tuple(to_size(alike.wanted[part.wanted].offsets), part.wanted,
                                         to_size(part.local_offsets), to_size(saved.chunks()[part.saved].offsets),
                                         part.saved, to_size(part.saved_offsets), to_size(part.sizes)));
    alike.num_read += num_elements(part.sizes);
  }
  return alike;
}

Reads find_reads(const Names& names, const py::dict& entries, const py::dict& saved_names, SavedChunks& saved,
                 const py::dict& decided, const py::object& size_class) {
  Reads reads;
  EntryTypes types;
  SizeObjects to_size(size_class);
  for (const py::list& of_section : names) {
    for (const py::handle name : of_section) {
      const py::object fqn = py::reinterpret_borrow<py::object>(name);
      const py::object entry = entry_of(entries, fqn);
      const py::object renamed = get(saved_names, fqn);
      const py::object& saved_name = renamed ? renamed : fqn;
      const EntryType type = types.of(entry);
      if (type == EntryType::kObject) {
        reads.values[fqn] = saved_name;
        continue;
      }
      std::optional<std::vector<ShardStep>> steps;
      std::optional<Sizes> order;
      if (const py::object stated = get(decided, fqn)) {
        steps = to_steps(stated.cast<std::vector<StepTuple>>());
        order.emplace();
        for (const ShardStep& step : *steps) order->insert(order->end(), {step.axis, step.dim, step.split_factor});
      }
      const py::object chunk_list = saved.find(saved_name);
      TTE_CHECK(!chunk_list.is_none(), "find_reads", to_utf8(fqn),
                " is planned as a tensor and not saved as one, please report");
      const auto [place, is_new] = reads.alike.try_emplace({entry.ptr(), chunk_list.ptr(), std::move(order)});
      if (is_new) {
        place->second = find_parts(entry, chunk_list, held_chunks(entry, type, steps ? &*steps : nullptr), to_size);
      }
      reads.add(fqn, saved_name, place->second);
    }
  }
  return reads;
}

}  // namespace

void define_items(py::module_& module) {
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
  module.def("find_saved_alike", &find_saved_alike, py::arg("entries"), py::arg("columns"));
  py::class_<Unfilled>(module, "Unfilled")
      .def_readonly("fqn", &Unfilled::fqn)
      .def_readonly("num_wanted", &Unfilled::num_wanted)
      .def_readonly("num_read", &Unfilled::num_read);
  py::class_<Reads>(module, "Reads", "What a rank reads, one row per part of a saved chunk.")
      .def_readonly("values", &Reads::values)
      .def_readonly("fqns", &Reads::fqns)
      .def_readonly("saved_names", &Reads::saved_names)
      .def_readonly("offsets", &Reads::offsets)
      .def_readonly("positions", &Reads::positions)
      .def_readonly("local_offsets", &Reads::local_offsets)
      .def_readonly("chunk_offsets", &Reads::chunk_offsets)
      .def_readonly("chunk_positions", &Reads::chunk_positions)
      .def_readonly("saved_offsets", &Reads::saved_offsets)
      .def_readonly("sizes", &Reads::sizes)
      .def("unfilled", &Reads::unfilled);
  module.def("find_reads", &find_reads, py::arg("names"), py::arg("entries"), py::arg("saved_names"), py::arg("saved"),
             py::arg("decided"), py::arg("size_class"));
}

}  // namespace torchtitan_ext::bindings
