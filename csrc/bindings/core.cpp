// The module torchtitan_ext._core: plain Python values in, plain Python values out. It converts and decides nothing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/convert.h"
#include "bindings/instances.h"
#include "bindings/metadata.h"
#include "bindings/plan.h"
#include "bindings/storage.h"
#include "bindings/tables.h"
#include "core/boxes.h"
#include "core/chunk.h"
#include "core/cover.h"
#include "core/memory.h"
#include "core/shard_layout.h"

namespace py = pybind11;
using namespace torchtitan_ext::core;      // NOLINT: this file only translates that namespace
using namespace torchtitan_ext::bindings;  // NOLINT: and what all bindings convert

namespace {

using PlacementTuple = std::tuple<int64_t, int64_t>;  // dim or -1, split_factor
using BoxTuple = std::tuple<Sizes, Sizes>;            // offsets, sizes
using ChunkTuple = std::tuple<Sizes, Sizes, Sizes>;   // offsets, sizes, local_offsets
using ObservationTuple = std::tuple<Sizes, Sizes>;    // coordinate, local_sizes

std::vector<Chunk> to_chunks(const std::vector<BoxTuple>& boxes) {
  std::vector<Chunk> chunks;
  chunks.reserve(boxes.size());
  for (const auto& [offsets, sizes] : boxes) chunks.push_back({offsets, sizes, {}});
  return chunks;
}

py::tuple to_shard(const Shard& shard) {
  py::tuple chunks(shard.chunks.size());
  for (size_t index = 0; index < shard.chunks.size(); ++index) {
    const Chunk& chunk = shard.chunks[index];
    chunks[index] = py::make_tuple(to_tuple(chunk.offsets), to_tuple(chunk.sizes), to_tuple(chunk.local_offsets));
  }
  return py::make_tuple(to_tuple(shard.sizes), chunks);
}

py::list read_placements_py(const std::vector<PlacementTuple>& tuples, const Sizes& mesh_shape,
                            const std::string& reading) {
  if (reading != "left_to_right" && reading != "nested") {
    throw std::invalid_argument("read_placements: reading is '" + reading + "', expected 'left_to_right' or 'nested'");
  }
  std::vector<Placement> placements;
  for (const auto& [dim, split_factor] : tuples) placements.push_back({dim, split_factor});
  py::list steps;
  for (const ShardStep& step :
       read_placements(placements, mesh_shape, reading == "nested" ? Reading::kNested : Reading::kLeftToRight)) {
    steps.append(py::make_tuple(step.axis, step.dim, step.split_factor));
  }
  return steps;
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

py::tuple resolve_steps_py(const Sizes& global_shape, const Sizes& mesh_shape,
                           const std::vector<std::vector<StepTuple>>& candidate_tuples,
                           const std::vector<ObservationTuple>& observation_tuples) {
  std::vector<std::vector<ShardStep>> candidates;
  for (const auto& tuples : candidate_tuples) candidates.push_back(to_steps(tuples));
  std::vector<Observation> observations;
  for (const auto& [coordinate, local_sizes] : observation_tuples) observations.push_back({coordinate, local_sizes});
  Resolution resolution;
  {
    py::gil_scoped_release release;
    resolution = resolve_steps(global_shape, mesh_shape, candidates, observations);
  }
  const char* const outcome = resolution.outcome == Resolution::Outcome::kDecided   ? "decided"
                              : resolution.outcome == Resolution::Outcome::kInDoubt ? "in_doubt"
                                                                                    : "no_match";
  return py::make_tuple(outcome, resolution.first, resolution.second, to_tuple(resolution.coordinate));
}

py::object find_cover_defect_py(const Sizes& global_shape, const std::vector<BoxTuple>& boxes) {
  std::optional<CoverDefect> defect;
  {
    py::gil_scoped_release release;
    defect = find_cover_defect(global_shape, to_chunks(boxes));
  }
  if (!defect) return py::none();
  return py::make_tuple(name_of(defect->kind), to_tuple(defect->element), py::cast(defect->chunks));
}

bool may_overlap_itself_py(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  return may_overlap_itself(sizes, strides);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "Layouts, cover and plans over plain values, and files; see csrc/core and csrc/storage for the definitions.";
  module.def("read_placements", &read_placements_py, py::arg("placements"), py::arg("mesh_shape"), py::arg("reading"));
  module.def("shard_at", &shard_at_py, py::arg("global_shape"), py::arg("mesh_shape"), py::arg("steps"),
             py::arg("coordinate"));
  module.def("all_shards", &all_shards_py, py::arg("global_shape"), py::arg("mesh_shape"), py::arg("steps"));
  module.def("resolve_steps", &resolve_steps_py, py::arg("global_shape"), py::arg("mesh_shape"), py::arg("candidates"),
             py::arg("observations"));
  module.def("find_cover_defect", &find_cover_defect_py, py::arg("global_shape"), py::arg("boxes"));
  module.def("may_overlap_itself", &may_overlap_itself_py, py::arg("sizes"), py::arg("strides"));
  torchtitan_ext::bindings::define_instances(module);
  torchtitan_ext::bindings::define_metadata(module);
  torchtitan_ext::bindings::define_storage(module);
  torchtitan_ext::bindings::define_tables(module);
  register_plan(module);
}
