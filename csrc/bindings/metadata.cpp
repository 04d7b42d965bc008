// `.metadata` for Python: plain values out, no objects of torch.
#include "bindings/metadata.h"

#include <pybind11/stl.h>

#include <unordered_map>

#include "core/check.h"
#include "core/metadata_pickle.h"

namespace py = pybind11;
using namespace torchtitan_ext::core;  // NOLINT: this file only translates that namespace

namespace {

// Deeper than any state dict; a value that contains itself ends here too.
constexpr int kMaxDepth = 200;

py::str to_str(std::string_view text) {
  PyObject* value = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass");
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(value);
}

py::tuple to_tuple(const std::vector<int64_t>& numbers) {
  py::tuple result(numbers.size());
  for (size_t index = 0; index < numbers.size(); ++index) result[index] = py::int_(numbers[index]);
  return result;
}

// Values that were one object in the stream are one object again, so that a small file cannot become a large value.
class PlainValues {
 public:
  explicit PlainValues(const PickleGraph& graph) : graph_(graph) {}

  py::object of(PickleGraph::Id id, int depth = 0) {
    if (id == PickleGraph::kAbsent) return py::none();
    TTE_CHECK(depth < kMaxDepth, ".metadata", "plain values are nested deeper than ", kMaxDepth,
              ", or contain themselves");
    if (const auto known = known_.find(id); known != known_.end()) return known->second;
    py::object value = made(id, depth);
    known_.emplace(id, value);
    return value;
  }

 private:
  py::object made(PickleGraph::Id id, int depth) {
    using Kind = PickleGraph::Kind;
    switch (graph_.kind(id)) {
      case Kind::kNone:
        return py::none();
      case Kind::kBool:
        return py::bool_(graph_.integer(id) != 0);
      case Kind::kInt:
        return py::int_(graph_.integer(id));
      case Kind::kFloat:
        return py::float_(graph_.number(id));
      case Kind::kText:
        return to_str(graph_.text(id));
      case Kind::kBytes:
        return py::bytes(graph_.text(id).data(), graph_.text(id).size());
      case Kind::kTuple:
      case Kind::kList: {
        py::list members;
        for (auto member : graph_.members(id)) members.append(of(member, depth + 1));
        if (graph_.kind(id) == Kind::kTuple) return py::tuple(members);
        return members;
      }
      case Kind::kDict: {
        py::dict members;
        const auto pairs = graph_.members(id);
        for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
          members[of(pairs[index], depth + 1)] = of(pairs[index + 1], depth + 1);
        }
        return members;
      }
      case Kind::kCall:
        if (is_path(graph_.callee(id))) return of(graph_.arguments(id), depth + 1);
        break;
      case Kind::kName:
        break;
    }
    const auto name = graph_.kind(id) == Kind::kCall ? graph_.callee(id) : id;
    const bool is_name = graph_.kind(name) == Kind::kName;
    throw std::invalid_argument(concat(".metadata: names ", is_name ? graph_.module_of(name) : "a call", ".",
                                       is_name ? graph_.name_of(name) : "",
                                       ", expected plain values; nothing was run"));
  }

  // A checkpoint_id that is a path comes out as the tuple of its parts.
  bool is_path(PickleGraph::Id id) const {
    if (graph_.kind(id) != PickleGraph::Kind::kName || graph_.name_of(id) != "PosixPath") return false;
    return graph_.module_of(id) == "pathlib" || graph_.module_of(id) == "pathlib._local";
  }

  const PickleGraph& graph_;
  std::unordered_map<PickleGraph::Id, py::object> known_;
};

py::object key_of(const SavedKey& key) {
  if (!key.is_tensor) return py::make_tuple(to_str(key.fqn), py::none());
  return py::make_tuple(to_str(key.fqn),
                        py::make_tuple(to_tuple(key.sizes), to_str(key.dtype), to_str(key.layout), key.memory_format,
                                       key.requires_grad, key.pin_memory, key.chunk_list));
}

py::list chunks_of(const SavedChunkList& list) {
  py::list chunks;
  for (size_t chunk = 0; chunk < list.num_chunks; ++chunk) {
    const auto begin = static_cast<ptrdiff_t>(chunk * list.num_dims),
               end = begin + static_cast<ptrdiff_t>(list.num_dims);
    chunks.append(py::make_tuple(to_tuple({list.offsets.begin() + begin, list.offsets.begin() + end}),
                                 to_tuple({list.sizes.begin() + begin, list.sizes.begin() + end})));
  }
  return chunks;
}

py::tuple part_of(const SavedPart& part) {
  py::list transforms;
  for (auto transform : part.transforms) transforms.append(to_str(transform));
  py::object offsets = part.offsets ? py::object(to_tuple(*part.offsets)) : py::none();
  return py::make_tuple(to_str(part.fqn), offsets, part.index, to_str(part.path), part.offset_bytes, part.length_bytes,
                        transforms);
}

py::dict read_metadata_pickle(const py::bytes& data) {
  const std::string_view view(data);
  std::optional<PickleGraph> graph;
  SavedMetadata saved;
  {
    py::gil_scoped_release release;
    graph.emplace(view);
    saved = read_metadata(*graph);
  }
  PlainValues values(*graph);
  py::list keys, chunk_lists, parts;
  for (const auto& key : saved.keys) keys.append(key_of(key));
  for (const auto& list : saved.chunk_lists) chunk_lists.append(chunks_of(list));
  for (const auto& part : saved.parts) parts.append(part_of(part));
  py::dict result;
  result["keys"] = keys;
  result["chunk_lists"] = chunk_lists;
  result["parts"] = parts;
  result["planner_data"] = values.of(saved.planner_data);
  result["storage_meta"] = values.of(saved.storage_meta);
  result["version"] = saved.version.empty() ? py::object(py::none()) : py::object(to_str(saved.version));
  return result;
}

}  // namespace

void bind_metadata(py::module_& module) { module.def("read_metadata_pickle", &read_metadata_pickle, py::arg("data")); }
