// DCP's `.metadata` to and from columns. It is read by an allow-list: names that are not part of a checkpoint's metadata
// are refused, and none is ever looked up.
//
// The file is a pickled `torch.distributed.checkpoint.metadata.Metadata` of torch 2.1 to 2.15, written by Python 3.8 to
// 3.14. It is written as torch before 2.15 does, without the strides of TensorProperties, so that each of them reads it.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/metadata_columns.h"
#include "core/pickle_graph.h"
#include "core/pickle_writer.h"

namespace torchtitan_ext::core {

// The state of TensorProperties is a tuple: dtype, layout, requires_grad, memory format, pin_memory and, since torch 2.15,
// strides.
constexpr size_t kKnownProperties = 6;

// What of a metadata are plain values. Absent in some.
struct PlainMetadata {
  PickleGraph::Id planner_data = PickleGraph::kAbsent;  // of each key its path in the nested state dict
  PickleGraph::Id storage_meta = PickleGraph::kAbsent;  // a dict of its fields
  std::string_view version;
  int64_t num_unknown_properties =
      0;  // fields of TensorProperties behind those that are known; their values are defaults
};

// Adds what the file says to the columns. Throws std::invalid_argument that names the key concerned: a name that is not
// allowed, a value of another type, chunks of other numbers of dims than their tensor, a path that leads outside of the
// checkpoint, a value in a field of TensorProperties that is not known. Views are into the graph's data.
PlainMetadata read_metadata(const PickleGraph& graph, MetadataColumns& columns);

// The text of a path, of which a StorageMeta may name one as its checkpoint.
void write_path(PickleWriter& out, std::string_view path);

// What is asked to write the plain values: the planner's data; the fields of StorageMeta as keys and values in turn.
struct PlainWriters {
  std::function<void(PickleWriter&)> planner_data;
  std::function<void(PickleWriter&)> storage_meta;
  std::string version;
};

// The file of these columns: equal, when it is unpickled, to what Python's pickle would write of the same objects. Equal
// chunk lists, properties, sizes and names are one object each in it.
std::string write_metadata(const MetadataColumns& columns, const PlainWriters& plain);

}  // namespace torchtitan_ext::core
