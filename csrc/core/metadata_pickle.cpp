#include "core/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "core/check.h"

namespace torchtitan_ext::core {

namespace {

using Id = PickleGraph::Id;
using Kind = PickleGraph::Kind;
constexpr Id kAbsent = PickleGraph::kAbsent;

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFileSystem = "torch.distributed.checkpoint.filesystem";
// Where TensorProperties and its memory format lived before torch 2.3.
constexpr std::string_view kOldMetadata = "torch.distributed._shard.sharded_tensor.metadata";

constexpr std::array<std::string_view, 46> kDtypes = {"bool",
                                                      "uint8",
                                                      "int8",
                                                      "int16",
                                                      "int32",
                                                      "int64",
                                                      "uint16",
                                                      "uint32",
                                                      "uint64",
                                                      "float16",
                                                      "bfloat16",
                                                      "float32",
                                                      "float64",
                                                      "complex32",
                                                      "complex64",
                                                      "complex128",
                                                      "float8_e4m3fn",
                                                      "float8_e5m2",
                                                      "float8_e4m3fnuz",
                                                      "float8_e5m2fnuz",
                                                      "float8_e8m0fnu",
                                                      "float4_e2m1fn_x2",
                                                      "quint8",
                                                      "qint8",
                                                      "qint32",
                                                      "quint4x2",
                                                      "quint2x4",
                                                      "bits8",
                                                      "bits16",
                                                      "bits1x8",
                                                      "bits2x4",
                                                      "bits4x2",
                                                      "int1",
                                                      "int2",
                                                      "int3",
                                                      "int4",
                                                      "int5",
                                                      "int6",
                                                      "int7",
                                                      "uint1",
                                                      "uint2",
                                                      "uint3",
                                                      "uint4",
                                                      "uint5",
                                                      "uint6",
                                                      "uint7"};

class MetadataReader {
 public:
  explicit MetadataReader(const PickleGraph& graph) : graph_(graph) {}

  SavedMetadata read() {
    const Id fields = fields_of(graph_.root(), kMetadata, "Metadata", "Metadata");
    read_keys(field(fields, "state_dict_metadata"));
    const Id storage = field(fields, "storage_data");
    if (is(storage, Kind::kDict)) read_parts(storage);
    if (Id data = field(fields, "planner_data"); !is_none(data)) metadata_.planner_data = data;
    if (Id meta = field(fields, "storage_meta"); !is_none(meta)) {
      metadata_.storage_meta = fields_of(meta, kMetadata, "StorageMeta", "storage_meta");
    }
    if (Id version = field(fields, "version"); !is_none(version)) metadata_.version = text_of(version, "version");
    return std::move(metadata_);
  }

 private:
  [[noreturn]] static void fail(std::string_view where, std::string_view what) {
    throw std::invalid_argument(concat(".metadata: ", where, ": ", what));
  }

  bool is(Id id, Kind kind) const { return id != kAbsent && graph_.kind(id) == kind; }
  bool is_none(Id id) const { return id == kAbsent || graph_.kind(id) == Kind::kNone; }

  bool is_named(Id id, std::string_view module, std::string_view name) const {
    return is(id, Kind::kName) && graph_.module_of(id) == module && graph_.name_of(id) == name;
  }

  // The value of a field, or kAbsent: classes of newer torch leave out fields that are None.
  Id field(Id fields, std::string_view name) const {
    return is(fields, Kind::kDict) ? graph_.find(fields, name) : kAbsent;
  }

  // The state of an object of one class: a dict of its fields, or the tuple that its __getstate__ makes.
  Id fields_of(Id object, std::string_view module, std::string_view name, std::string_view where) const {
    if (!is(object, Kind::kCall) || !is_named(graph_.callee(object), module, name)) refuse(object, where, name);
    return graph_.state(object);
  }

  [[noreturn]] void refuse(Id id, std::string_view where, std::string_view expected) const {
    if (is(id, Kind::kCall) && is(graph_.callee(id), Kind::kName)) id = graph_.callee(id);
    if (is(id, Kind::kName)) {
      fail(where, concat("names ", graph_.module_of(id), ".", graph_.name_of(id), ", expected ", expected,
                         "; nothing was run"));
    }
    fail(where, concat("has a value of another type, expected ", expected));
  }

  std::string_view text_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kText)) refuse(id, where, "a text");
    return graph_.text(id);
  }

  int64_t integer_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kInt)) refuse(id, where, "an integer");
    return graph_.integer(id);
  }

  bool flag_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kBool)) refuse(id, where, "True or False");
    return graph_.integer(id) != 0;
  }

  // torch.Size((2, 3)), or a plain tuple or list.
  std::vector<int64_t> sizes_of(Id id, std::string_view where) const {
    if (is(id, Kind::kCall) && is_named(graph_.callee(id), "torch", "Size")) {
      const auto arguments = graph_.members(graph_.arguments(id));
      if (arguments.empty()) return {};
      id = arguments[0];
    }
    if (!is(id, Kind::kTuple) && !is(id, Kind::kList)) refuse(id, where, "torch.Size");
    std::vector<int64_t> sizes;
    for (Id member : graph_.members(id)) {
      sizes.push_back(integer_of(member, where));
      if (sizes.back() < 0) fail(where, "has a negative offset or size");
    }
    return sizes;
  }

  std::string_view dtype_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kName) || graph_.module_of(id) != "torch") refuse(id, where, "a torch.dtype");
    if (std::find(kDtypes.begin(), kDtypes.end(), graph_.name_of(id)) == kDtypes.end())
      refuse(id, where, "a torch.dtype");
    return graph_.name_of(id);
  }

  // torch.serialization._get_layout("torch.strided")
  std::string_view layout_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kCall) || !is_named(graph_.callee(id), "torch.serialization", "_get_layout")) {
      refuse(id, where, "a torch.layout");
    }
    const auto arguments = graph_.members(graph_.arguments(id));
    if (arguments.size() != 1) fail(where, "has a torch.layout without a name");
    return text_of(arguments[0], where);
  }

  // A member of the enum: by value, or by name as Python 3.11 writes it (getattr(enum, name)).
  int64_t memory_format_of(Id id, std::string_view where) const {
    if (!is(id, Kind::kCall)) refuse(id, where, "a memory format");
    const auto arguments = graph_.members(graph_.arguments(id));
    if (is_memory_format(graph_.callee(id)) && arguments.size() == 1) return integer_of(arguments[0], where);
    if (is_named(graph_.callee(id), "builtins", "getattr") && arguments.size() == 2 && is_memory_format(arguments[0])) {
      constexpr std::array<std::string_view, 3> kNames = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST",
                                                          "TORCH_PRESERVE_FORMAT"};
      const auto found = std::find(kNames.begin(), kNames.end(), text_of(arguments[1], where));
      if (found != kNames.end()) return found - kNames.begin();
    }
    refuse(id, where, "a memory format");
  }

  bool is_memory_format(Id id) const {
    return is_named(id, kMetadata, "_MEM_FORMAT_ENCODING") || is_named(id, kOldMetadata, "MEM_FORMAT_ENCODING");
  }

  void read_keys(Id dict) {
    if (!is(dict, Kind::kDict)) refuse(dict, "state_dict_metadata", "a dict");
    const auto pairs = graph_.members(dict);
    metadata_.keys.reserve(pairs.size() / 2);
    for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
      const auto fqn = text_of(pairs[index], "state_dict_metadata");
      metadata_.keys.push_back(key_of(fqn, pairs[index + 1]));
    }
  }

  SavedKey key_of(std::string_view fqn, Id value) {
    SavedKey key{.fqn = fqn, .sizes = {}, .dtype = {}, .layout = {}};
    if (is(value, Kind::kCall) && is_named(graph_.callee(value), kMetadata, "BytesStorageMetadata")) return key;
    const Id fields = fields_of(value, kMetadata, "TensorStorageMetadata", fqn);
    key.is_tensor = true;
    key.sizes = sizes_of(field(fields, "size"), fqn);
    read_properties(field(fields, "properties"), key);
    key.chunk_list = chunk_list_of(field(fields, "chunks"), fqn);
    const auto& chunks = metadata_.chunk_lists[key.chunk_list];
    if (chunks.num_chunks > 0 && chunks.num_dims != key.sizes.size()) fail(fqn, "has chunks of other numbers of dims");
    return key;
  }

  void read_properties(Id properties, SavedKey& key) {
    if (!is(properties, Kind::kCall)) refuse(properties, key.fqn, "TensorProperties");
    const bool is_old = is_named(graph_.callee(properties), kOldMetadata, "TensorProperties");
    if (!is_old && !is_named(graph_.callee(properties), kMetadata, "TensorProperties")) {
      refuse(properties, key.fqn, "TensorProperties");
    }
    const Id state = graph_.state(properties);
    if (!is(state, Kind::kTuple)) refuse(state, key.fqn, "the state of TensorProperties");
    const auto values = graph_.members(state);
    if (values.size() != 5) fail(key.fqn, "has TensorProperties of other fields");
    key.dtype = dtype_of(values[0], key.fqn);
    key.layout = layout_of(values[1], key.fqn);
    key.requires_grad = flag_of(values[2], key.fqn);
    key.memory_format = memory_format_of(values[3], key.fqn);
    key.pin_memory = flag_of(values[4], key.fqn);
  }

  size_t chunk_list_of(Id list, std::string_view fqn) {
    if (!is(list, Kind::kList)) refuse(list, fqn, "a list of chunks");
    const auto [known, is_new] = list_of_.try_emplace(list, metadata_.chunk_lists.size());
    if (!is_new) return known->second;
    SavedChunkList chunks;
    for (Id chunk : graph_.members(list)) {
      const Id fields = fields_of(chunk, kMetadata, "ChunkStorageMetadata", fqn);
      const auto offsets = sizes_of(field(fields, "offsets"), fqn);
      const auto sizes = sizes_of(field(fields, "sizes"), fqn);
      if (chunks.num_chunks == 0) chunks.num_dims = offsets.size();
      if (offsets.size() != chunks.num_dims || sizes.size() != chunks.num_dims)
        fail(fqn, "has chunks of several numbers of dims");
      chunks.offsets.insert(chunks.offsets.end(), offsets.begin(), offsets.end());
      chunks.sizes.insert(chunks.sizes.end(), sizes.begin(), sizes.end());
      ++chunks.num_chunks;
    }
    metadata_.chunk_lists.push_back(std::move(chunks));
    return known->second;
  }

  void read_parts(Id dict) {
    const auto pairs = graph_.members(dict);
    metadata_.parts.reserve(pairs.size() / 2);
    for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
      const Id place = fields_of(pairs[index], kMetadata, "MetadataIndex", "storage_data");
      SavedPart part{.fqn = text_of(field(place, "fqn"), "storage_data"),
                     .offsets = {},
                     .index = {},
                     .path = {},
                     .transforms = {}};
      if (Id offsets = field(place, "offset"); !is_none(offsets)) part.offsets = sizes_of(offsets, part.fqn);
      if (Id hint = field(place, "index"); !is_none(hint)) part.index = integer_of(hint, part.fqn);
      const Id info = fields_of(pairs[index + 1], kFileSystem, "_StorageInfo", part.fqn);
      part.path = text_of(field(info, "relative_path"), part.fqn);
      if (leads_outside(part.path)) fail(part.fqn, concat("lies outside of the checkpoint: ", part.path));
      part.offset_bytes = integer_of(field(info, "offset"), part.fqn);
      part.length_bytes = integer_of(field(info, "length"), part.fqn);
      if (part.offset_bytes < 0 || part.length_bytes < 0) fail(part.fqn, "has a negative place in its file");
      if (Id transforms = field(info, "transform_descriptors"); !is_none(transforms)) {
        if (!is(transforms, Kind::kList) && !is(transforms, Kind::kTuple))
          refuse(transforms, part.fqn, "a list of texts");
        for (Id transform : graph_.members(transforms)) part.transforms.push_back(text_of(transform, part.fqn));
      }
      metadata_.parts.push_back(std::move(part));
    }
  }

  static bool leads_outside(std::string_view path) {
    if (path.empty() || path.front() == '/' || path.find('\0') != std::string_view::npos) return true;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('/', begin), path.size());
      if (path.substr(begin, end - begin) == "..") return true;
      begin = end + 1;
    }
    return false;
  }

  const PickleGraph& graph_;
  SavedMetadata metadata_;
  std::unordered_map<Id, size_t> list_of_;
};

}  // namespace

SavedMetadata read_metadata(const PickleGraph& graph) { return MetadataReader(graph).read(); }

}  // namespace torchtitan_ext::core
