#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void register_sums(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
