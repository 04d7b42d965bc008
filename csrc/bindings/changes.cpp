// Positions of changed elements for Python, whose arrays are NumPy's. Like core.cpp it converts and decides nothing.
#include "bindings/changes.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <span>
#include <vector>

#include "bindings/arrays.h"
#include "core/position_blocks.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::PositionBlocks;
using core::Sizes;

void register_changes(py::module_& module) {
  py::class_<PositionBlocks>(module, "PositionBlocks", "Positions of elements; see csrc/core/position_blocks.h.")
      .def(py::init([](const Array<int32_t>& blocks, const Array<uint16_t>& offsets) {
             return PositionBlocks(vector_of(blocks), vector_of(offsets));
           }),
           py::arg("blocks"), py::arg("offsets"))
      .def_static(
          "encode", [](const Array<int64_t>& positions) { return PositionBlocks::encode(span_of(positions)); },
          py::arg("positions"))
      .def("__len__", &PositionBlocks::size)
      .def_property_readonly("blocks", [](const PositionBlocks& of) { return array_of(of.blocks()); })
      .def_property_readonly("offsets", [](const PositionBlocks& of) { return array_of(of.offsets()); })
      .def("decode", [](const PositionBlocks& of) { return array_of(std::span<const int64_t>(of.decode())); });
  module.def(
      "select_positions",
      [](const Array<int64_t>& positions, const Sizes& tensor_sizes, const Sizes& offsets, const Sizes& sizes) {
        const core::Selection found = core::select_positions(span_of(positions), tensor_sizes, offsets, sizes);
        return py::make_tuple(array_of(std::span<const int64_t>(found.in_box)),
                              array_of(std::span<const int64_t>(found.indices)));
      },
      py::arg("positions"), py::arg("tensor_sizes"), py::arg("offsets"), py::arg("sizes"));
  module.def(
      "sum_at",
      [](const Array<uint8_t>& values, int64_t item_bytes, const Array<int64_t>& positions) {
        return core::sum_at(span_of(values), item_bytes, span_of(positions));
      },
      py::arg("values"), py::arg("item_bytes"), py::arg("positions"));
}

}  // namespace torchtitan_ext::bindings
