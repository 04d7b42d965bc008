#include "core/metadata_summary.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr uint32_t kNone = HashedNumbers::kNone;

void add(const SavedPart& part, PartSum& sum) {
  ++sum.num_parts;
  sum.num_bytes = checked_add(sum.num_bytes, part.length_bytes);
  sum.end = std::max(sum.end, checked_add(part.offset_bytes, part.length_bytes));
}

Sizes to_sizes(std::span<const int64_t> numbers) { return {numbers.begin(), numbers.end()}; }

std::vector<Chunk> chunks_of(const MetadataColumns& columns, uint32_t list) {
  std::vector<Chunk> chunks;
  for (const SavedChunk& chunk : columns.chunk_lists()[list]) {
    chunks.push_back({to_sizes(columns.sizes[chunk.offsets]), to_sizes(columns.sizes[chunk.sizes]), {}});
  }
  return chunks;
}

// Where the chunks of a list end in each dim, and which one of them ends there.
struct ListEnd {
  Sizes end;
  std::vector<uint32_t> last;  // offsets of it

  ListEnd(const MetadataColumns& columns, uint32_t list, size_t num_dims) : end(num_dims, 0), last(num_dims, 0) {
    for (const SavedChunk& chunk : columns.chunk_lists()[list]) {
      const auto offsets = columns.sizes[chunk.offsets], sizes = columns.sizes[chunk.sizes];
      for (size_t dim = 0; dim < num_dims; ++dim) {
        if (offsets[dim] + sizes[dim] <= end[dim]) continue;
        end[dim] = offsets[dim] + sizes[dim];
        last[dim] = chunk.offsets;
      }
    }
  }
};

// What is wrong with a tensor of this shape, which is not the one at which the chunks end.
std::optional<CoverDefect> defect_at_end(const MetadataColumns& columns, const ListEnd& list,
                                         std::span<const int64_t> shape) {
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (list.end[dim] > shape[dim]) {
      return CoverDefect{CoverDefect::Kind::kOutOfBounds, to_sizes(columns.sizes[list.last[dim]]), {}};
    }
  }
  if (std::ranges::find(shape, 0) != shape.end()) return std::nullopt;
  Sizes last_element = to_sizes(shape);
  for (int64_t& index : last_element) --index;
  return CoverDefect{CoverDefect::Kind::kGap, std::move(last_element), {}};
}

std::vector<uint32_t> keys_by_name(const MetadataColumns& columns) {
  std::vector<uint32_t> key_of(columns.names.size(), kNone);
  for (size_t key = 0; key < columns.keys().size(); ++key) key_of[columns.keys()[key].fqn] = static_cast<uint32_t>(key);
  return key_of;
}

}  // namespace

std::vector<PartSum> sum_parts_by_key(const MetadataColumns& columns) {
  const std::vector<uint32_t> key_of = keys_by_name(columns);
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
  // Thousands of keys may share a list that says the same offsets again and again, with one part for all of them: each
  // list is gone through once, and then for keys that have fewer parts than it has offsets.
  const std::vector<uint32_t> value_offsets = {SavedPart::kNone};
  std::vector<std::vector<uint32_t>> offsets_of_list;
  for (const auto& chunks : columns.chunk_lists()) {
    std::vector<uint32_t>& offsets = offsets_of_list.emplace_back();
    for (const SavedChunk& chunk : chunks) offsets.push_back(chunk.offsets);
    std::ranges::sort(offsets);
    offsets.erase(std::ranges::unique(offsets).begin(), offsets.end());
  }
  const auto offsets_of = [&](const SavedKey& key) -> const std::vector<uint32_t>& {
    return key.is_tensor ? offsets_of_list[key.chunk_list] : value_offsets;
  };
  const std::vector<uint32_t> key_of = keys_by_name(columns);
  std::vector<size_t> num_placed(columns.keys().size());
  for (const SavedPart& part : columns.parts()) {
    const uint32_t key = key_of[part.fqn];
    if (key != kNone && std::ranges::binary_search(offsets_of(columns.keys()[key]), part.offsets)) ++num_placed[key];
  }
  std::vector<UnplacedChunk> found;
  for (size_t key = 0; key < columns.keys().size(); ++key) {
    const SavedKey& saved = columns.keys()[key];
    if (num_placed[key] == offsets_of(saved).size()) continue;
    for (const uint32_t offsets : offsets_of(saved)) {
      if (found.size() == limit) return found;
      if (columns.find_part(saved.fqn, offsets) == kNone) found.push_back({key, offsets});
    }
  }
  return found;
}

std::vector<UncoveredKey> find_uncovered(const MetadataColumns& columns) {
  constexpr size_t kMostShapes = 8;  // of a list that are looked at element by element
  std::map<std::pair<uint32_t, uint32_t>, std::optional<CoverDefect>> known;  // by list and sizes
  std::map<uint32_t, size_t> num_shapes;                                      // of each list
  std::map<uint32_t, ListEnd> ends;
  const auto defect_of = [&](uint32_t list, std::span<const int64_t> shape) -> std::optional<CoverDefect> {
    if (++num_shapes[list] > kMostShapes) {
      const auto& at = ends.try_emplace(list, columns, list, shape.size()).first->second;
      if (!std::ranges::equal(at.end, shape)) return defect_at_end(columns, at, shape);
    }
    std::optional<CoverDefect> defect = find_cover_defect(shape, chunks_of(columns, list));
    if (defect) defect->chunks.clear();  // as many as there are, and nobody asks for them
    return defect;
  };
  std::vector<UncoveredKey> found;
  for (size_t key = 0; key < columns.keys().size(); ++key) {
    const SavedKey& saved = columns.keys()[key];
    if (!saved.is_tensor) continue;
    const auto [at, is_new] = known.try_emplace({saved.chunk_list, saved.sizes});
    if (is_new) at->second = defect_of(saved.chunk_list, columns.sizes[saved.sizes]);
    if (at->second) found.push_back({key, *at->second});
  }
  return found;
}

const std::vector<uint32_t>& SavedParts::of_file(std::string_view path) {
  static const std::vector<uint32_t> kNoParts;
  if (!is_grouped_) {
    of_path_.resize(columns_.names.size());
    for (size_t number = 0; number < columns_.parts().size(); ++number) {
      of_path_[columns_.parts()[number].path].push_back(static_cast<uint32_t>(number));
    }
    is_grouped_ = true;
  }
  const std::optional<uint32_t> name = columns_.names.find(path);
  return name && *name < of_path_.size() ? of_path_[*name] : kNoParts;
}

uint32_t SavedParts::sizes_of_chunk(const SavedKey& tensor, uint32_t offsets) {
  const auto [list, is_new] = of_lists_.try_emplace(tensor.chunk_list);
  if (is_new) {
    for (const SavedChunk& chunk : columns_.chunk_lists()[tensor.chunk_list]) {
      list->second.insert_or_assign(chunk.offsets, chunk.sizes);
    }
  }
  const auto found = list->second.find(offsets);
  return found == list->second.end() ? SavedPart::kNone : found->second;
}

}  // namespace torchtitan_ext::core
