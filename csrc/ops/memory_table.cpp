#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "core/element_hash.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

// The hash of words in their order.
class Hash {
 public:
  void add(int64_t word) { value_ += core::hash_word(static_cast<uint64_t>(word), num_words_++); }
  void add(std::span<const int64_t> words) {
    for (const int64_t word : words) add(word);
  }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0, num_words_ = 0;
};

template <typename Value>
Value read(AOTITorchError (*getter)(AtenTensorHandle, Value*), AtenTensorHandle tensor) {
  Value value{};
  TORCH_ERROR_CODE_CHECK(getter(tensor, &value));
  return value;
}

int64_t form_of(AtenTensorHandle tensor) {
  const auto num_dims = static_cast<size_t>(read(aoti_torch_get_dim, tensor));
  Hash hash;
  hash.add(read(aoti_torch_get_dtype, tensor));
  hash.add(read(aoti_torch_get_device_type, tensor));
  hash.add(read(aoti_torch_get_device_index, tensor));
  hash.add({read(aoti_torch_get_sizes, tensor), num_dims});
  hash.add({read(aoti_torch_get_strides, tensor), num_dims});
  return hash.value();
}

}  // namespace

Tensor memory_table(const TensorList& tensors) {
  TensorView host;
  host.device_type = aoti_torch_device_type_cpu();
  const int64_t sizes[] = {static_cast<int64_t>(tensors.size()), 2};
  Tensor table = empty_on(host, sizes, aoti_torch_dtype_int64());
  auto* row = static_cast<int64_t*>(table.mutable_data_ptr());
  for (size_t index = 0; index < tensors.size(); ++index, row += 2) {
    row[0] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(read(torch_get_const_data_ptr, tensors[index])));
    row[1] = form_of(tensors[index]);
  }
  return table;
}

}  // namespace torchtitan_ext::ops
