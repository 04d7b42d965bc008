// Key tables, agreement and write plans for Python. Like core.cpp it converts and decides nothing.
#include "bindings/plan.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/convert.h"
#include "bindings/saved_chunks.h"
#include "core/agreement.h"
#include "core/box_batches.h"
#include "core/boxes.h"
#include "core/metadata_columns.h"
#include "core/problems.h"
#include "core/replica_digests.h"
#include "core/write_plan.h"

namespace py = pybind11;
using namespace torchtitan_ext::core;      // NOLINT: this file only translates that namespace
using namespace torchtitan_ext::bindings;  // NOLINT: and what all bindings convert

namespace {

std::string_view to_view(const py::bytes& bytes) { return static_cast<std::string_view>(bytes); }

py::list names_py(const JointTable& joint) {
  py::list names;
  for (uint32_t key = 0; key < joint.num_keys(); ++key) names.append(to_str(joint.name(key)));
  return names;
}

// Of the keys that have one.
py::dict paths_py(const JointTable& joint) {
  py::dict paths;
  for (uint32_t key = 0; key < joint.num_keys(); ++key) {
    const auto [section, form] = joint.path(key);
    if (form == 0) continue;
    const PathForm& path_form = joint.sections()[section].columns.forms[form - 1];
    const std::vector<std::string_view> parts = cut_path(joint.name(key), path_form);
    py::tuple path(parts.size());
    for (size_t part = 0; part < parts.size(); ++part) {
      const bool is_position = path_form.parts[part].second;
      path[part] =
          is_position ? py::object(py::int_(std::stoll(std::string(parts[part])))) : py::object(to_str(parts[part]));
    }
    paths[to_str(joint.name(key))] = path;
  }
  return paths;
}

const KeyClass& class_at(const JointTable& joint, size_t index) { return joint.classes().at(index); }

// What keys of one class have in common.
struct KeyKind {
  EntryType type;
  py::str dtype;  // empty of objects
  py::tuple global_shape;
  bool requires_grad;
  bool is_plain;
};

KeyKind kind_of_class(const JointTable& joint, const KeyClass& of_keys) {
  const Kind& kind = joint.kind_of(of_keys);
  return {kind.type, to_str(kind.dtype), to_tuple(kind.shape), kind.requires_grad, of_keys.is_plain};
}

std::vector<KeyKind> kinds_py(const JointTable& joint) {
  std::vector<KeyKind> kinds;
  for (const KeyClass& of_keys : joint.classes()) kinds.push_back(kind_of_class(joint, of_keys));
  return kinds;
}

// The keys that some rank holds.
py::list held_names_py(const JointTable& joint) {
  py::list names;
  for (uint32_t key = 0; key < joint.num_keys(); ++key) {
    if (joint.class_of(key) != JointTable::kNoClass) names.append(to_str(joint.name(key)));
  }
  return names;
}

// The class of each key that some rank holds and that has no problem, in increasing order of keys.
py::dict agreed_keys_py(const JointTable& joint) {
  py::dict classes;
  for (uint32_t key = 0; key < joint.num_keys(); ++key) {
    if (joint.is_agreed(key)) classes[py::int_(key)] = joint.class_of(key);
  }
  return classes;
}

// By key, in increasing order. Keys of a class have the same.
py::dict problems_py(const JointTable& joint) {
  std::map<uint32_t, py::object> problems;
  for (const KeyClass& of_keys : joint.classes()) {
    if (!of_keys.trouble) continue;
    const py::object problem = py::cast(problem_of(joint, of_keys));
    for (const uint32_t key : of_keys.keys) problems[key] = problem;
  }
  py::dict result;
  for (const auto& [key, problem] : problems) result[py::int_(key)] = problem;
  return result;
}

py::list ranks_py(const JointTable& joint, size_t index) {
  py::list ranks;
  for (const Member& member : class_at(joint, index).members) ranks.append(member.rank);
  return ranks;
}

// Per rank and key the order of sharding, where the rank takes its placements to mean another one.
py::list unforeseen_steps_py(const JointTable& joint) {
  std::vector<py::dict> found(joint.num_ranks());
  for (const KeyClass& of_keys : joint.classes()) {
    for (const Replica& replica : of_keys.replicas) {
      if (replica.is_foreseen) continue;
      const py::tuple steps = to_tuple(replica.steps);
      for (const uint32_t key : of_keys.keys) {
        const py::str name = to_str(joint.name(key));
        for (const int64_t rank : replica.ranks) found[static_cast<size_t>(rank)][name] = steps;
      }
    }
  }
  return py::cast(found);
}

// The true order of sharding of each tensor that a rank holds and that does not describe itself.
py::dict steps_of_py(const JointTable& joint, int64_t rank) {
  py::dict found;
  for (const KeyClass& of_keys : joint.classes()) {
    if (of_keys.trouble || joint.kind_of(of_keys).type != EntryType::kTensor) continue;
    for (const Replica& replica : of_keys.replicas) {
      if (std::ranges::find(replica.ranks, rank) == replica.ranks.end()) continue;
      const py::tuple steps = to_tuple(replica.steps);
      for (const uint32_t key : of_keys.keys) found[to_str(joint.name(key))] = steps;
    }
  }
  return found;
}

bool has_meshes_py(const JointTable& joint) {
  return std::ranges::any_of(joint.sections(), [](const Section& section) { return !section.columns.meshes.empty(); });
}

py::dict to_dict(const std::vector<std::pair<std::string, int64_t>>& axes) {
  py::dict sizes;
  for (const auto& [name, size] : axes) sizes[to_str(name)] = size;
  return sizes;
}

// Whether saved chunks hold, once, all that ranks hold of each key of a class.
bool is_filled_py(const JointTable& joint, size_t index, const ChunkIndex& saved) {
  const KeyClass& of_keys = class_at(joint, index);
  const Sizes& shape = joint.kind_of(of_keys).shape;
  if (!saved.chunks().empty() && !std::ranges::equal(saved.end(), shape, std::less_equal())) return false;
  std::vector<Chunk> wanted;
  for (const Replica& replica : of_keys.replicas) {
    for (const HeldShard& shard : replica.shards) wanted.insert(wanted.end(), shard.boxes.begin(), shard.boxes.end());
  }
  return saved.fills(wanted);
}

py::list written_boxes_py(const JointTable& joint, size_t index) {
  py::list boxes;
  for (const HeldShard& shard : WritePlan::written_shards(class_at(joint, index))) {
    for (const Chunk& box : shard.boxes) boxes.append(to_box(box));
  }
  return boxes;
}

void define_joint_table(py::module_& module) {
  py::native_enum<EntryType>(module, "EntryType", "enum.Enum")
      .value("NONE", EntryType::kNone)
      .value("OBJECT", EntryType::kObject)
      .value("TENSOR", EntryType::kTensor)
      .value("BOXES", EntryType::kBoxes)
      .finalize();
  py::class_<KeyKind>(module, "KeyKind")
      .def_readonly("type", &KeyKind::type)
      .def_readonly("dtype", &KeyKind::dtype)
      .def_readonly("global_shape", &KeyKind::global_shape)
      .def_readonly("requires_grad", &KeyKind::requires_grad)
      .def_readonly("is_plain", &KeyKind::is_plain)
      .def_property_readonly("is_object", [](const KeyKind& kind) { return kind.type == EntryType::kObject; });
  py::class_<HeldShard>(module, "HeldShard", "A shard and the ranks that hold it alike; see csrc/core/agreement.h.")
      .def(py::init([](std::vector<int64_t> ranks, const std::vector<BoxTuple>& boxes) {
             return HeldShard{std::move(ranks), to_chunks(boxes)};
           }),
           py::arg("ranks"), py::arg("boxes"))
      .def_property_readonly("ranks", [](const HeldShard& shard) { return to_tuple(shard.ranks); })
      .def_property_readonly("boxes", [](const HeldShard& shard) { return to_boxes(shard.boxes); })
      .def("__eq__", [](const HeldShard& shard, const HeldShard& other) {
        return shard.ranks == other.ranks && to_boxes(shard.boxes).equal(to_boxes(other.boxes));
      });
  py::class_<Replica>(module, "Replica", "One complete tensor; see csrc/core/agreement.h.")
      .def_property_readonly("steps", [](const Replica& replica) { return to_tuple(replica.steps); })
      .def_readonly("ranks", &Replica::ranks)
      .def_property_readonly("shards", [](const Replica& replica) { return py::tuple(py::cast(replica.shards)); });
  py::class_<JointTable>(module, "JointTable", "What all ranks' key tables say together; see csrc/core/agreement.h.")
      .def(py::init<>())
      .def("add_section", [](JointTable& joint, const py::bytes& bytes) { return joint.add_section(to_view(bytes)); })
      .def("add_rank", [](JointTable& joint, std::vector<size_t> sections,
                          const py::bytes& part) { joint.add_rank(std::move(sections), to_view(part)); })
      .def("agree", &JointTable::agree, py::call_guard<py::gil_scoped_release>(), py::arg("needs_all_ranks"))
      .def_property_readonly("num_ranks", &JointTable::num_ranks)
      .def("names", &names_py)
      .def("paths", &paths_py)
      .def_property_readonly("has_meshes", &has_meshes_py)
      .def("axes", [](const JointTable& joint) { return to_dict(joint.axes()); })
      .def("held_names", &held_names_py)
      .def("agreed_keys", &agreed_keys_py)
      .def("kind_of", [](const JointTable& joint,
                         uint32_t key) { return kind_of_class(joint, class_at(joint, joint.class_of(key))); })
      .def("kinds", &kinds_py)
      .def("problems", &problems_py)
      .def("ranks", &ranks_py)
      .def("replicas", [](const JointTable& joint, size_t index) { return class_at(joint, index).replicas; })
      .def("describe_replicas", [](const JointTable& joint,
                                   uint32_t key) { return describe_replicas(class_at(joint, joint.class_of(key))); })
      .def("steps_of", &steps_of_py, py::arg("rank"))
      .def("unforeseen_steps", &unforeseen_steps_py)
      .def("is_filled", &is_filled_py, py::arg("of_class"), py::arg("saved"))
      .def("written_boxes", &written_boxes_py);
}

void define_axes(py::module_& module) {
  using Mesh = std::pair<Sizes, std::optional<std::vector<std::string>>>;  // shape and names
  module.def(
      "axes_of",
      [](const std::vector<Mesh>& meshes, const std::vector<size_t>& held) {
        std::vector<MeshForm> forms;
        for (const auto& [shape, names] : meshes) {
          forms.push_back({shape, true, {}, names.has_value(), names.value_or(std::vector<std::string>())});
        }
        return to_dict(axes_of(std::move(forms), held));
      },
      py::arg("meshes"), py::arg("held") = std::vector<size_t>());
}

void define_replica_digests(py::module_& module) {
  using Side = ReplicaDigests::Side;
  using Difference = ReplicaDigests::Difference;
  using Comparison = ReplicaDigests::Comparison;
  py::class_<Side>(module, "DigestOfRank")
      .def_readonly("rank", &Side::rank)
      .def_property_readonly("digest", [](const Side& side) { return py::bytes(side.digest); })
      .def_readonly("is_cut", &Side::is_cut);
  py::class_<Difference>(module, "ReplicaDifference")
      .def_readonly("key", &Difference::key)
      .def_readonly("first", &Difference::first)
      .def_readonly("second", &Difference::second)
      .def_readonly("is_presumed", &Difference::is_presumed);
  py::class_<Comparison>(module, "DigestComparison")
      .def_readonly("differing", &Comparison::differing)
      .def_readonly("equal", &Comparison::equal)
      .def_readonly("uncompared", &Comparison::uncompared);
  py::class_<ReplicaDigests>(module, "ReplicaDigests", "Whether replicas are equal; see csrc/core/replica_digests.h.")
      .def(py::init<const JointTable&>(), py::keep_alive<1, 2>())
      .def("add_message", [](ReplicaDigests& digests, size_t section,
                             const py::bytes& bytes) { return digests.add_message(section, to_view(bytes)); })
      .def("add_rank", &ReplicaDigests::add_rank)
      .def("compare", py::overload_cast<>(&ReplicaDigests::compare, py::const_),
           py::call_guard<py::gil_scoped_release>());
}

// The metadata that a plan writes, without places: of all keys that some rank holds, in their order.
MetadataColumns planned_columns(const JointTable& joint, const WritePlan& plan) {
  MetadataColumns columns;
  std::unordered_map<uint32_t, SavedKey> known;  // keys of a class differ by name alone
  for (uint32_t number = 0; number < joint.num_keys(); ++number) {
    if (!joint.is_agreed(number)) continue;
    const uint32_t of_class = joint.class_of(number);
    const auto [found, is_new] = known.try_emplace(of_class);
    SavedKey& key = found->second;
    const Kind& kind = joint.kind_of(joint.classes()[of_class]);
    if (is_new && kind.type != EntryType::kObject) {
      std::vector<SavedChunk> chunks;
      for (const Chunk& box : plan.written_boxes(of_class)) {
        chunks.push_back({columns.sizes.add(box.offsets), columns.sizes.add(box.sizes)});
      }
      std::string_view dtype = kind.dtype;
      if (dtype.starts_with("torch.")) dtype.remove_prefix(6);
      key = {.is_tensor = true,
             .sizes = columns.sizes.add(kind.shape),
             .dtype = columns.names.add(dtype),
             .layout = columns.names.add("torch.strided"),
             .requires_grad = kind.requires_grad,
             .chunk_list = columns.add_chunk_list(chunks)};
    }
    key.fqn = columns.names.add(joint.name(number));
    columns.add_key(key);
  }
  return columns;
}

void define_write_plan(py::module_& module) {
  py::class_<ClassWrites>(module, "ClassWrites", "What a rank writes of keys of one class; see csrc/core/write_plan.h.")
      .def_readonly("section", &ClassWrites::section)
      .def_property_readonly("steps", [](const ClassWrites& writes) { return to_tuple(writes.steps); })
      .def_readonly("keys", &ClassWrites::keys)
      .def_property_readonly("boxes", [](const ClassWrites& writes) {
        py::list boxes;
        for (const auto& [position, box] : writes.boxes) boxes.append(py::make_tuple(position, to_box(box)));
        return boxes;
      });
  module.def(
      "read_decision",
      [](const py::bytes& bytes, const std::vector<std::vector<uint32_t>>& kind_of) {
        return read_decision(to_view(bytes), kind_of);
      },
      py::arg("decision"), py::arg("kind_of"));
  py::class_<WritePlan>(module, "WritePlan", "Who writes what; see csrc/core/write_plan.h.")
      .def(py::init<const JointTable&, bool, const std::vector<uint32_t>&, std::vector<uint32_t>,
                    const std::vector<uint32_t>&, bool>(),
           py::keep_alive<1, 2>(), py::call_guard<py::gil_scoped_release>(), py::arg("joint"), py::arg("lowest_only"),
           py::arg("lowest_keys"), py::arg("hosts"), py::arg("equal_keys") = std::vector<uint32_t>(),
           py::arg("may_divide") = true)
      .def("decision", [](const WritePlan& plan, int64_t rank) { return py::bytes(plan.decision(rank)); })
      .def_property_readonly("load_bytes", &WritePlan::load_bytes)
      .def("written_boxes",
           [](const WritePlan& plan, uint32_t of_class) { return to_boxes(plan.written_boxes(of_class)); })
      .def("keys_of_several_boxes", &WritePlan::keys_of_several_boxes);
  module.def("planned_columns", &planned_columns, py::arg("joint"), py::arg("plan"),
             py::call_guard<py::gil_scoped_release>());
}

using ChunkTuple = std::tuple<Sizes, Sizes, Sizes>;  // offsets, sizes, local offsets or none: 0

// With its place in the global tensor.
struct PlacedOverlap : Overlap {
  Sizes offsets;
};

std::vector<PlacedOverlap> overlaps_py(const ChunkIndex& index, const std::vector<ChunkTuple>& tuples) {
  std::vector<Chunk> wanted;
  for (const auto& [offsets, sizes, local_offsets] : tuples) {
    wanted.push_back({offsets, sizes, local_offsets.empty() ? Sizes(sizes.size(), 0) : local_offsets});
  }
  std::vector<PlacedOverlap> overlaps;
  for (Overlap& part : index.find_overlaps(wanted)) {
    Sizes offsets = index.chunks()[part.saved].offsets;
    for (size_t dim = 0; dim < offsets.size(); ++dim) offsets[dim] += part.saved_offsets[dim];
    overlaps.push_back({std::move(part), std::move(offsets)});
  }
  return overlaps;
}

// Goes through the parts of a box, of which there may be more than memory has room for.
struct PartsLeft {
  BoxParts parts;
  int64_t next = 0;

  py::tuple take() {
    if (next == parts.size()) throw py::stop_iteration();
    return to_box(parts.at(next++));
  }
};

void define_boxes(py::module_& module) {
  py::class_<PlacedOverlap>(module, "Overlap", "A part of a saved chunk that a wanted chunk needs; see boxes.h.")
      .def_readonly("wanted", &PlacedOverlap::wanted)
      .def_readonly("saved", &PlacedOverlap::saved)
      .def_property_readonly("offsets", [](const PlacedOverlap& part) { return to_tuple(part.offsets); })
      .def_property_readonly("saved_offsets", [](const PlacedOverlap& part) { return to_tuple(part.saved_offsets); })
      .def_property_readonly("local_offsets", [](const PlacedOverlap& part) { return to_tuple(part.local_offsets); })
      .def_property_readonly("sizes", [](const PlacedOverlap& part) { return to_tuple(part.sizes); });
  py::class_<ChunkIndex>(module, "ChunkIndex", "Saved chunks, sorted once; see csrc/core/boxes.h.")
      .def(py::init([](const py::list& chunks) { return ChunkIndex(to_chunks(chunks)); }), py::arg("chunks"))
      .def_static(
          "of_boxes", [](const std::vector<BoxTuple>& boxes) { return ChunkIndex(to_chunks(boxes)); }, py::arg("boxes"))
      .def("__len__", [](const ChunkIndex& index) { return index.chunks().size(); })
      .def("box", [](const ChunkIndex& index, size_t chunk) { return to_box(index.chunks().at(chunk)); })
      .def("boxes", [](const ChunkIndex& index) { return to_boxes(index.chunks()); })
      .def(
          "covers", [](const ChunkIndex& index, const Sizes& shape) { return index.covers(shape); },
          py::call_guard<py::gil_scoped_release>())
      .def("find_overlaps", &overlaps_py, py::arg("wanted"));
  module.def(
      "find_overlaps",
      [](const std::vector<ChunkTuple>& wanted, const std::vector<BoxTuple>& saved) {
        return overlaps_py(ChunkIndex(to_chunks(saved)), wanted);
      },
      py::arg("wanted"), py::arg("saved"));
  py::class_<PartsLeft>(module, "BoxParts", "A box in parts of at most so many elements; see csrc/core/boxes.h.")
      .def(py::init([](Sizes offsets, Sizes sizes, int64_t most_elements) {
             return PartsLeft{BoxParts({std::move(offsets), std::move(sizes), {}}, most_elements)};
           }),
           py::arg("offsets"), py::arg("sizes"), py::arg("most_elements"))
      .def("__iter__", [](py::object parts) { return parts; })
      .def("__next__", &PartsLeft::take);
  py::class_<BoxPart>(module, "BoxPart", "A part of one of several boxes; see csrc/core/box_batches.h.")
      .def_readonly("box", &BoxPart::box)
      .def_property_readonly("offsets", [](const BoxPart& part) { return to_tuple(part.offsets); })
      .def_property_readonly("sizes", [](const BoxPart& part) { return to_tuple(part.sizes); })
      .def_readonly("first_byte", &BoxPart::first_byte)
      .def_readonly("num_bytes", &BoxPart::num_bytes)
      .def_readonly("begin", &BoxPart::begin)
      .def_readonly("is_last", &BoxPart::is_last);
  py::class_<BoxBatches>(module, "BoxBatches", "Boxes in parts, batch by batch; see csrc/core/box_batches.h.")
      .def(py::init([](std::vector<std::tuple<Sizes, Sizes, int64_t>> boxes, int64_t max_bytes, size_t max_parts) {
             std::vector<SizedBox> sized;
             for (auto& [offsets, sizes, item_bytes] : boxes) {
               sized.push_back({{std::move(offsets), std::move(sizes), {}}, item_bytes});
             }
             return BoxBatches(std::move(sized), max_bytes, max_parts);
           }),
           py::arg("boxes"), py::arg("max_bytes"), py::arg("max_parts"))
      .def("__iter__", [](py::object batches) { return batches; })
      .def("__next__", [](BoxBatches& batches) {
        auto batch = batches.next();
        if (batch.empty()) throw py::stop_iteration();
        return batch;
      });
}

}  // namespace

void register_plan(py::module_& module) {
  define_boxes(module);
  define_joint_table(module);
  define_axes(module);
  define_replica_digests(module);
  define_write_plan(module);
}
