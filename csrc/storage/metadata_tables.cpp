#include "storage/metadata_tables.h"

#include <cstdint>
#include <vector>

namespace torchtitan_ext::storage {
namespace {

using core::MetadataColumns;
using core::SavedChunk;
using core::SavedKey;
using core::SavedPart;

constexpr uint8_t kTensorFlag = 1, kRequiresGradFlag = 2, kPinMemoryFlag = 4;

uint32_t number_below(size_t end, const char* what, ByteReader& reader) {
  const auto number = reader.number<uint32_t>();
  if (number >= end) throw_format_error(reader.where(), reader.byte(), "got ", what, " ", number, " of ", end);
  return number;
}

void parse_sizes(ByteReader& reader, MetadataColumns& columns) {
  const uint64_t count = reader.count(reader.number<uint64_t>(), 1);
  std::vector<int64_t> sizes;
  for (uint64_t number = 0; number < count; ++number) {
    sizes.resize(reader.number<uint8_t>());
    if (sizes.size() > core::kMaxDims) throw_format_error(reader.where(), reader.byte(), "has ", sizes.size(), " dims");
    for (int64_t& size : sizes) {
      size = reader.number<int64_t>();
      if (size < 0) throw_format_error(reader.where(), reader.byte(), "has the offset or size ", size);
    }
    if (!core::can_be_sizes(sizes)) {
      throw_format_error(reader.where(), reader.byte(), "has offsets or sizes that no tensor can have");
    }
    if (columns.sizes.add(sizes) != number) throw_format_error(reader.where(), reader.byte(), "has equal sizes twice");
  }
}

void parse_chunk_lists(ByteReader& reader, MetadataColumns& columns) {
  const uint64_t count = reader.count(reader.number<uint64_t>(), sizeof(uint64_t));
  for (uint64_t number = 0; number < count; ++number) {
    std::vector<SavedChunk> chunks(reader.count(reader.number<uint64_t>(), 2 * sizeof(uint32_t)));
    for (SavedChunk& chunk : chunks) {
      chunk.offsets = number_below(columns.sizes.size(), "offsets", reader);
      chunk.sizes = number_below(columns.sizes.size(), "sizes", reader);
      const size_t num_dims = columns.sizes[chunks[0].sizes].size();
      if (columns.sizes[chunk.offsets].size() != num_dims || columns.sizes[chunk.sizes].size() != num_dims) {
        throw_format_error(reader.where(), reader.byte(), "has chunks of several numbers of dims");
      }
    }
    if (columns.add_chunk_list(chunks) != number) {
      throw_format_error(reader.where(), reader.byte(), "has equal chunk lists twice");
    }
  }
}

void parse_tensor(ByteReader& reader, const MetadataColumns& columns, uint8_t flags, SavedKey& key) {
  key.is_tensor = true;
  key.requires_grad = (flags & kRequiresGradFlag) != 0;
  key.pin_memory = (flags & kPinMemoryFlag) != 0;
  key.sizes = number_below(columns.sizes.size(), "sizes", reader);
  key.dtype = number_below(columns.names.size(), "name", reader);
  key.layout = number_below(columns.names.size(), "name", reader);
  key.memory_format = reader.number<uint8_t>();
  key.chunk_list = number_below(columns.chunk_lists().size(), "chunk list", reader);
  const auto& chunks = columns.chunk_lists()[key.chunk_list];
  const bool is_known = core::is_dtype_name(columns.names[key.dtype]) &&
                        core::is_layout_name(columns.names[key.layout]) && key.memory_format < core::kNumMemoryFormats;
  const bool is_consistent = chunks.empty() || columns.sizes[chunks[0].sizes].size() == columns.sizes[key.sizes].size();
  if (!is_known || !is_consistent) {
    throw_format_error(reader.where(), reader.byte(), columns.names[key.fqn],
                       is_known ? " has chunks of other numbers of dims"
                                : " has an unknown dtype, layout or memory format; upgrade torchtitan_ext");
  }
}

}  // namespace

MetadataColumns parse_columns(ByteReader& reader) {
  MetadataColumns columns;
  const uint64_t num_names = reader.count(reader.number<uint64_t>(), sizeof(uint32_t));
  for (uint64_t number = 0; number < num_names; ++number) {
    if (columns.names.add(reader.text()) != number) {
      throw_format_error(reader.where(), reader.byte(), "has a name twice");
    }
  }
  parse_sizes(reader, columns);
  parse_chunk_lists(reader, columns);
  const uint64_t num_keys = reader.count(reader.number<uint64_t>(), sizeof(uint32_t) + 1);
  for (uint64_t number = 0; number < num_keys; ++number) {
    SavedKey key{.fqn = number_below(columns.names.size(), "name", reader)};
    const auto flags = reader.number<uint8_t>();
    if ((flags & kTensorFlag) != 0) parse_tensor(reader, columns, flags, key);
    columns.add_key(key);
  }
  return columns;
}

void add_records(const SavedFile& file, MetadataColumns& columns) {
  SavedPart part;
  part.path = columns.names.add(file.name);
  parse_records(file.records, file.footer_offset, file.name, [&](const SavedRecord& record) {
    part.fqn = columns.names.add(record.fqn);
    part.offsets = record.has_offsets ? columns.sizes.add(record.offsets) : SavedPart::kNone;
    part.index = record.index_hint < 0 ? SavedPart::kNoIndex : record.index_hint;
    part.offset_bytes = record.offset;
    part.length_bytes = record.num_bytes;
    columns.add_part(part);
  });
  columns.index_parts();
}

}  // namespace torchtitan_ext::storage
