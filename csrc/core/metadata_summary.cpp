#include "core/metadata_summary.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr uint32_t kNone = HashedNumbers::kNone;

void add(const SavedPart& part, PartSum& sum) {
  ++sum.num_parts;
  sum.num_bytes = checked_add(sum.num_bytes, part.length_bytes);
  sum.end = std::max(sum.end, checked_add(part.offset_bytes, part.length_bytes));
}

}  // namespace

std::vector<PartSum> sum_parts_by_key(const MetadataColumns& columns) {
  std::vector<uint32_t> key_of(columns.names.size(), kNone);
  for (size_t key = 0; key < columns.keys().size(); ++key) key_of[columns.keys()[key].fqn] = static_cast<uint32_t>(key);
  std::vector<PartSum> sums(columns.keys().size());
  for (const SavedPart& part : columns.parts()) {
    if (key_of[part.fqn] != kNone) add(part, sums[key_of[part.fqn]]);
  }
  return sums;
}

std::vector<FileSum> sum_parts_by_file(const MetadataColumns& columns) {
  std::vector<uint32_t> file_of(columns.names.size(), kNone);
  std::vector<FileSum> files;
  for (const SavedPart& part : columns.parts()) {
    uint32_t& file = file_of[part.path];
    if (file == kNone) {
      file = static_cast<uint32_t>(files.size());
      files.push_back({.path = part.path, .sum = {}});
    }
    add(part, files[file].sum);
  }
  return files;
}

std::vector<UnplacedChunk> find_unplaced(const MetadataColumns& columns, size_t limit) {
  std::vector<UnplacedChunk> found;
  const auto look = [&](size_t key, uint32_t offsets) {
    if (columns.find_part(columns.keys()[key].fqn, offsets) == kNone) found.push_back({key, offsets});
  };
  for (size_t key = 0; key < columns.keys().size() && found.size() < limit; ++key) {
    const SavedKey& saved = columns.keys()[key];
    if (!saved.is_tensor) {
      look(key, SavedPart::kNone);
      continue;
    }
    for (const SavedChunk& chunk : columns.chunk_lists()[saved.chunk_list]) {
      if (found.size() < limit) look(key, chunk.offsets);
    }
  }
  return found;
}

}  // namespace torchtitan_ext::core
