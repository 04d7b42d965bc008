// The part of the module _core that csrc/storage is behind.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_storage(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
