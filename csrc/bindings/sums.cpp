// Sums of elements for Python, whose numbers have any size and sign. Like core.cpp it converts and decides nothing.
#include "bindings/sums.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/sums.h"
#include "storage/box_sum.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
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

}  // namespace

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

}  // namespace torchtitan_ext::bindings
