// What a rank writes, from the key table that planners keep in Python, and the memory of its tensors, for a RecordWriter.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

// After ChunkIndex and RecordWriter.
void define_writes(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
