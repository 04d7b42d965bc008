// The module torchtitan_ext._core: plain Python values in, plain Python values out. It converts and decides nothing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/convert.h"
#include "bindings/index_order.h"
#include "bindings/instances.h"
#include "bindings/metadata.h"
#include "bindings/plan.h"
#include "bindings/read_list.h"
#include "bindings/reads.h"
#include "bindings/reports.h"
#include "bindings/roll_call.h"
#include "bindings/saved_chunks.h"
#include "bindings/shared_reads.h"
#include "bindings/storage.h"
#include "bindings/sums.h"
#include "bindings/tables.h"
#include "bindings/transfer.h"
#include "bindings/transforms.h"
#include "bindings/value_digest.h"
#include "bindings/writes.h"
#include "core/boxes.h"
#include "core/chunk.h"
#include "core/cover.h"
#include "core/flat_parts.h"
#include "core/memory.h"
#include "core/noted_parts.h"
#include "core/option_gaps.h"
#include "core/problems.h"
#include "core/shard_layout.h"

namespace py = pybind11;
using namespace torchtitan_ext::core;      // NOLINT: this file only translates that namespace
using namespace torchtitan_ext::bindings;  // NOLINT: and what all bindings convert

namespace {

py::tuple to_shard(const Shard& shard) {
  py::tuple chunks(shard.chunks.size());
  for (size_t index = 0; index < shard.chunks.size(); ++index) {
    const Chunk& chunk = shard.chunks[index];
    chunks[index] = py::make_tuple(to_tuple(chunk.offsets), to_tuple(chunk.sizes), to_tuple(chunk.local_offsets));
  }
  return py::make_tuple(to_tuple(shard.sizes), chunks);
}

py::tuple read_placements_py(const std::vector<PlacementTuple>& tuples, const Sizes& mesh_shape,
                             const std::string& reading) {
  if (reading != "left_to_right" && reading != "nested") {
    throw std::invalid_argument("read_placements: reading is '" + reading + "', expected 'left_to_right' or 'nested'");
  }
  return to_tuple(read_placements(to_placements(tuples), mesh_shape,
                                  reading == "nested" ? Reading::kNested : Reading::kLeftToRight));
}

py::tuple shard_at_py(const Sizes& global_shape, const Sizes& mesh_shape, const std::vector<StepTuple>& steps,
                      const Sizes& coordinate) {
  return to_shard(shard_at({global_shape, mesh_shape, to_steps(steps)}, coordinate));
}

py::list all_shards_py(const Sizes& global_shape, const Sizes& mesh_shape, const std::vector<StepTuple>& steps) {
  py::list shards;
  for (const Shard& shard : all_shards({global_shape, mesh_shape, to_steps(steps)})) shards.append(to_shard(shard));
  return shards;
}

using NotedTuple = std::tuple<int64_t, Sizes, Sizes, Sizes>;  // rank; offsets, sizes as noted; sizes as written

TruePlaces find_true_places_py(const Sizes& shape, const Sizes& mesh_shape,
                               const std::vector<std::vector<int64_t>>& choices,
                               const std::vector<NotedTuple>& tuples) {
  std::vector<NotedPart> parts;
  for (const auto& [rank, offsets, sizes, written] : tuples) parts.push_back({rank, offsets, sizes, written});
  return find_true_places(shape, mesh_shape, choices, parts);
}

py::list candidate_steps_py(const std::vector<PlacementTuple>& placements, const Sizes& mesh_shape,
                            const std::optional<std::vector<StepTuple>>& order) {
  const std::vector<ShardStep> stated = to_steps(order.value_or(std::vector<StepTuple>()));
  py::list candidates;
  for (const auto& steps : candidate_steps(to_placements(placements), mesh_shape, order ? &stated : nullptr)) {
    candidates.append(to_tuple(steps));
  }
  return candidates;
}

// Steps, or a KeyProblem.
py::object decide_steps_py(const py::list& reports) {
  const py::handle first = reports[0];
  if (first.attr("mesh").is_none()) return py::tuple();
  const auto [mesh, origin] = read_mesh(first.attr("mesh"));
  Kind kind;
  read_layout(first, kind);
  std::vector<Observation> observations;
  for (const py::handle report : reports) {
    observations.push_back({report.attr("coordinate").cast<Sizes>(), report.attr("local_sizes").cast<Sizes>()});
  }
  const auto decided = decide_steps(kind, mesh, origin, observations);
  if (const auto* const steps = std::get_if<0>(&decided)) return to_tuple(*steps);
  return py::cast(std::get<1>(decided));
}

std::optional<CoverDefect> find_defect(const Sizes& global_shape, const std::vector<Chunk>& chunks) {
  py::gil_scoped_release release;
  return find_cover_defect(global_shape, chunks);
}

std::optional<std::string> describe_cover_defect_py(const Sizes& global_shape, const std::vector<BoxTuple>& boxes,
                                                    const std::optional<Sizes>& owners) {
  const std::vector<Chunk> chunks = to_chunks(boxes);
  const std::optional<CoverDefect> defect = find_defect(global_shape, chunks);
  if (!defect) return std::nullopt;
  std::vector<Chunk> holders;
  Sizes ranks;
  for (const size_t chunk : defect->chunks) {
    holders.push_back(chunks[chunk]);
    if (owners) ranks.push_back(owners->at(chunk));
  }
  return describe_defect(global_shape, *defect, holders,
                         owners ? std::optional<std::span<const int64_t>>(ranks) : std::nullopt);
}

std::string why_no_part_py(int64_t offset, int64_t num_bytes, int64_t item_bytes, const Sizes& sizes,
                           int64_t buffer_bytes) {
  return why_no_part({offset, num_bytes, item_bytes, sizes}, buffer_bytes);
}

std::vector<std::string> to_keys(const py::iterable& texts) {
  std::vector<std::string> keys;
  for (const py::handle text : texts) keys.push_back(to_utf8(text));
  return keys;
}

py::dict missing_py(const OptionGaps& gaps) {
  py::dict missing;
  for (const auto& [fqn, keys] : gaps.missing) missing[to_str(fqn)] = to_texts(keys);
  return missing;
}

bool may_overlap_itself_py(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  return may_overlap_itself(sizes, strides);
}

// Address, sizes, strides, item bytes.
using TensorMemory = std::tuple<uintptr_t, Sizes, Sizes, int64_t>;

std::vector<Memory> to_memories(const std::vector<TensorMemory>& tensors) {
  std::vector<Memory> memories;
  for (const auto& [address, sizes, strides, item_bytes] : tensors) {
    memories.push_back({address, sizes, strides, item_bytes});
  }
  return memories;
}

std::optional<std::pair<size_t, size_t>> find_shared_memory_py(const std::vector<TensorMemory>& written,
                                                               const std::vector<TensorMemory>& read) {
  const std::vector<Memory> targets = to_memories(written);
  const auto found = find_shared_memory(targets);
  if (found || read.empty()) return found;
  auto with_source = find_shared_memory(targets, to_memories(read));
  if (with_source) with_source->second += targets.size();
  return with_source;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "Layouts, cover and plans over plain values, and files; see csrc/core and csrc/storage for the definitions.";
  module.def("why_no_part", &why_no_part_py, py::arg("offset"), py::arg("num_bytes"), py::arg("item_bytes"),
             py::arg("sizes"), py::arg("buffer_bytes"));
  py::class_<TruePlace>(module, "TruePlace", "A box of a tensor and who has it: see csrc/core/noted_parts.h.")
      .def_property_readonly("offsets", [](const TruePlace& place) { return to_tuple(place.offsets); })
      .def_property_readonly("sizes", [](const TruePlace& place) { return to_tuple(place.sizes); })
      .def_readonly("rank", &TruePlace::rank)
      .def_readonly("part", &TruePlace::part);
  py::class_<TruePlaces>(module, "TruePlaces", "The boxes of a tensor that was cut in one way; else none.")
      .def_readonly("num_ways", &TruePlaces::num_ways)
      .def_readonly("places", &TruePlaces::places);
  module.def("find_true_places", &find_true_places_py, py::arg("shape"), py::arg("mesh_shape"), py::arg("choices"),
             py::arg("parts"));
  module.def("read_placements", &read_placements_py, py::arg("placements"), py::arg("mesh_shape"), py::arg("reading"));
  module.def("shard_at", &shard_at_py, py::arg("global_shape"), py::arg("mesh_shape"), py::arg("steps"),
             py::arg("coordinate"));
  module.def("all_shards", &all_shards_py, py::arg("global_shape"), py::arg("mesh_shape"), py::arg("steps"));
  module.def("candidate_steps", &candidate_steps_py, py::arg("placements"), py::arg("mesh_shape"), py::arg("order"));
  py::class_<KeyProblem>(module, "KeyProblem")
      .def_readonly("kind", &KeyProblem::kind)
      .def_property_readonly("detail", [](const KeyProblem& problem) { return to_str(problem.detail); });
  module.def("decide_steps", &decide_steps_py, py::arg("reports"));
  module.def(
      "format_placements",
      [](const std::vector<PlacementTuple>& placements) { return format_placements(to_placements(placements)); },
      py::arg("placements"));
  module.def(
      "format_mesh",
      [](Sizes shape, std::optional<std::vector<std::string>> names) {
        return to_str(
            format_mesh({std::move(shape), true, {}, names.has_value(), names.value_or(std::vector<std::string>())}));
      },
      py::arg("shape"), py::arg("names"));
  module.def(
      "cover_defect",
      [](const Sizes& shape, const std::vector<BoxTuple>& boxes) {
        const std::optional<CoverDefect> defect = find_defect(shape, to_chunks(boxes));
        return defect ? std::optional(defect_text(*defect)) : std::nullopt;
      },
      py::arg("global_shape"), py::arg("boxes"));
  module.def("describe_cover_defect", &describe_cover_defect_py, py::arg("global_shape"), py::arg("boxes"),
             py::arg("owners"));
  py::class_<OptionGaps>(module, "OptionGaps", "The wanted optimizer keys that a checkpoint of the flat form lacks.")
      .def_property_readonly("fillable", [](const OptionGaps& gaps) { return to_texts(gaps.fillable); })
      .def_property_readonly("missing", &missing_py)
      .def_property_readonly("incomplete", [](const OptionGaps& gaps) { return to_texts(gaps.incomplete); })
      .def_property_readonly("dropped", [](const OptionGaps& gaps) { return to_texts(gaps.dropped); });
  module.def(
      "find_option_gaps",
      [](const py::iterable& saved, const py::iterable& wanted) {
        return find_option_gaps(to_keys(saved), to_keys(wanted));
      },
      py::arg("saved_keys"), py::arg("wanted_keys"),
      "Sorts the keys that a flat optimizer state dict wants and a checkpoint lacks: see csrc/core/option_gaps.h.");
  module.def("may_overlap_itself", &may_overlap_itself_py, py::arg("sizes"), py::arg("strides"));
  module.def("find_shared_memory", &find_shared_memory_py, py::arg("written"), py::arg("read"));
  torchtitan_ext::bindings::define_instances(module);
  torchtitan_ext::bindings::define_value_digest(module);
  torchtitan_ext::bindings::define_metadata(module);
  torchtitan_ext::bindings::define_storage(module);
  torchtitan_ext::bindings::define_tables(module);
  register_plan(module);
  register_sums(module);
  torchtitan_ext::bindings::register_index_order(module);
  register_transfer(module);
  define_roll_call(module);
  define_saved_chunks(module);
  torchtitan_ext::bindings::define_writes(module);
  torchtitan_ext::bindings::define_reads(module);
  torchtitan_ext::bindings::define_read_list(module);
  torchtitan_ext::bindings::define_transforms(module);
  torchtitan_ext::bindings::define_shared_reads(module);
}
