// From marked and listed elements to the tables of change_tiles.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/change_lists.h"
#include "ops/change_marks.h"
#include "ops/change_tiles.h"

namespace torchtitan_ext::ops {

template <typename Entry>
struct ChangeEntries {
  std::vector<Entry> entries;
  std::vector<int64_t> numbers;
  int64_t num_tiles = 0;

  // `entry` has this many items of which a tile has `tile_items`; without items it is left out.
  void add(Entry entry, int64_t num_items, int64_t tile_items) {
    if (num_items == 0) return;
    entry.first_tile = num_tiles;
    num_tiles += (num_items + tile_items - 1) / tile_items;
    entries.push_back(entry);
  }
};

inline ChangeEntries<MarkEntry> make_mark_entries(std::span<const MarkedPair> pairs) {
  ChangeEntries<MarkEntry> made;
  for (size_t index = 0; index < pairs.size(); ++index) {
    const MarkedPair& pair = pairs[index];
    if (pair.num_elements == 0) continue;
    MarkEntry entry;
    entry.tensor = static_cast<int64_t>(index);
    entry.left = pair.left.address;
    entry.right = pair.right.address;
    entry.num_elements = pair.num_elements;
    entry.first_word = pair.first_word;
    entry.item_bytes = pair.left.item_bytes;
    if (pair.left_contiguous && pair.right_contiguous) {
      entry.is_aligned = (entry.left | entry.right) % 16 == 0;
    } else {
      const auto bytes_of = [](const core::Memory& memory) {
        std::vector<int64_t> strides(memory.strides.begin(), memory.strides.end());
        for (int64_t& stride : strides) stride *= memory.item_bytes;
        return strides;
      };
      std::vector<int64_t> keys(pair.left.sizes.size());
      int64_t stride = 1;
      for (size_t dim = keys.size(); dim-- > 0; stride *= pair.left.sizes[dim]) keys[dim] = stride;
      entry.box = static_cast<int64_t>(made.numbers.size());
      core::BoxWalk<2>(pair.left.sizes, 0, keys,
                       {static_cast<int64_t>(pair.left.address), static_cast<int64_t>(pair.right.address)},
                       {bytes_of(pair.left), bytes_of(pair.right)})
          .append_numbers(made.numbers);
    }
    made.add(entry, pair.num_words() * 8, kMaskTileBytes);
  }
  return made;
}

inline ChangeEntries<ListEntry> make_list_entries(std::span<const MarkedElements> tensors) {
  ChangeEntries<ListEntry> made;
  for (const MarkedElements& tensor : tensors) {
    ListEntry entry;
    entry.mask = reinterpret_cast<uint64_t>(tensor.mask);
    entry.positions = reinterpret_cast<uint64_t>(tensor.positions);
    entry.values = reinterpret_cast<uint64_t>(tensor.values);
    entry.old_sum = reinterpret_cast<uint64_t>(tensor.old_sum);
    entry.new_sum = reinterpret_cast<uint64_t>(tensor.new_sum);
    entry.num_elements = tensor.num_elements;
    entry.count = tensor.count;
    entry.item_bytes = tensor.item_bytes;
    entry.first_box = static_cast<int64_t>(made.numbers.size());
    entry.num_boxes = static_cast<int64_t>(tensor.chunks.size());
    for (const core::BoxWalk<3>& chunk : tensor.chunks) chunk.append_numbers(made.numbers);
    made.add(entry, tensor.num_words(), kMaskTileWords);
  }
  return made;
}

inline ChangeEntries<ListedEntry> make_listed_entries(std::span<const ListedElements> tensors) {
  ChangeEntries<ListedEntry> made;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const ListedElements& tensor = tensors[index];
    if (tensor.count == 0) continue;
    ListedEntry entry;
    entry.tensor = static_cast<int64_t>(index);
    entry.positions = reinterpret_cast<uint64_t>(tensor.positions);
    entry.values = reinterpret_cast<uint64_t>(tensor.values);
    entry.count = tensor.count;
    entry.item_bytes = tensor.item_bytes;
    entry.first_box = static_cast<int64_t>(made.numbers.size());
    entry.num_boxes = static_cast<int64_t>(tensor.chunks.size());
    for (const core::BoxWalk<1>& chunk : tensor.chunks) chunk.append_numbers(made.numbers);
    made.add(entry, tensor.count, kListTileElements);
  }
  return made;
}

}  // namespace torchtitan_ext::ops
