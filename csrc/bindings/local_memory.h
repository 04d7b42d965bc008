// The memory of a rank's own tensors, which Python holds.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/convert.h"

namespace torchtitan_ext::bindings {

// The names of a dtype's objects are asked for once.
class DtypeNames {
 public:
  const std::string& of(const pybind11::object& dtype) {
    auto& [kept, name] = names_[dtype.ptr()];
    if (!kept) {
      kept = dtype;
      name = pybind11::str(dtype).attr("removeprefix")("torch.").cast<std::string>();
    }
    return name;
  }

 private:
  std::unordered_map<PyObject*, std::pair<pybind11::object, std::string>> names_;
};

// The memory of a rank's own tensor, and how its elements lie there.
struct LocalMemory {
  uintptr_t address = 0;
  core::Sizes sizes, strides;
  std::string dtype;

  // Elements from the first one to that of a box; nothing where the box does not lie in the tensor.
  std::optional<int64_t> find_box(const core::Sizes& offsets, const core::Sizes& box_sizes) const {
    if (offsets.size() != sizes.size() || box_sizes.size() != sizes.size()) return std::nullopt;
    int64_t first = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (offsets[dim] < 0 || offsets[dim] > sizes[dim] - box_sizes[dim]) return std::nullopt;
      first += offsets[dim] * strides[dim];
    }
    return first;
  }
};

// Each tensor is asked once, and kept.
class LocalMemories {
 public:
  // By its key in a dict; null where it has none.
  const LocalMemory* find(const pybind11::dict& tensors, const pybind11::object& fqn) {
    const pybind11::object held = find_in(tensors, fqn);
    if (!held) return nullptr;
    auto& [owner, memory] = memories_[held.ptr()];
    if (!owner) {
      owner = held;
      memory = {held.attr("data_ptr")().cast<uintptr_t>(), to_sizes(held.attr("shape")),
                to_sizes(held.attr("stride")()), dtypes_.of(held.attr("dtype"))};
    }
    return &memory;
  }

 private:
  std::unordered_map<PyObject*, std::pair<pybind11::object, LocalMemory>> memories_;
  DtypeNames dtypes_;
};

}  // namespace torchtitan_ext::bindings
