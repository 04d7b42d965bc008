#include "core/element_hash.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

int64_t form_of(AtenTensorHandle tensor) {
  uint64_t hash = 0;
  const auto add = [&hash](int64_t word) { hash = core::extended_hash(hash, word); };
  add(read(aoti_torch_get_dtype, tensor));
  add(read(aoti_torch_get_device_type, tensor));
  add(read(aoti_torch_get_device_index, tensor));
  const int64_t num_dims = read(aoti_torch_get_dim, tensor);
  const int64_t* sizes = read(aoti_torch_get_sizes, tensor);
  const int64_t* strides = read(aoti_torch_get_strides, tensor);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    add(sizes[dim]);
    add(strides[dim]);
  }
  return static_cast<int64_t>(hash);
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
