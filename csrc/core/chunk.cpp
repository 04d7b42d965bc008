#include "core/chunk.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {

int64_t num_elements(std::span<const int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product = checked_mul(product, size);
  return product;
}

Sizes row_major_strides(std::span<const int64_t> sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = checked_mul(strides[dim], std::max<int64_t>(sizes[dim], 1));
  }
  return strides;
}

std::string list_text(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t dim = 0; dim < sizes.size(); ++dim) text += concat(dim > 0 ? ", " : "", sizes[dim]);
  return text + "]";
}

}  // namespace torchtitan_ext::core
