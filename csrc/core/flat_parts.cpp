#include "core/flat_parts.h"

#include <algorithm>
#include <stdexcept>

#include "core/check.h"

namespace torchtitan_ext::core {

std::string why_no_part(const FlatPart& part, int64_t buffer_bytes) {
  if (part.offset < 0 || part.num_bytes < 0 || part.item_bytes < 1) return "a negative number stands for bytes";
  const auto negative = std::ranges::find_if(part.sizes, [](int64_t size) { return size < 0; });
  if (negative != part.sizes.end()) return concat("it has a dim of ", *negative, " elements");
  int64_t num_bytes = part.item_bytes;
  try {
    // Sizes beside a 0 are multiplied too: torch does so.
    for (const int64_t size : part.sizes) num_bytes = checked_mul(num_bytes, std::max<int64_t>(size, 1));
  } catch (const std::overflow_error&) {
    return "it has more elements than can be counted";
  }
  if (std::ranges::find(part.sizes, 0) != part.sizes.end()) num_bytes = 0;
  if (num_bytes != part.num_bytes) {
    return concat("its elements are ", num_bytes, " bytes, and ", part.num_bytes, " are given");
  }
  if (part.num_bytes > buffer_bytes || part.offset > buffer_bytes - part.num_bytes) {
    return concat("it has ", part.num_bytes, " bytes from byte ", part.offset, ", the buffer has ", buffer_bytes);
  }
  return "";
}

}  // namespace torchtitan_ext::core
