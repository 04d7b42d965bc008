// The roll call of ranks: which of them holds up an operation. See core/roll_call.h.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_roll_call(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
