// The parts of the module torchtitan_ext._core that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_metadata(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
