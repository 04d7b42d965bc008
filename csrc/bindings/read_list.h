// What a rank reads with the records that hold it, by files, for a RunReader. Asks the items of DCP's planners and
// torch's tensors for their attributes by name.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

// After RunReader, StoredTensor, MetadataColumns and Reads.
void define_read_list(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
