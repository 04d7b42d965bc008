// What a rank says of a tensor (ShardReport in torchtitan_ext/layout/layout.py), as values of C++.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "core/key_columns.h"

namespace torchtitan_ext::bindings {

// A MeshLayout, and its rank at the origin.
std::pair<core::MeshForm, int64_t> read_mesh(const pybind11::handle& mesh);

// Shape, placements and order of a report; its mesh is left to the caller.
void read_layout(const pybind11::handle& report, core::Kind& kind);

}  // namespace torchtitan_ext::bindings
