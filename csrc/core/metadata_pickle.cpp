#include "core/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

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

// More than any class has: what a small file says again and again must not take long.
constexpr size_t kMaxFields = 16;

constexpr size_t kFewestProperties = 5;  // torch before 2.15 has no strides

// A class by its name. Most files name it once, so that its node is known at once from then on.
struct Class {
  std::string_view module, name;
  Id node = kAbsent;
};

class MetadataReader {
 public:
  MetadataReader(const PickleGraph& graph, MetadataColumns& columns) : graph_(graph), columns_(columns) {}

  PlainMetadata read() {
    const auto fields = fields_of(graph_.root(), metadata_, "Metadata");
    const Id keys = graph_.find(fields, "state_dict_metadata"), parts = graph_.find(fields, "storage_data"),
             data = graph_.find(fields, "planner_data"), meta = graph_.find(fields, "storage_meta"),
             version = graph_.find(fields, "version");
    read_keys(keys);
    if (!is_none(parts)) read_parts(parts);
    PlainMetadata plain;
    plain.num_unknown_properties = num_unknown_properties_;
    if (!is_none(data)) plain.planner_data = data;
    if (!is_none(version)) plain.version = text_of(version, "version");
    if (!is_none(meta)) {
      fields_of(meta, storage_meta_, "storage_meta");
      plain.storage_meta = graph_.state(meta);
    }
    return plain;
  }

 private:
  using Members = std::span<const Id>;

  [[noreturn]] static void fail(std::string_view where, std::string_view what) {
    throw std::invalid_argument(concat(".metadata: ", where, ": ", what));
  }

  bool is(Id id, Kind kind) const { return id != kAbsent && graph_.kind(id) == kind; }
  bool is_none(Id id) const { return id == kAbsent || graph_.kind(id) == Kind::kNone; }

  bool is_named(Id id, Class& wanted) const {
    if (id == wanted.node && id != kAbsent) return true;
    if (!is(id, Kind::kName) || graph_.module_of(id) != wanted.module || graph_.name_of(id) != wanted.name)
      return false;
    wanted.node = id;
    return true;
  }

  bool is_call_of(Id id, Class& wanted) const { return is(id, Kind::kCall) && is_named(graph_.callee(id), wanted); }

  // The state of an object of one class: a dict of its fields, or what its __getstate__ makes. Fields that are None are
  // left out by classes of newer torch.
  Members fields_of(Id object, Class& of_class, std::string_view where) {
    if (!is_call_of(object, of_class)) refuse(object, where, of_class.name);
    const Id state = graph_.state(object);
    if (!is(state, Kind::kDict)) return {};
    if (graph_.num_members(state) > 2 * kMaxFields) fail(where, "has more fields than its class");
    return graph_.members(state, fields_);
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

  // The only argument of a call.
  Id argument_of(Id call, std::string_view where, std::string_view expected) {
    const Members arguments = graph_.members(graph_.arguments(call), arguments_);
    if (arguments.size() != 1) refuse(call, where, expected);
    return arguments[0];
  }

  // The number of torch.Size((2, 3)), or of a plain tuple or list.
  uint32_t sizes_of(Id id, std::string_view where) {
    if (is_call_of(id, size_)) {
      if (graph_.num_members(graph_.arguments(id)) == 0) return columns_.sizes.add({});
      id = argument_of(id, where, "torch.Size");
    }
    if (!is(id, Kind::kTuple) && !is(id, Kind::kList)) refuse(id, where, "torch.Size");
    const Members members = graph_.members(id, arguments_);
    if (members.size() > kMaxDims) fail(where, concat("has more than ", kMaxDims, " dims"));
    sizes_.clear();
    for (const Id member : members) {
      sizes_.push_back(integer_of(member, where));
      if (sizes_.back() < 0) fail(where, "has a negative offset or size");
    }
    if (!can_be_sizes(sizes_)) fail(where, "has offsets or sizes that no tensor can have");
    return columns_.sizes.add(sizes_);
  }

  uint32_t dtype_of(Id id, std::string_view where) {
    if (!is(id, Kind::kName) || graph_.module_of(id) != "torch") refuse(id, where, "a torch.dtype");
    if (!is_dtype_name(graph_.name_of(id))) refuse(id, where, "a torch.dtype");
    return columns_.names.add(graph_.name_of(id));
  }

  // torch.serialization._get_layout("torch.strided")
  uint32_t layout_of(Id id, std::string_view where) {
    if (!is_call_of(id, get_layout_)) refuse(id, where, "a torch.layout");
    const auto layout = text_of(argument_of(id, where, "a torch.layout"), where);
    if (!is_layout_name(layout)) refuse(id, where, "a torch.layout");
    return columns_.names.add(layout);
  }

  // A member of the enum: by value, or by name as Python 3.11 writes it (getattr(enum, name)).
  int64_t memory_format_of(Id id, std::string_view where) {
    constexpr std::array<std::string_view, kNumMemoryFormats> kNames = {"TORCH_CONTIGUOUS_FORMAT",
                                                                        "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"};
    if (!is(id, Kind::kCall)) refuse(id, where, "a memory format");
    const auto arguments = graph_.members(graph_.arguments(id));
    if (is_memory_format(graph_.callee(id)) && arguments.size() == 1) {
      const int64_t value = integer_of(arguments[0], where);
      if (value >= 0 && value < kNumMemoryFormats) return value;
    }
    if (is_named(graph_.callee(id), getattr_) && arguments.size() == 2 && is_memory_format(arguments[0])) {
      const auto found = std::find(kNames.begin(), kNames.end(), text_of(arguments[1], where));
      if (found != kNames.end()) return found - kNames.begin();
    }
    refuse(id, where, "a memory format");
  }

  bool is_memory_format(Id id) { return is_named(id, memory_format_) || is_named(id, old_memory_format_); }

  // The keys and values of a dict; or of dict({...}), as which a lazy dict is pickled.
  std::vector<Id> pairs_of(Id dict, std::string_view where) {
    if (is_call_of(dict, dict_)) dict = argument_of(dict, where, "a dict");
    if (!is(dict, Kind::kDict)) refuse(dict, where, "a dict");
    return graph_.members(dict);
  }

  void read_keys(Id dict) {
    const auto pairs = pairs_of(dict, "state_dict_metadata");
    for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
      columns_.add_key(key_of(text_of(pairs[index], "state_dict_metadata"), pairs[index + 1]));
    }
  }

  SavedKey key_of(std::string_view fqn, Id value) {
    SavedKey key{.fqn = columns_.names.add(fqn)};
    if (is_call_of(value, bytes_entry_)) return key;
    const auto fields = fields_of(value, tensor_entry_, fqn);
    const Id size = graph_.find(fields, "size"), properties = graph_.find(fields, "properties"),
             chunks = graph_.find(fields, "chunks");
    key.is_tensor = true;
    key.sizes = sizes_of(size, fqn);
    read_properties(properties, fqn, key);
    key.chunk_list = chunk_list_of(chunks, fqn);
    const auto& list = columns_.chunk_lists()[key.chunk_list];
    if (!list.empty() && columns_.sizes[list[0].sizes].size() != columns_.sizes[key.sizes].size()) {
      fail(fqn, "has chunks of other numbers of dims");
    }
    return key;
  }

  void read_properties(Id properties, std::string_view fqn, SavedKey& key) {
    if (!is_call_of(properties, properties_) && !is_call_of(properties, old_properties_)) {
      refuse(properties, fqn, "TensorProperties");
    }
    const Id state = graph_.state(properties);
    if (!is(state, Kind::kTuple)) refuse(state, fqn, "the state of TensorProperties");
    if (graph_.num_members(state) > kMaxFields) fail(fqn, "has more fields than its class");
    const auto values = graph_.members(state);
    if (values.size() < kFewestProperties) {
      fail(fqn, concat("has TensorProperties of ", values.size(), " fields, expected ", kFewestProperties, " or more"));
    }
    key.dtype = dtype_of(values[0], fqn);
    key.layout = layout_of(values[1], fqn);
    key.requires_grad = flag_of(values[2], fqn);
    key.memory_format = memory_format_of(values[3], fqn);
    key.pin_memory = flag_of(values[4], fqn);
    if (values.size() > kFewestProperties) key.strides = strides_of(values[kFewestProperties], fqn);
    for (size_t field = kKnownProperties; field < values.size(); ++field)
      check_is_default(values[field], field + 1, fqn);
  }

  // None, or those of the tensor that a rank held: nothing follows from them for the bytes of a record.
  uint32_t strides_of(Id id, std::string_view fqn) {
    if (is_none(id)) return SavedKey::kNoStrides;
    if (is_call_of(id, size_)) id = argument_of(id, fqn, "strides");
    if (!is(id, Kind::kTuple) && !is(id, Kind::kList)) refuse(id, fqn, "strides");
    const Members members = graph_.members(id, arguments_);
    if (members.size() > kMaxDims) fail(fqn, concat("has more than ", kMaxDims, " dims"));
    sizes_.clear();
    for (const Id member : members) {
      sizes_.push_back(integer_of(member, fqn));
      if (sizes_.back() < 0) fail(fqn, "has a negative stride");
    }
    return columns_.strides.add(sizes_);
  }

  // A field of a torch that this reader does not know. Options that are off are None or False; anything else may change
  // what the tensor is.
  void check_is_default(Id id, size_t field, std::string_view fqn) {
    if (!is_none(id) && !(is(id, Kind::kBool) && graph_.integer(id) == 0)) {
      fail(fqn, concat("has a value in field ", field, " of TensorProperties, of which this version knows ",
                       kKnownProperties, "; upgrade torchtitan_ext"));
    }
    num_unknown_properties_ = std::max(num_unknown_properties_, static_cast<int64_t>(field - kKnownProperties));
  }

  uint32_t chunk_list_of(Id list, std::string_view fqn) {
    if (!is(list, Kind::kList)) refuse(list, fqn, "a list of chunks");
    if (const auto known = list_of_.find(list); known != list_of_.end()) return known->second;
    std::vector<SavedChunk> chunks;
    size_t num_dims = 0;
    for (const Id chunk : graph_.members(list)) {
      const auto fields = fields_of(chunk, chunk_, fqn);
      const Id of_offsets = graph_.find(fields, "offsets"), of_sizes = graph_.find(fields, "sizes");
      const SavedChunk saved{sizes_of(of_offsets, fqn), sizes_of(of_sizes, fqn)};
      if (chunks.empty()) num_dims = columns_.sizes[saved.sizes].size();
      if (columns_.sizes[saved.offsets].size() != num_dims || columns_.sizes[saved.sizes].size() != num_dims)
        fail(fqn, "has chunks of several numbers of dims");
      chunks.push_back(saved);
    }
    return list_of_[list] = columns_.add_chunk_list(chunks);
  }

  void read_parts(Id dict) {
    const auto pairs = pairs_of(dict, "storage_data");
    columns_.reserve_parts(pairs.size() / 2);
    for (size_t index = 0; index + 1 < pairs.size(); index += 2) {
      SavedPart part;
      const auto place = fields_of(pairs[index], index_, "storage_data");
      const std::string_view fqn = text_of(graph_.find(place, "fqn"), "storage_data");
      part.fqn = columns_.names.add(fqn);
      if (Id hint = graph_.find(place, "index"); !is_none(hint)) part.index = integer_of(hint, fqn);
      if (Id offsets = graph_.find(place, "offset"); !is_none(offsets)) part.offsets = sizes_of(offsets, fqn);
      const auto info = fields_of(pairs[index + 1], storage_info_, fqn);
      part.path = path_of(graph_.find(info, "relative_path"), fqn);
      part.offset_bytes = integer_of(graph_.find(info, "offset"), fqn);
      part.length_bytes = integer_of(graph_.find(info, "length"), fqn);
      if (part.offset_bytes < 0 || part.length_bytes < 0 ||
          part.offset_bytes > std::numeric_limits<int64_t>::max() - part.length_bytes) {
        fail(fqn, "has a place that no file has");
      }
      const Id transforms = graph_.find(info, "transform_descriptors");
      if (!is_none(transforms)) part.transforms = transforms_of(transforms, fqn);
      columns_.add_part(part);
    }
    columns_.index_parts();
  }

  uint32_t path_of(Id id, std::string_view fqn) {
    if (id == path_node_ && id != kAbsent) return path_;  // parts of a file stand together
    const std::string_view path = text_of(id, fqn);
    if (!is_text(path)) fail(fqn, "lies in a file whose name is no text");
    if (leads_outside(path)) fail(fqn, concat("lies outside of the checkpoint: ", path));
    path_node_ = id;
    return path_ = columns_.names.add(path);
  }

  uint32_t transforms_of(Id list, std::string_view fqn) {
    if (!is(list, Kind::kList) && !is(list, Kind::kTuple)) refuse(list, fqn, "a list of texts");
    if (const auto known = transforms_of_.find(list); known != transforms_of_.end()) return known->second;
    std::vector<uint32_t> names;
    for (const Id name : graph_.members(list)) names.push_back(columns_.names.add(text_of(name, fqn)));
    return transforms_of_[list] = columns_.add_transforms(names);
  }

  const PickleGraph& graph_;
  MetadataColumns& columns_;
  Class metadata_{kMetadata, "Metadata"}, storage_meta_{kMetadata, "StorageMeta"},
      tensor_entry_{kMetadata, "TensorStorageMetadata"}, bytes_entry_{kMetadata, "BytesStorageMetadata"},
      properties_{kMetadata, "TensorProperties"}, old_properties_{kOldMetadata, "TensorProperties"},
      memory_format_{kMetadata, "_MEM_FORMAT_ENCODING"}, old_memory_format_{kOldMetadata, "MEM_FORMAT_ENCODING"},
      chunk_{kMetadata, "ChunkStorageMetadata"}, index_{kMetadata, "MetadataIndex"}, size_{"torch", "Size"},
      storage_info_{kFileSystem, "_StorageInfo"}, get_layout_{"torch.serialization", "_get_layout"},
      getattr_{"builtins", "getattr"}, dict_{"builtins", "dict"};
  std::unordered_map<Id, uint32_t> list_of_, transforms_of_;
  std::vector<Id> fields_, arguments_;  // of the object that is being read
  std::vector<int64_t> sizes_;
  Id path_node_ = kAbsent;
  uint32_t path_ = 0;
  int64_t num_unknown_properties_ = 0;
};

}  // namespace

PlainMetadata read_metadata(const PickleGraph& graph, MetadataColumns& columns) {
  return MetadataReader(graph, columns).read();
}

}  // namespace torchtitan_ext::core
