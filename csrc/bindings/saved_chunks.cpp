#include "bindings/saved_chunks.h"

#include <pybind11/stl.h>

#include <map>
#include <tuple>
#include <vector>

#include "bindings/convert.h"
#include "core/agreement.h"
#include "core/wire.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

std::vector<Chunk> to_chunks(const MetadataColumns& columns, uint32_t chunk_list) {
  std::vector<Chunk> chunks;
  for (const SavedChunk& chunk : columns.chunk_lists()[chunk_list]) {
    const std::span<const int64_t> offsets = columns.sizes[chunk.offsets], sizes = columns.sizes[chunk.sizes];
    chunks.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}, {}});
  }
  return chunks;
}

std::string content_of(const std::vector<Chunk>& chunks) {
  WireWriter out;
  for (const Chunk& chunk : chunks) {
    out.put_sizes(chunk.offsets);
    out.put_sizes(chunk.sizes);
  }
  return out.take();
}

// A key whose saved chunks do not hold every element of its tensor exactly once, its class, and these chunks.
using Uncovered = std::tuple<uint32_t, uint32_t, py::object>;

// Of the keys that ranks agree on. Args: wanted: by key the name in the checkpoint.
std::vector<Uncovered> find_uncovered(const JointTable& joint, const py::dict& wanted, SavedChunks& saved) {
  std::vector<Uncovered> found;
  std::map<std::pair<PyObject*, uint32_t>, bool> is_covered;
  for (uint32_t key = 0; key < joint.num_keys(); ++key) {
    if (!joint.is_agreed(key)) continue;
    const uint32_t of_class = joint.class_of(key);
    const Kind& kind = joint.kind_of(joint.classes()[of_class]);
    if (kind.type == EntryType::kObject) continue;
    const py::object chunks = saved.find(wanted[to_str(joint.name(key))]);
    if (chunks.is_none()) continue;
    const auto [known, is_new] = is_covered.try_emplace({chunks.ptr(), of_class});
    if (is_new) {
      const auto& index = chunks.cast<const ChunkIndex&>();
      const py::gil_scoped_release release;
      known->second = index.covers(kind.shape);
    }
    if (!known->second) found.emplace_back(key, of_class, chunks);
  }
  return found;
}

}  // namespace

std::vector<Chunk> to_chunks(const py::list& objects) {
  const py::str offsets("offsets");
  const py::str sizes("sizes");
  std::vector<Chunk> chunks;
  chunks.reserve(objects.size());
  for (const py::handle chunk : objects) {
    chunks.push_back({to_sizes(chunk.attr(offsets)), to_sizes(chunk.attr(sizes)), {}});
  }
  return chunks;
}

SavedChunks::SavedChunks(py::object columns)
    : columns_(std::move(columns)), read_(columns_.cast<const MetadataColumns*>()) {}

SavedChunks::SavedChunks(py::dict entries, py::object tensor_class)
    : entries_(std::move(entries)), tensor_class_(std::move(tensor_class)) {}

py::object SavedChunks::find(const py::handle& fqn) {
  if (read_ == nullptr) {
    const py::object saved = find_in(entries_, fqn);
    if (!saved || !py::isinstance(saved, tensor_class_)) return py::none();
    return of(saved.attr("chunks"));
  }
  const uint32_t number = read_->find_key(to_utf8(fqn));
  if (number == HashedNumbers::kNone || !read_->keys()[number].is_tensor) return py::none();
  const uint32_t chunk_list = read_->keys()[number].chunk_list;
  py::object& index = by_number_[chunk_list];
  if (!index) index = py::cast(ChunkIndex(to_chunks(*read_, chunk_list)));
  return index;
}

py::object SavedChunks::of(const py::list& chunks) {
  auto& [kept, index] = by_identity_[chunks.ptr()];
  if (!kept) {
    std::vector<Chunk> listed = to_chunks(chunks);
    py::object& alike = by_content_[content_of(listed)];
    if (!alike) alike = py::cast(ChunkIndex(std::move(listed)));
    kept = chunks;
    index = alike;
  }
  return index;
}

void define_saved_chunks(py::module_& module) {
  py::class_<SavedChunks>(module, "SavedChunks", "The chunk lists of a checkpoint; see csrc/bindings/saved_chunks.h.")
      .def(py::init<py::object>(), py::arg("columns"))
      .def(py::init<py::dict, py::object>(), py::arg("entries"), py::arg("tensor_class"))
      .def("find", &SavedChunks::find, py::arg("fqn"))
      .def("of", &SavedChunks::of, py::arg("chunks"));
  module.def("find_uncovered", &find_uncovered, py::arg("joint"), py::arg("wanted"), py::arg("saved"));
}

}  // namespace torchtitan_ext::bindings
