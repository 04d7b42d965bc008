// What the items of a rank's plan say, as columns, from the key table that planners keep in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

// After ChunkIndex.
void define_items(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
