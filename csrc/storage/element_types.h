// The dtypes whose elements are plain memory, and tensors of them in a file.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/chunk.h"
#include "storage/tensor_record.h"

namespace torchtitan_ext::storage {

// By their names in torch, without the module.
std::span<const std::pair<std::string, ElementType>> element_types();

// None for a name that is not among them.
const ElementType* find_element_type(std::string_view dtype);

// The name of the dtype that a pickle means by a storage class and, where that is untyped, a dtype; empty where its
// elements are no plain memory.
std::string dtype_of(const std::string& storage_class, const std::string& dtype);

// The product of two numbers that are not negative; the largest number where it is more than an int64 counts.
int64_t capped_mul(int64_t left, int64_t right);

// core::row_major_strides of sizes that somebody else wrote: of products that are capped, not refused.
core::Sizes capped_strides(std::span<const int64_t> sizes);

// How many elements of its storage a tensor needs. An empty tensor needs none, and may begin behind the end. The largest
// number where there are more than an int64 counts.
int64_t elements_needed(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t storage_offset);

// A tensor whose elements lie in a file. Strides count elements; element 0 begins at byte `data_offset`.
struct PlainTensor {
  std::string dtype;
  core::Sizes sizes;
  core::Sizes strides;
  int64_t data_offset = 0;
  int64_t item_bytes = 0;
};

// How a tensor differs from the dtype and sizes in the metadata; nothing where it does not.
std::optional<std::string> shape_defect(const PlainTensor& tensor, const std::string& dtype, const core::Sizes& sizes);

// The tensor of a record; nothing where its elements are no plain memory. `what` names it in the FormatError that is
// thrown where its storage is too short.
std::optional<PlainTensor> plain_tensor(const StoredTensor& tensor, const std::string& what);

}  // namespace torchtitan_ext::storage
