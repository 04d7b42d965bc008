#include "ops/tensor_list.h"

#include <memory>
#include <type_traits>

#include "ops/python_lock.h"

namespace torchtitan_ext::ops {
namespace {

struct DeleteList {
  void operator()(StableListHandle list) const { torch_delete_list(list); }
};

}  // namespace

// Through the constructor of an empty list, so that the destructor gives back the handles there are when an item fails.
TensorList::TensorList(StableListHandle list) : TensorList() {
  const std::unique_ptr<std::remove_pointer_t<StableListHandle>, DeleteList> owner(list);
  size_t count = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
  handles_.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, index, &item));
    handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(item));
  }
}

TensorList::~TensorList() {
  if (PythonLock::is_ending()) return;  // they stay, as all else that the process has
  const PythonLock lock;
  for (const AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
}

}  // namespace torchtitan_ext::ops
