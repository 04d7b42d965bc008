#include "bindings/roll_call.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/roll_call.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::RollCall;
using core::StoreAction;
using core::Verdict;

namespace {

const char* name_of(StoreAction::Kind kind) {
  switch (kind) {
    case StoreAction::Kind::kSet:
      return "set";
    case StoreAction::Kind::kCompareSet:
      return "compare_set";
    case StoreAction::Kind::kAdd:
      return "add";
    case StoreAction::Kind::kHasAll:
      return "has_all";
    case StoreAction::Kind::kRead:
      return "read";
    case StoreAction::Kind::kWait:
      return "wait";
    case StoreAction::Kind::kRaise:
      return "raise";
    case StoreAction::Kind::kEnd:
      return "end";
  }
  return "";
}

py::dict to_late(const Verdict& verdict) {
  py::dict late;
  for (const auto& [rank, text] : verdict.late) late[py::int_(rank)] = to_str(text);
  return late;
}

}  // namespace

void define_roll_call(py::module_& module) {
  py::class_<StoreAction>(module, "StoreAction")
      .def_property_readonly("kind", [](const StoreAction& self) { return name_of(self.kind); })
      .def_readonly("keys", &StoreAction::keys)
      .def_property_readonly("value", [](const StoreAction& self) { return py::bytes(self.value); })
      .def_readonly("number", &StoreAction::number)
      .def_readonly("seconds", &StoreAction::seconds);
  py::class_<Verdict>(module, "Verdict")
      .def_property_readonly("operation", [](const Verdict& self) { return to_str(self.operation); })
      .def_property_readonly("path", [](const Verdict& self) { return to_str(self.path); })
      .def_property_readonly("phase", [](const Verdict& self) { return to_str(self.phase); })
      .def_property_readonly("doing", [](const Verdict& self) { return to_str(self.doing); })
      .def_property_readonly("why", [](const Verdict& self) { return to_str(self.why); })
      .def_property_readonly("silent", [](const Verdict& self) { return to_tuple(self.silent); })
      .def_property_readonly("late", &to_late);
  py::class_<RollCall> roll_call(module, "RollCall", "One rank in one operation: see csrc/core/roll_call.h.");
  roll_call
      .def(py::init([](const py::str& operation, const py::str& path, int64_t rank, std::vector<int64_t> ranks,
                       double timeout_seconds, double now, double answer_seconds) {
             return RollCall(to_utf8(operation), to_utf8(path), rank, std::move(ranks), timeout_seconds, now,
                             answer_seconds);
           }),
           py::arg("operation"), py::arg("path"), py::arg("rank"), py::arg("ranks"), py::arg("timeout_seconds"),
           py::arg("now"), py::arg("answer_seconds"))
      .def_property_readonly("patience_seconds", &RollCall::patience_seconds)
      .def(
          "begin",
          [](RollCall& self, double now, const py::str& phase, const py::str& doing) {
            self.begin(now, to_utf8(phase), to_utf8(doing));
          },
          py::arg("now"), py::arg("phase"), py::arg("doing"))
      .def(
          "at", [](RollCall& self, const py::str& key) { self.at(to_utf8(key)); }, py::arg("key"))
      .def("wait", &RollCall::wait, py::arg("now"))
      .def("seconds_left", &RollCall::seconds_left, py::arg("now"))
      .def_property_readonly("phase", [](const RollCall& self) { return to_str(self.phase()); })
      .def_property_readonly("doing", [](const RollCall& self) { return to_str(self.doing()); })
      .def(
          "call", [](RollCall& self, const py::str& why, bool is_late) { self.call(to_utf8(why), is_late); },
          py::arg("why"), py::arg("is_late"))
      .def("close", &RollCall::close)
      .def("enter_exchange", &RollCall::enter_exchange, py::arg("name"))
      .def("leave_exchange", &RollCall::leave_exchange, py::arg("error"))
      .def_property_readonly("failure",
                             [](const RollCall& self) -> std::optional<std::pair<int64_t, py::bytes>> {
                               const auto failure = self.failure();
                               if (!failure) return std::nullopt;
                               return std::pair(failure->first, py::bytes(failure->second));
                             })
      .def_property_readonly("all_are_out", &RollCall::all_are_out)
      .def("next", &RollCall::next, py::arg("now"), py::arg("seen"))
      .def("has_work", &RollCall::has_work)
      .def("is_fresh", &RollCall::is_fresh, py::arg("now"))
      .def_property_readonly("has_answered", &RollCall::has_answered)
      .def_property_readonly("verdict", &RollCall::verdict);
  roll_call.attr("ANSWER_POLL_SECONDS") = core::kAnswerPollSeconds;
  roll_call.attr("TAKE_OVER_SECONDS") = core::kTakeOverSeconds;
  roll_call.attr("LINGER_SECONDS") = core::kLingerSeconds;
  module.def("poll_seconds", &core::poll_seconds, py::arg("rank"));
}

}  // namespace torchtitan_ext::bindings
