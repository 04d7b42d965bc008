#include "storage/element_types.h"

#include <algorithm>
#include <limits>

#include "storage/errors.h"

namespace torchtitan_ext::storage {
namespace {

constexpr std::string_view kUntyped = "UntypedStorage";

// torch.save has a storage class for each of the older dtypes and writes the name of the younger ones.
const std::pair<std::string, ElementType> kElementTypes[] = {
    {"float64", {"DoubleStorage", "", 8}},
    {"float32", {"FloatStorage", "", 4}},
    {"float16", {"HalfStorage", "", 2}},
    {"bfloat16", {"BFloat16Storage", "", 2}},
    {"int64", {"LongStorage", "", 8}},
    {"int32", {"IntStorage", "", 4}},
    {"int16", {"ShortStorage", "", 2}},
    {"int8", {"CharStorage", "", 1}},
    {"uint8", {"ByteStorage", "", 1}},
    {"bool", {"BoolStorage", "", 1}},
    {"complex128", {"ComplexDoubleStorage", "", 16}},
    {"complex64", {"ComplexFloatStorage", "", 8}},
    {"uint16", {"UntypedStorage", "uint16", 2}},
    {"uint32", {"UntypedStorage", "uint32", 4}},
    {"uint64", {"UntypedStorage", "uint64", 8}},
    {"float8_e4m3fn", {"UntypedStorage", "float8_e4m3fn", 1}},
    {"float8_e4m3fnuz", {"UntypedStorage", "float8_e4m3fnuz", 1}},
    {"float8_e5m2", {"UntypedStorage", "float8_e5m2", 1}},
    {"float8_e5m2fnuz", {"UntypedStorage", "float8_e5m2fnuz", 1}},
    {"float8_e8m0fnu", {"UntypedStorage", "float8_e8m0fnu", 1}},
};

int64_t capped_add(int64_t left, int64_t right) {
  int64_t result = 0;
  return __builtin_add_overflow(left, right, &result) ? std::numeric_limits<int64_t>::max() : result;
}

}  // namespace

int64_t capped_mul(int64_t left, int64_t right) {
  int64_t result = 0;
  return __builtin_mul_overflow(left, right, &result) ? std::numeric_limits<int64_t>::max() : result;
}

std::span<const std::pair<std::string, ElementType>> element_types() { return kElementTypes; }

const ElementType* find_element_type(std::string_view dtype) {
  const auto found = std::ranges::find_if(kElementTypes, [&](const auto& one) { return one.first == dtype; });
  return found == std::end(kElementTypes) ? nullptr : &found->second;
}

std::string dtype_of(const std::string& storage_class, const std::string& dtype) {
  if (storage_class == kUntyped) return find_element_type(dtype) == nullptr ? "" : dtype;
  const auto found =
      std::ranges::find_if(kElementTypes, [&](const auto& one) { return one.second.storage_class == storage_class; });
  return found == std::end(kElementTypes) ? "" : found->first;
}

core::Sizes capped_strides(std::span<const int64_t> sizes) {
  core::Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride = capped_mul(stride, sizes[dim]);
  }
  return strides;
}

int64_t elements_needed(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t storage_offset) {
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  int64_t needed = capped_add(storage_offset, 1);
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    needed = capped_add(needed, capped_mul(sizes[dim] - 1, strides[dim]));
  }
  return needed;
}

std::optional<std::string> shape_defect(const PlainTensor& tensor, const std::string& dtype, const core::Sizes& sizes) {
  if (tensor.dtype == dtype && tensor.sizes == sizes) return std::nullopt;
  return core::concat("is ", tensor.dtype, " ", core::list_text(tensor.sizes), ", the metadata says ", dtype, " ",
                      core::list_text(sizes));
}

std::optional<PlainTensor> plain_tensor(const StoredTensor& tensor, const std::string& what) {
  std::string dtype = dtype_of(tensor.type.storage_class, tensor.type.dtype);
  if (dtype.empty()) return std::nullopt;
  const int64_t item_bytes = find_element_type(dtype)->item_bytes;
  const int64_t needed = capped_mul(elements_needed(tensor.sizes, tensor.strides, tensor.storage_offset), item_bytes);
  if (needed > tensor.data_bytes) {
    throw FormatError(core::concat(what, ": the tensor needs ", needed, " bytes, its storage has ", tensor.data_bytes));
  }
  const int64_t data_offset = capped_add(tensor.data_offset, capped_mul(tensor.storage_offset, item_bytes));
  return PlainTensor{std::move(dtype), tensor.sizes, tensor.strides, data_offset, item_bytes};
}

}  // namespace torchtitan_ext::storage
