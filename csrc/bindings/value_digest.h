// The digest of any Python value: which objects it consists of, and what tells each apart. See core/value_graph.h.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_value_digest(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
