// Python's frozen dataclasses from columns.
//
// instances(cls, fqn=..., offset=...) makes one instance of `cls` per row of the columns, which have equal lengths: what
// its __init__ makes of these values, where that does nothing but take them. Thousands of calls of it, each with a call
// per attribute, cost more than all else that a plan of small tensors needs.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_instances(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
