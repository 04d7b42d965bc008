#include "core/chunk.h"

#include "core/check.h"

namespace torchtitan_ext::core {

int64_t num_elements(std::span<const int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product = checked_mul(product, size);
  return product;
}

std::string list_text(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t dim = 0; dim < sizes.size(); ++dim) text += concat(dim > 0 ? ", " : "", sizes[dim]);
  return text + "]";
}

}  // namespace torchtitan_ext::core
