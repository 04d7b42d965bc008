// Plans of files of changes, for Python. Like core.cpp it converts and decides nothing.
#include "bindings/delta_plan.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/delta_plan.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::DeltaBox;
using core::DeltaOffer;
using core::DeltaPlan;
using core::Sizes;
using core::SumTable;

namespace {

py::object to_box(const SumTable::Box& box) {
  return box ? py::object(py::make_tuple(to_tuple(box->first), to_tuple(box->second))) : py::none();
}

// By key dtype, shape, count, the three sums, and the box of each part.
py::dict to_totals(const std::vector<DeltaPlan::Total>& totals) {
  py::dict dict;
  for (const DeltaPlan::Total& total : totals) {
    py::tuple boxes(total.boxes.size());
    for (size_t part = 0; part < total.boxes.size(); ++part) boxes[part] = to_box(total.boxes[part]);
    const auto& [before, replaced, after] = total.sums;
    dict[to_str(total.key)] =
        py::make_tuple(total.dtype, to_tuple(total.shape), total.count, before, replaced, after, std::move(boxes));
  }
  return dict;
}

}  // namespace

void register_delta_plan(py::module_& module) {
  py::class_<DeltaOffer>(module, "DeltaOffer", "What a rank has of a file of changes; see csrc/core/delta_plan.h.")
      .def(py::init<>())
      .def("add_elsewhere", [](DeltaOffer& offer, const py::str& key) { offer.add_elsewhere(to_utf8(key)); })
      .def(
          "add_held",
          [](DeltaOffer& offer, const py::str& key, std::vector<DeltaBox> boxes, const SumTable::Box& box,
             const SumTable& before, const SumTable& replaced,
             const SumTable& after) { offer.add_held(to_utf8(key), std::move(boxes), box, before, replaced, after); },
          py::arg("key"), py::arg("boxes"), py::arg("box"), py::arg("before"), py::arg("replaced"), py::arg("after"))
      .def(
          "add_part",
          [](DeltaOffer& offer, int64_t tensor, const SumTable::Box& box, int64_t num_changed, const Sizes& lengths) {
            offer.add_part({tensor, box, num_changed, lengths});
          },
          py::arg("tensor"), py::arg("box"), py::arg("num_changed"), py::arg("lengths"))
      .def(py::pickle([](const DeltaOffer& offer) { return py::bytes(offer.encode()); },
                      [](const py::bytes& state) { return DeltaOffer::decode(std::string_view(state)); }));
  py::class_<DeltaPlan::Write>(module, "DeltaWrite", "A part that a rank writes.")
      .def_readonly("rank", &DeltaPlan::Write::rank)
      .def_readonly("part", &DeltaPlan::Write::part)
      .def_property_readonly("key", [](const DeltaPlan::Write& write) { return to_str(write.key); })
      .def_readonly("number", &DeltaPlan::Write::number)
      .def_property_readonly("box", [](const DeltaPlan::Write& write) { return to_box(write.box); })
      .def_readonly("lengths", &DeltaPlan::Write::lengths);
  py::class_<DeltaPlan::Fault>(module, "DeltaFault", "Why a tensor is not written.")
      .def_readonly("kind", &DeltaPlan::Fault::kind)
      .def_property_readonly("key", [](const DeltaPlan::Fault& fault) { return to_str(fault.key); })
      .def_readonly("detail", &DeltaPlan::Fault::detail)
      .def_readonly("ranks", &DeltaPlan::Fault::ranks);
  py::class_<DeltaPlan>(module, "DeltaPlan", "Who writes what; see csrc/core/delta_plan.h.")
      .def_property_readonly("keys", [](const DeltaPlan& plan) { return to_texts(plan.keys); })
      .def_property_readonly("nowhere", [](const DeltaPlan& plan) { return to_texts(plan.nowhere); })
      .def_readonly("faults", &DeltaPlan::faults)
      .def_property_readonly("totals", [](const DeltaPlan& plan) { return to_totals(plan.totals); })
      .def_readonly("writes", &DeltaPlan::writes);
  module.def("plan_delta", &core::plan_delta, py::arg("offers"), py::arg("dtypes"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchtitan_ext::bindings
