// A rank's key table as bytes, from the entries that planners keep in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_tables(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
