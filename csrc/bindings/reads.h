// What a rank reads of a checkpoint: the parts of saved chunks that its tensors want, from the key table that planners
// keep in Python. A list of it goes from the plan to the files; the read items of DCP are made of it where somebody asks
// for them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/saved_chunks.h"
#include "core/boxes.h"
#include "core/metadata_columns.h"

namespace torchtitan_ext::bindings {

// Tensors that are held alike, and were saved alike.
struct ReadAlike {
  pybind11::object entry;  // its address, and that of the list, stay their own
  pybind11::object chunk_list;
  std::vector<core::Chunk> wanted;
  std::vector<core::Overlap> parts;
  int64_t num_elements = 0;  // that the parts have

  const core::ChunkIndex& saved() const { return chunk_list.cast<const core::ChunkIndex&>(); }
};

// A tensor of which the saved chunks do not hold, once, all that the rank wants.
struct Unfilled {
  pybind11::object fqn;
  int64_t num_wanted = 0;
  int64_t num_read = 0;
};

// Values that are no tensors, then parts of tensors, both in the order of keys: this numbers the items.
class Reads {
 public:
  struct Tensor {
    pybind11::object fqn;
    pybind11::object saved_name;
    const ReadAlike* alike = nullptr;
  };
  using Alike = std::map<std::tuple<PyObject*, PyObject*, std::optional<core::Sizes>>, ReadAlike>;

  Reads(pybind11::dict values, std::vector<Tensor> tensors, std::shared_ptr<const Alike> alike);

  // By key the name in the checkpoint.
  const pybind11::dict& values() const { return values_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  size_t num_items() const;
  // The same list without one half of it.
  Reads values_alone() const { return {values_, {}, alike_}; }
  Reads tensors_alone() const { return {{}, tensors_, alike_}; }

  std::vector<Unfilled> unfilled() const;
  // What the read items of the parts of tensors say, a list per field. Args: size_class: torch.Size.
  pybind11::dict columns(const pybind11::object& size_class) const;

 private:
  pybind11::dict values_;
  std::vector<Tensor> tensors_;
  std::shared_ptr<const Alike> alike_;
};

// After ChunkIndex, SavedChunks and MetadataColumns.
void define_reads(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
