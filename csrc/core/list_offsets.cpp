#include "core/list_offsets.h"

#include "core/check.h"

namespace torchtitan_ext::core {

ListOffsets list_offsets(std::span<const int64_t> item_bytes, std::span<const int64_t> counts, const char* where) {
  TTE_CHECK(item_bytes.size() == counts.size(), where, "got ", counts.size(), " counts for ", item_bytes.size(),
            " tensors");
  ListOffsets offsets;
  int64_t element = 0, byte = 0;
  for (size_t index = 0; index < counts.size(); ++index) {
    TTE_CHECK(counts[index] >= 0, where, "counts[", index, "] is ", counts[index]);
    offsets.elements.push_back(element);
    offsets.value_bytes.push_back(checked_add(byte, -byte & (kValuesAlignment - 1)));
    element = checked_add(element, counts[index]);
    byte = checked_add(offsets.value_bytes.back(), checked_mul(counts[index], item_bytes[index]));
  }
  offsets.elements.push_back(element);
  offsets.value_bytes.push_back(byte);
  return offsets;
}

}  // namespace torchtitan_ext::core
