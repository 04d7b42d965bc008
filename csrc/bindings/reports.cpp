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

}  // namespace torchtitan_ext::bindings
