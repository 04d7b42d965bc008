#include "bindings/reports.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/convert.h"
#include "core/section_builder.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {

using core::Sizes;

std::pair<core::MeshForm, int64_t> read_mesh(const py::handle& mesh) {
  return core::form_of_mesh(mesh.attr("shape").cast<Sizes>(), mesh.attr("ranks").cast<Sizes>(),
                            mesh.attr("dim_names").cast<std::optional<std::vector<std::string>>>());
}

void read_layout(const py::handle& report, core::Kind& kind) {
  kind.shape = report.attr("global_shape").cast<Sizes>();
  kind.placements = to_placements(report.attr("placements").cast<std::vector<PlacementTuple>>());
  const py::object order = report.attr("order");
  kind.has_order = !order.is_none();
  if (kind.has_order) kind.order = to_steps(order.cast<std::vector<StepTuple>>());
}

core::EntryType EntryTypes::of(const py::handle& entry) {
  const auto [found, is_new] = types_.try_emplace(Py_TYPE(entry.ptr()), core::EntryType::kObject);
  if (is_new && py::hasattr(entry, "report")) found->second = core::EntryType::kTensor;
  if (is_new && py::hasattr(entry, "boxes")) found->second = core::EntryType::kBoxes;
  return found->second;
}

std::vector<core::Chunk> held_chunks(const py::handle& entry, core::EntryType type,
                                     const std::vector<core::ShardStep>* steps) {
  if (type == core::EntryType::kBoxes) {
    std::vector<core::Chunk> chunks = to_chunks(entry.attr("boxes").cast<std::vector<BoxTuple>>());
    const auto begins = entry.attr("local_offsets").cast<std::optional<std::vector<Sizes>>>();
    for (size_t box = 0; box < chunks.size(); ++box) {
      // Without offsets each box is a tensor of its own, whose elements begin at 0.
      chunks[box].local_offsets = begins ? begins->at(box) : Sizes(chunks[box].sizes.size(), 0);
    }
    return chunks;
  }
  const py::object report = entry.attr("report");
  core::Kind kind;
  read_layout(report, kind);
  const py::object mesh = report.attr("mesh");
  const Sizes mesh_shape = mesh.is_none() ? Sizes() : mesh.attr("shape").cast<Sizes>();
  const auto order =
      steps != nullptr ? *steps : core::candidate_steps(kind.placements, mesh_shape, kind.stated_order()).front();
  return core::shard_at({kind.shape, mesh_shape, order}, report.attr("coordinate").cast<Sizes>()).chunks;
}

}  // namespace torchtitan_ext::bindings
