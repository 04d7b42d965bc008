// The items of a rank's plan, all at once: those of a load with their records, for a RunReader, and those of a save with
// the memory of their tensors, for a RecordWriter. Asks DCP's items and torch's tensors for their attributes by name.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

// After RunReader, RecordWriter, StoredTensor and MetadataColumns.
void define_plan_items(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
