#include "core/position_blocks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/element_hash.h"

namespace torchtitan_ext::core {
namespace {

// Words of one element follow each other, as in a tensor of words.
template <typename Word>
uint64_t sum_words(const uint8_t* values, std::span<const int64_t> positions, size_t words_per_element) {
  uint64_t sum = 0;
  for (size_t index = 0; index < positions.size(); ++index) {
    for (size_t at = 0; at < words_per_element; ++at) {
      Word word;
      std::memcpy(&word, values + (index * words_per_element + at) * sizeof(Word), sizeof(Word));
      sum += hash_word(word, static_cast<uint64_t>(positions[index]) * words_per_element + at);
    }
  }
  return sum;
}

}  // namespace
PositionBlocks::PositionBlocks(std::vector<int32_t> blocks, std::vector<uint16_t> offsets)
    : blocks_(std::move(blocks)), offsets_(std::move(offsets)) {
  const char* const where = "PositionBlocks";
  TTE_CHECK(blocks_.size() % 2 == 0, where, "got ", blocks_.size(), " numbers, expected pairs");
  size_t next = 0;
  int64_t before = -1;
  for (size_t at = 0; at < blocks_.size(); at += 2) {
    const int64_t block = blocks_[at];
    const int64_t count = blocks_[at + 1];
    TTE_CHECK(block > before, where, "block ", block, " follows block ", before);
    before = block;
    const int64_t num_stored = count < 0 ? 1 : count;
    const int64_t num_positions = count < 0 ? -count : count;
    TTE_CHECK(num_positions > 0 && num_positions <= kBlock, where, "block ", block, " has ", num_positions,
              " positions");
    TTE_CHECK(num_stored <= static_cast<int64_t>(offsets_.size() - next), where, "offsets of block ", block,
              " are missing");
    const uint16_t* const own = offsets_.data() + next;
    TTE_CHECK(count > 0 || own[0] + num_positions <= kBlock, where, "positions leave block ", block);
    TTE_CHECK(std::adjacent_find(own, own + num_stored, std::greater_equal()) == own + num_stored, where,
              "positions of block ", block, " do not ascend");
    next += static_cast<size_t>(num_stored);
    size_ += num_positions;
  }
  TTE_CHECK(next == offsets_.size(), where, "got ", offsets_.size(), " offsets, expected ", next);
}

PositionBlocks PositionBlocks::encode(std::span<const int64_t> positions) {
  PositionBlocks coded;
  coded.offsets_.reserve(positions.size());
  coded.size_ = static_cast<int64_t>(positions.size());
  int64_t before = -1;
  for (size_t first = 0; first < positions.size();) {
    const int64_t block = positions[first] / kBlock;
    TTE_CHECK(positions[first] > before, "PositionBlocks", "position ", positions[first], " follows ", before);
    TTE_CHECK(block <= std::numeric_limits<int32_t>::max(), "PositionBlocks", "position ", positions[first],
              " is too large");
    size_t last = first + 1;
    for (; last < positions.size() && positions[last] < (block + 1) * kBlock; ++last) {
      TTE_CHECK(positions[last] > positions[last - 1], "PositionBlocks", "position ", positions[last], " follows ",
                positions[last - 1]);
    }
    const auto count = static_cast<int32_t>(last - first);
    before = positions[last - 1];
    const bool is_range = count > 1 && before - positions[first] + 1 == count;
    coded.blocks_.push_back(static_cast<int32_t>(block));
    coded.blocks_.push_back(is_range ? -count : count);
    const size_t end = is_range ? first + 1 : last;
    for (size_t at = first; at < end; ++at) {
      coded.offsets_.push_back(static_cast<uint16_t>(positions[at] - block * kBlock));
    }
    first = last;
  }
  return coded;
}

std::vector<int64_t> PositionBlocks::decode() const {
  std::vector<int64_t> positions(static_cast<size_t>(size_));
  decode(positions);
  return positions;
}

void PositionBlocks::decode(std::span<int64_t> positions) const {
  TTE_CHECK(static_cast<int64_t>(positions.size()) == size_, "PositionBlocks", "has ", size_, " positions, expected ",
            positions.size());
  const uint16_t* next = offsets_.data();
  auto to = positions.begin();
  for (size_t at = 0; at < blocks_.size(); at += 2) {
    const int64_t base = blocks_[at] * kBlock;
    const int64_t count = blocks_[at + 1];
    if (count > 0) {
      for (int64_t index = 0; index < count; ++index) *to++ = base + *next++;
    } else {
      const int64_t first = base + *next++;
      for (int64_t index = 0; index < -count; ++index) *to++ = first + index;
    }
  }
}

Selection select_positions(std::span<const int64_t> positions, std::span<const int64_t> tensor_sizes,
                           std::span<const int64_t> offsets, std::span<const int64_t> sizes) {
  const char* const where = "select_positions";
  const size_t num_dims = tensor_sizes.size();
  TTE_CHECK(offsets.size() == num_dims && sizes.size() == num_dims, where, "got a box of ", offsets.size(),
            " dims in a tensor of ", num_dims);
  Selection selection;
  int64_t first = 0;
  int64_t last = 0;
  for (size_t dim = 0; dim < num_dims; ++dim) {
    TTE_CHECK(offsets[dim] >= 0 && sizes[dim] >= 0 && offsets[dim] <= tensor_sizes[dim] - sizes[dim], where, "the box ",
              list_text(offsets), " ", list_text(sizes), " leaves the tensor ", list_text(tensor_sizes));
    if (sizes[dim] == 0) return selection;
    first = first * tensor_sizes[dim] + offsets[dim];
    last = last * tensor_sizes[dim] + offsets[dim] + sizes[dim] - 1;
  }
  // Dims from `outer` on are whole, so the box has ranges of `inner` elements.
  size_t outer = num_dims;
  int64_t inner = 1;
  while (outer > 0 && sizes[outer - 1] == tensor_sizes[outer - 1]) inner *= tensor_sizes[--outer];
  const auto begin = std::ranges::lower_bound(positions, first);
  const auto end = std::ranges::upper_bound(positions, last);
  selection.in_box.reserve(static_cast<size_t>(end - begin));
  selection.indices.reserve(static_cast<size_t>(end - begin));
  // Positions ascend, so one row of the last of the outer dims is looked up for many of them.
  const int64_t row_size = outer == 0 ? inner : tensor_sizes[outer - 1] * inner;
  const int64_t row_begin = outer == 0 ? 0 : offsets[outer - 1] * inner;
  const int64_t row_end = outer == 0 ? inner : row_begin + sizes[outer - 1] * inner;
  int64_t row = -1;
  int64_t in_box_of_row = -1;  // where the row begins in the box, or -1 where it is outside
  for (auto found = begin; found < end; ++found) {
    if (row < 0 || *found >= (row + 1) * row_size) {
      row = *found / row_size;
      int64_t rest = row;
      int64_t stride = row_end - row_begin;
      in_box_of_row = 0;
      for (size_t dim = outer; dim-- > 1 && in_box_of_row >= 0;) {
        const int64_t at = rest % tensor_sizes[dim - 1] - offsets[dim - 1];
        in_box_of_row = at >= 0 && at < sizes[dim - 1] ? in_box_of_row + at * stride : -1;
        stride *= sizes[dim - 1];
        rest /= tensor_sizes[dim - 1];
      }
    }
    const int64_t at = *found - row * row_size;
    if (in_box_of_row < 0 || at < row_begin || at >= row_end) continue;
    selection.in_box.push_back(in_box_of_row + at - row_begin);
    selection.indices.push_back(found - positions.begin());
  }
  return selection;
}

uint64_t sum_at(std::span<const uint8_t> values, int64_t item_bytes, std::span<const int64_t> positions) {
  TTE_CHECK(values.size() == positions.size() * static_cast<size_t>(item_bytes), "sum_at", "got ", values.size(),
            " bytes for ", positions.size(), " elements of ", item_bytes);
  switch (item_bytes) {
    case 1:
      return sum_words<uint8_t>(values.data(), positions, 1);
    case 2:
      return sum_words<uint16_t>(values.data(), positions, 1);
    case 4:
      return sum_words<uint32_t>(values.data(), positions, 1);
    case 8:
      return sum_words<uint64_t>(values.data(), positions, 1);
    default:
      TTE_CHECK(item_bytes == 16, "sum_at", "elements of ", item_bytes, " bytes");
      return sum_words<uint64_t>(values.data(), positions, 2);
  }
}

}  // namespace torchtitan_ext::core
