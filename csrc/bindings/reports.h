// What a rank says of a tensor (ShardReport in torchtitan_ext/layout/layout.py), as values of C++.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/key_columns.h"

namespace torchtitan_ext::bindings {

// A MeshLayout, and its rank at the origin.
std::pair<core::MeshForm, int64_t> read_mesh(const pybind11::handle& mesh);

// Shape, placements and order of a report; its mesh is left to the caller.
void read_layout(const pybind11::handle& report, core::Kind& kind);

// The keys of each section of a key table, in the order that a decision refers to.
using Names = std::vector<pybind11::list>;

// The entry of a key. Throws KeyError.
inline pybind11::object entry_of(const pybind11::dict& entries, const pybind11::handle& fqn) {
  pybind11::object entry = find_in(entries, fqn);
  if (!entry) throw pybind11::key_error(pybind11::str(fqn));
  return entry;
}

// Tells a KeyEntry (torchtitan_ext/checkpoint/tables/key_table.py) by its class, which is asked once.
class EntryTypes {
 public:
  core::EntryType of(const pybind11::handle& entry);

 private:
  std::unordered_map<PyTypeObject*, core::EntryType> types_;
};

// What a rank holds of a tensor, by its entry.
// Args:
//   steps: the sharding order; by default the first that the report leaves open.
std::vector<core::Chunk> held_chunks(const pybind11::handle& entry, core::EntryType type,
                                     const std::vector<core::ShardStep>* steps);

}  // namespace torchtitan_ext::bindings
