#pragma once

#include <pybind11/pybind11.h>

namespace torchtitan_ext::bindings {

void define_shared_reads(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
