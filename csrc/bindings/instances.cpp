#include "bindings/instances.h"

#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

py::list instances(const py::type& cls, const py::kwargs& columns) {
  auto* const type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  std::vector<std::pair<PyObject*, py::tuple>> attributes;
  for (const auto& [name, column] : columns) {
    attributes.emplace_back(name.ptr(), py::reinterpret_borrow<py::object>(column));
    TTE_CHECK(attributes.back().second.size() == attributes.front().second.size(), py::str(name).cast<std::string>(),
              "column has ", attributes.back().second.size(), " rows, expected ", attributes.front().second.size());
  }
  const size_t num_rows = attributes.empty() ? 0 : attributes.front().second.size();
  const py::tuple no_arguments;
  py::list result(num_rows);
  for (size_t row = 0; row < num_rows; ++row) {
    py::object one = py::reinterpret_steal<py::object>(type->tp_new(type, no_arguments.ptr(), nullptr));
    if (!one) throw py::error_already_set();
    for (const auto& [name, column] : attributes) {
      PyObject* const value = PyTuple_GET_ITEM(column.ptr(), static_cast<Py_ssize_t>(row));
      if (PyObject_GenericSetAttr(one.ptr(), name, value) != 0) throw py::error_already_set();
    }
    result[row] = std::move(one);
  }
  return result;
}

}  // namespace

void define_instances(py::module_& module) { module.def("instances", &instances, py::arg("cls")); }

}  // namespace torchtitan_ext::bindings
