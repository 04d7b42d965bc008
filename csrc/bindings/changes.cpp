// Positions and sums of elements for Python, whose arrays are NumPy's, and whose numbers have any size and sign. Like
// core.cpp it converts and decides nothing.
#include "bindings/changes.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/convert.h"
#include "core/position_blocks.h"
#include "core/sums.h"
#include "storage/box_sum.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::PositionBlocks;
using core::Sizes;
using core::SumTable;

namespace {

// Modulo 2^64.
uint64_t to_sum(const py::handle& number) {
  const uint64_t sum = PyLong_AsUnsignedLongLongMask(number.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return sum;
}

py::list to_keys(const std::vector<std::string>& keys) {
  py::list list;
  for (const std::string& key : keys) list.append(to_str(key));
  return list;
}

py::dict to_dict(const std::map<SumTable::Box, uint64_t>& sums) {
  py::dict dict;
  for (const auto& [box, sum] : sums) {
    dict[box ? py::object(py::make_tuple(to_tuple(box->first), to_tuple(box->second))) : py::none()] = sum;
  }
  return dict;
}

void register_sums(py::module_& module) {
  py::class_<SumTable::Part>(module, "HeldSums")
      .def_readonly("dtype", &SumTable::Part::dtype)
      .def_property_readonly("shape", [](const SumTable::Part& self) { return to_tuple(self.shape); })
      .def_readonly("replica", &SumTable::Part::replica)
      .def_property_readonly("sums", [](const SumTable::Part& self) { return to_dict(self.sums); });
  using Sums = std::map<SumTable::Box, py::int_>;
  py::class_<SumTable>(module, "SumTable", "Sums of what ranks hold of tensors; see csrc/core/sums.h.")
      .def(py::init<>())
      .def("__contains__", [](const SumTable& self, const py::str& key) { return self.has(to_utf8(key)); })
      .def("__getitem__", [](const SumTable& self, const py::str& key) { return self.part(to_utf8(key)); })
      .def("__iter__", [](const SumTable& self) { return py::iter(to_keys(self.keys())); })
      .def(
          "add_key",
          [](SumTable& self, const py::str& key, const Sums& sums, const std::string& dtype, const Sizes& shape,
             const std::string& replica) {
            SumTable::Part part{dtype, shape, replica, {}};
            for (const auto& [box, sum] : sums) part.sums[box] = to_sum(sum);
            self.add_key(to_utf8(key), std::move(part));
          },
          py::arg("key"), py::arg("sums"), py::kw_only(), py::arg("dtype") = "", py::arg("shape") = Sizes(),
          py::arg("replica") = "")
      .def(
          "add",
          [](SumTable& self, const py::str& key, const py::int_& sum, const SumTable::Box& box) {
            self.part(to_utf8(key)).sums[box] += to_sum(sum);
          },
          py::arg("key"), py::arg("sum"), py::arg("box") = py::none())
      .def_static("merge", &SumTable::merge, py::arg("of_ranks"))
      .def("replicas", [](const SumTable& self, const py::str& key) { return self.replicas(to_utf8(key)); })
      .def("differing",
           [](const SumTable& self, const py::dict& expected) {
             std::unordered_map<std::string, uint64_t> sums;
             for (const auto& [key, sum] : expected) sums.emplace(to_utf8(key), to_sum(sum));
             return to_keys(self.differing(sums));
           })
      .def("changed", &SumTable::changed, py::arg("before"), py::arg("after"))
      .def(py::pickle([](const SumTable& self) { return py::bytes(self.encode()); },
                      [](const py::bytes& state) { return SumTable::decode(std::string_view(state)); }));
  module.def("add_sums", [](const py::args& sums) {
    uint64_t total = 0;
    for (const py::handle sum : sums) total += to_sum(sum);
    return total;
  });
  module.def(
      "sum_box",
      [](uintptr_t address, int64_t item_bytes, const Sizes& offsets, const Sizes& sizes, const Sizes& global_sizes) {
        return storage::sum_box(address, item_bytes, offsets, sizes, global_sizes);
      },
      py::arg("address"), py::arg("item_bytes"), py::arg("offsets"), py::arg("sizes"), py::arg("global_sizes"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void register_changes(py::module_& module) {
  register_sums(module);
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
