// Maps of tensors and transforms for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_transforms(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
