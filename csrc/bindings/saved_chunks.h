// The chunk list of each tensor of a checkpoint, sorted once, and the same Python object for equal lists.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/boxes.h"
#include "core/metadata_columns.h"

namespace torchtitan_ext::bindings {

// From objects with tuples as offsets and sizes, such as DCP's ChunkStorageMetadata.
std::vector<core::Chunk> to_chunks(const pybind11::list& objects);

// Thousands of keys may share a list. Our saves share the lists themselves; those of stock are compared by content.
class SavedChunks {
 public:
  // Of metadata that lies in columns.
  explicit SavedChunks(pybind11::object columns);
  // Args: entries: by key an object of `tensor_class`, which has `chunks`, or of another one, which is no tensor.
  SavedChunks(pybind11::dict entries, pybind11::object tensor_class);

  // None for a key that is no tensor, or is not there.
  pybind11::object find(const pybind11::handle& fqn);
  // Args: chunks: as of `to_chunks`.
  pybind11::object of(const pybind11::list& chunks);

 private:
  pybind11::object columns_ = pybind11::none();
  const core::MetadataColumns* read_ = nullptr;  // what `columns_` holds
  pybind11::dict entries_;
  pybind11::object tensor_class_ = pybind11::none();
  std::unordered_map<uint32_t, pybind11::object> by_number_;
  // With the list, so that no other one gets its address.
  std::unordered_map<PyObject*, std::pair<pybind11::object, pybind11::object>> by_identity_;
  std::unordered_map<std::string, pybind11::object> by_content_;
};

// After ChunkIndex, MetadataColumns and JointTable.
void define_saved_chunks(pybind11::module_& module);

}  // namespace torchtitan_ext::bindings
