// Transfers between ranks for Python. Like core.cpp it converts and decides nothing.
#include "bindings/transfer.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/transfer_plan.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::BoxTable;
using core::JointTable;
using core::TransferPair;
using core::TransferPlan;

namespace {

std::string_view to_text(const py::bytes& bytes) { return static_cast<std::string_view>(bytes); }

std::string_view bytes_of(const BoxTable& table) {
  return {reinterpret_cast<const char*>(table.entries.data()), table.entries.size() * sizeof(int64_t)};
}

}  // namespace

void register_transfer(py::module_& module) {
  module.attr("NO_KEY") = JointTable::kNoClass;
  py::class_<TransferPair>(module, "TransferPair", "Keys with one class in two worlds; see csrc/core/transfer_plan.h.")
      .def_property_readonly("source_classes",
                             [](const TransferPair& pair) {
                               std::vector<uint32_t> classes;
                               for (const core::PairSource& one : pair.sources) classes.push_back(one.key_class);
                               return classes;
                             })
      .def_property_readonly("is_mapped", [](const TransferPair& pair) { return pair.map != nullptr; })
      .def_readonly("target_class", &TransferPair::target_class)
      .def_readwrite("cast_to", &TransferPair::cast_to)
      .def_readonly("source_keys", &TransferPair::source_keys)
      .def_readonly("target_keys", &TransferPair::target_keys);
  module.def(
      "pair_keys",
      [](const JointTable& source, const JointTable& target, const std::vector<uint32_t>& source_of,
         const std::vector<std::tuple<uint32_t, const core::TensorMap*, int64_t>>& mapped,
         const std::map<uint32_t, std::vector<int64_t>>& distrusted) {
        std::vector<core::MappedKey> keys;
        for (const auto& [key, map, cast_to] : mapped) keys.push_back({key, *map, cast_to});
        return core::pair_keys(source, target, source_of, keys, distrusted);
      },
      py::arg("source"), py::arg("target"), py::arg("source_of"),
      py::arg("mapped") = std::vector<std::tuple<uint32_t, const core::TensorMap*, int64_t>>(),
      py::arg("distrusted") = std::map<uint32_t, std::vector<int64_t>>());
  py::class_<TransferPlan>(module, "TransferPlan", "Who sends what to whom; see csrc/core/transfer_plan.h.")
      .def(py::init<const JointTable&, const JointTable&, std::vector<TransferPair>, std::vector<uint32_t>>(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::call_guard<py::gil_scoped_release>(), py::arg("source"),
           py::arg("target"), py::arg("pairs"), py::arg("hosts"))
      .def("sends", [](const TransferPlan& plan, int64_t rank) { return py::bytes(plan.sends(rank)); })
      .def("receives", [](const TransferPlan& plan, int64_t rank) { return py::bytes(plan.receives(rank)); })
      .def("fills", [](const TransferPlan& plan, int64_t rank) { return py::bytes(plan.fills(rank)); })
      .def_property_readonly("bytes_between", &TransferPlan::bytes_between);
  py::class_<BoxTable>(module, "BoxTable", "One side of an exchange; see torchtitan_ext.ops.exchange_runs_.")
      .def_property_readonly("entries", [](const BoxTable& table) { return py::bytes(bytes_of(table)); })
      .def_property_readonly("views",
                             [](const BoxTable& table) {
                               py::list views;
                               for (const auto& [tensor, sizes, view] : table.views) {
                                 views.append(py::make_tuple(tensor, to_view(view, sizes)));
                               }
                               return views;
                             })
      .def_readonly("changed", &BoxTable::changed)
      .def_readonly("bytes_of_peer", &BoxTable::bytes_of_peer);
  module.def(
      "expand_fills",
      [](const py::bytes& bytes, const std::vector<int64_t>& first_tensor) {
        py::list fills;
        for (const auto& [tensor, fill] : core::expand_fills(to_text(bytes), first_tensor)) {
          fills.append(py::make_tuple(tensor, to_view(fill.dst, fill.sizes), fill.value));
        }
        return fills;
      },
      py::arg("fills"), py::arg("first_tensor"));
  module.def(
      "expand_transfers",
      [](const py::bytes& bytes, const std::vector<int64_t>& first_tensor, int64_t num_tensors) {
        return core::expand_transfers(to_text(bytes), first_tensor, num_tensors);
      },
      py::arg("transfers"), py::arg("first_tensor"), py::arg("num_tensors"));
}

}  // namespace torchtitan_ext::bindings
