#include "ops/tensor_list.h"

#include "ops/python_lock.h"

namespace torchtitan_ext::ops {

TensorList::TensorList(StableListHandle list) {
  size_t count = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
  handles_.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, index, &item));
    handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(item));
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
}

TensorList::~TensorList() {
  const PythonLock lock;
  for (const AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
}

}  // namespace torchtitan_ext::ops
