#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "core/check.h"
#include "core/metadata_pickle.h"

namespace torchtitan_ext::core {
namespace {

constexpr uint32_t kUnwritten = UINT32_MAX;
// As CPython's own pickler: a reader's stack stays small.
constexpr size_t kBatchMembers = 1000;

enum Name {
  kMetadata,
  kTensorStorageMetadata,
  kBytesStorageMetadata,
  kTensorProperties,
  kMemoryFormat,
  kChunkStorageMetadata,
  kMetadataIndex,
  kStorageMeta,
  kSize,
  kGetLayout,
  kStorageInfo,
  kNumClasses
};

struct ClassName {
  std::string_view module, name;
};

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr std::array<ClassName, kNumClasses> kClasses = {{
    {kMetadataModule, "Metadata"},
    {kMetadataModule, "TensorStorageMetadata"},
    {kMetadataModule, "BytesStorageMetadata"},
    {kMetadataModule, "TensorProperties"},
    {kMetadataModule, "_MEM_FORMAT_ENCODING"},
    {kMetadataModule, "ChunkStorageMetadata"},
    {kMetadataModule, "MetadataIndex"},
    {kMetadataModule, "StorageMeta"},
    {"torch", "Size"},
    {"torch.serialization", "_get_layout"},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
}};

enum Attribute {
  kProperties,
  kSizeOf,
  kChunks,
  kOffsets,
  kSizes,
  kFqn,
  kIndex,
  kOffset,
  kRelativePath,
  kLength,
  kTransforms,
  kNumAttributes
};

constexpr std::array<std::string_view, kNumAttributes> kAttributes = {
    "properties",           "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length",
    "transform_descriptors"};

class MetadataWriter {
 public:
  explicit MetadataWriter(const MetadataColumns& columns)
      : columns_(columns),
        names_(columns.names.size(), kUnwritten),
        sizes_(columns.sizes.size(), kUnwritten),
        chunk_lists_(columns.chunk_lists().size(), kUnwritten) {
    classes_.fill(kUnwritten);
    attributes_.fill(kUnwritten);
  }

  std::string write(const PlainWriters& plain) {
    begin_object(kMetadata);
    out_.text("state_dict_metadata");
    write_dict(columns_.keys().size(), [this](size_t at) { write_key(columns_.keys()[at]); });
    out_.text("planner_data");
    plain.planner_data(out_);
    out_.text("storage_data");
    write_dict(columns_.parts().size(), [this](size_t at) { write_part(columns_.parts()[at]); });
    out_.text("storage_meta");
    begin_object(kStorageMeta);
    plain.storage_meta(out_);
    end_object();
    out_.text("version");
    out_.text(plain.version);
    end_object();
    return out_.take();
  }

 private:
  // ---- what stands in the stream many times ----
  void write_class(Name name) {
    if (classes_[name] != kUnwritten) return out_.get(classes_[name]);
    classes_[name] = write_global(kClasses[name]);
  }

  uint32_t write_global(ClassName name) {
    out_.shared_text(name.module, true);
    out_.shared_text(name.name, false);
    out_.op(PickleOp::kStackGlobal);
    return out_.put(true);
  }

  void write_attribute(Attribute attribute) {
    if (attributes_[attribute] != kUnwritten) return out_.get(attributes_[attribute]);
    attributes_[attribute] = out_.shared_text(kAttributes[attribute], true);
  }

  void write_name(uint32_t number) {
    if (names_[number] != kUnwritten) return out_.get(names_[number]);
    names_[number] = out_.shared_text(columns_.names[number], false);
  }

  // torch.Size((2, 3))
  void write_sizes(uint32_t number) {
    if (sizes_[number] != kUnwritten) return out_.get(sizes_[number]);
    write_class(kSize);
    const auto sizes = columns_.sizes[number];
    out_.begin(PlainKind::kTuple, sizes.size());
    for (const int64_t size : sizes) out_.integer(size);
    out_.end(PlainKind::kTuple, sizes.size());
    out_.op(PickleOp::kTuple1);
    out_.op(PickleOp::kReduce);
    sizes_[number] = out_.put(false);
  }

  // ---- objects ----
  void begin_object(Name name) {
    write_class(name);
    out_.op(PickleOp::kEmptyTuple);
    out_.op(PickleOp::kNewObject);
    out_.op(PickleOp::kEmptyDict);
    out_.op(PickleOp::kMark);
  }

  void end_object() {
    out_.op(PickleOp::kSetItems);
    out_.op(PickleOp::kBuild);
  }

  template <typename WriteMember>
  void write_in_batches(size_t num_members, PickleOp end_of_batch, const WriteMember& write_member) {
    for (size_t begin = 0; begin < num_members; begin += kBatchMembers) {
      out_.op(PickleOp::kMark);
      for (size_t at = begin; at < std::min(begin + kBatchMembers, num_members); ++at) {
        write_member(at);
        out_.end_large_frame();
      }
      out_.op(end_of_batch);
    }
  }

  template <typename WriteMember>
  void write_dict(size_t num_members, const WriteMember& write_member) {
    out_.op(PickleOp::kEmptyDict);
    write_in_batches(num_members, PickleOp::kSetItems, write_member);
  }

  void write_key(const SavedKey& key) {
    write_name(key.fqn);
    if (!key.is_tensor) {
      write_class(kBytesStorageMetadata);
      out_.op(PickleOp::kEmptyTuple);
      out_.op(PickleOp::kNewObject);
      return;
    }
    begin_object(kTensorStorageMetadata);
    write_attribute(kProperties);
    write_properties(key);
    write_attribute(kSizeOf);
    write_sizes(key.sizes);
    write_attribute(kChunks);
    write_chunk_list(key.chunk_list);
    end_object();
  }

  void write_properties(const SavedKey& key) {
    const auto [known, is_new] =
        properties_.try_emplace({key.dtype, key.layout, key.memory_format, key.requires_grad, key.pin_memory}, 0);
    if (!is_new) return out_.get(known->second);
    write_class(kTensorProperties);
    out_.op(PickleOp::kEmptyTuple);
    out_.op(PickleOp::kNewObject);
    out_.op(PickleOp::kMark);
    write_dtype(key.dtype);
    write_class(kGetLayout);
    write_name(key.layout);
    out_.op(PickleOp::kTuple1);
    out_.op(PickleOp::kReduce);
    out_.boolean(key.requires_grad);
    write_class(kMemoryFormat);
    out_.integer(key.memory_format);
    out_.op(PickleOp::kTuple1);
    out_.op(PickleOp::kReduce);
    out_.boolean(key.pin_memory);
    out_.op(PickleOp::kTuple);
    out_.op(PickleOp::kBuild);
    known->second = out_.put(false);
  }

  void write_dtype(uint32_t name) {
    const auto [known, is_new] = dtypes_.try_emplace(name, 0);
    if (!is_new) return out_.get(known->second);
    known->second = write_global({"torch", columns_.names[name]});
  }

  void write_chunk_list(uint32_t number) {
    if (chunk_lists_[number] != kUnwritten) return out_.get(chunk_lists_[number]);
    out_.op(PickleOp::kEmptyList);
    chunk_lists_[number] = out_.put(false);
    const std::vector<SavedChunk>& chunks = columns_.chunk_lists()[number];
    write_in_batches(chunks.size(), PickleOp::kAppends, [&](size_t at) {
      const SavedChunk& chunk = chunks[at];
      begin_object(kChunkStorageMetadata);
      write_attribute(kOffsets);
      write_sizes(chunk.offsets);
      write_attribute(kSizes);
      write_sizes(chunk.sizes);
      end_object();
    });
  }

  void write_part(const SavedPart& part) {
    begin_object(kMetadataIndex);
    write_attribute(kFqn);
    write_name(part.fqn);
    write_attribute(kIndex);
    if (part.index == SavedPart::kNoIndex) {
      out_.none();
    } else {
      out_.integer(part.index);
    }
    if (part.offsets != SavedPart::kNone) {
      write_attribute(kOffset);
      write_sizes(part.offsets);
    }
    end_object();
    begin_object(kStorageInfo);
    write_attribute(kRelativePath);
    write_name(part.path);
    write_attribute(kOffset);
    out_.integer(part.offset_bytes);
    write_attribute(kLength);
    out_.integer(part.length_bytes);
    if (part.transforms != SavedPart::kNone) write_transforms(columns_.transforms()[part.transforms]);
    end_object();
  }

  void write_transforms(const std::vector<uint32_t>& names) {
    write_attribute(kTransforms);
    out_.begin(PlainKind::kList, names.size());
    for (const uint32_t name : names) write_name(name);
    out_.end(PlainKind::kList, names.size());
  }

  const MetadataColumns& columns_;
  PickleWriter out_;
  // Their numbers in the memo.
  std::array<uint32_t, kNumClasses> classes_{};
  std::array<uint32_t, kNumAttributes> attributes_{};
  std::vector<uint32_t> names_, sizes_, chunk_lists_;
  std::map<std::tuple<uint32_t, uint32_t, int64_t, bool, bool>, uint32_t> properties_;
  std::map<uint32_t, uint32_t> dtypes_;
};

}  // namespace

void write_path(PickleWriter& out, std::string_view path) {
  // As Python up to 3.12 calls the class; later ones find it there too.
  out.shared_text("pathlib", false);
  out.shared_text("PosixPath", false);
  out.op(PickleOp::kStackGlobal);
  out.text(path);
  out.op(PickleOp::kTuple1);
  out.op(PickleOp::kReduce);
}

std::string write_metadata(const MetadataColumns& columns, const PlainWriters& plain) {
  return MetadataWriter(columns).write(plain);
}

}  // namespace torchtitan_ext::core
