// The order of an epoch for Python, whose arrays are NumPy's. Like core.cpp it converts and decides nothing.
#include "core/index_order.h"

#include <vector>

#include "bindings/arrays.h"
#include "bindings/index_order.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::IndexOrder;

void register_index_order(py::module_& module) {
  py::class_<IndexOrder>(module, "IndexOrder", "The shuffled order of an epoch; see csrc/core/index_order.h.")
      .def(py::init<int64_t, uint64_t, uint64_t>(), py::arg("num_samples"), py::arg("seed"), py::arg("epoch"))
      .def(
          "indices_at",
          [](const IndexOrder& order, const Array<int64_t>& places) {
            Array<int64_t> indices(std::vector<py::ssize_t>(places.shape(), places.shape() + places.ndim()));
            order.indices_at(span_of(places), {indices.mutable_data(), static_cast<size_t>(indices.size())});
            return indices;
          },
          py::arg("places"));
}

}  // namespace torchtitan_ext::bindings
