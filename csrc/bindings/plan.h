// The part of the module _core that plans over all ranks; registered by core.cpp.
#pragma once

#include <pybind11/pybind11.h>

void register_plan(pybind11::module_& module);
