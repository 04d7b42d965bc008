// DCP's `.metadata` as columns, read by an allow-list: names that are not part of a checkpoint's metadata are refused,
// and none is ever looked up.
//
// The file is a pickled `torch.distributed.checkpoint.metadata.Metadata` of torch 2.1 to 2.13, written by Python 3.8 to
// 3.14. Keys whose chunk lists are one object in the file (as ours are) share one list here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/pickle_graph.h"

namespace torchtitan_ext::core {

// The chunks of one or several keys: offsets and sizes in elements, `num_dims` numbers each, chunk after chunk.
struct SavedChunkList {
  size_t num_dims = 0;
  size_t num_chunks = 0;
  std::vector<int64_t> offsets, sizes;
};

struct SavedKey {
  std::string_view fqn;
  bool is_tensor = false;
  // Of a tensor.
  std::vector<int64_t> sizes;
  std::string_view dtype;   // "float32"
  std::string_view layout;  // "torch.strided"
  int64_t memory_format = 0;
  bool requires_grad = false;
  bool pin_memory = false;
  size_t chunk_list = 0;
};

// Where storage put one part of a key.
struct SavedPart {
  std::string_view fqn;
  std::optional<std::vector<int64_t>> offsets;  // none of a value that is no tensor
  std::optional<int64_t> index;                 // of the chunk in its list, a hint
  std::string_view path;                        // of the file, relative to the checkpoint; never leads outside of it
  int64_t offset_bytes = 0;
  int64_t length_bytes = 0;
  std::vector<std::string_view> transforms;
};

struct SavedMetadata {
  std::vector<SavedKey> keys;
  std::vector<SavedChunkList> chunk_lists;
  std::vector<SavedPart> parts;
  // Plain values: of each key its path in the nested state dict; and what the storage says of itself. Absent in some.
  PickleGraph::Id planner_data = PickleGraph::kAbsent;
  PickleGraph::Id storage_meta = PickleGraph::kAbsent;
  std::string_view version;
};

// Throws std::invalid_argument that names the key concerned: a name that is not allowed, a value of another type,
// chunks of other numbers of dims than their tensor, a path that leads outside of the checkpoint. Views are into the
// graph's data.
SavedMetadata read_metadata(const PickleGraph& graph);

}  // namespace torchtitan_ext::core
