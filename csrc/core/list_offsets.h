// Where the changes of each tensor lie in the lists of all: positions and new values of its elements, tensor after tensor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torchtitan_ext::core {

// The values of a tensor begin at multiples of the largest element's size, so that they can be viewed as its dtype.
constexpr int64_t kValuesAlignment = 16;

// Per tensor where its part begins, and at the end the size of all.
struct ListOffsets {
  std::vector<int64_t> elements;
  std::vector<int64_t> value_bytes;
};

// Throws std::invalid_argument for negative counts, and std::overflow_error.
// Args:
//   item_bytes, counts: of each tensor, of an element and of listed elements;
//   where: who asks, for errors.
ListOffsets list_offsets(std::span<const int64_t> item_bytes, std::span<const int64_t> counts, const char* where);

}  // namespace torchtitan_ext::core
