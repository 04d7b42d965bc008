// Against a shim of torch's that counts what it hands out, since in torch itself no item of a list of tensors fails.
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "ops/tensor_list.h"

namespace {

struct Shim {
  size_t num_items = 0;
  size_t failing_item = SIZE_MAX;
  std::set<uintptr_t> handles;
  int num_lists = 0;
} shim;

}  // namespace

extern "C" {

uint64_t aoti_torch_abi_version() { return TORCH_TARGET_VERSION; }

AOTITorchError torch_list_size(StableListHandle, size_t* size) {
  *size = shim.num_items;
  return 0;
}

AOTITorchError torch_list_get_item(StableListHandle, size_t index, StableIValue* item) {
  if (index == shim.failing_item) return 1;
  shim.handles.insert(index + 1);
  *item = static_cast<StableIValue>(index + 1);
  return 0;
}

AOTITorchError torch_delete_list(StableListHandle) {
  shim.num_lists -= 1;
  return 0;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  shim.handles.erase(reinterpret_cast<uintptr_t>(handle));
  return 0;
}

}  // extern "C"

namespace torchtitan_ext::ops {
namespace {

StableListHandle new_list(size_t num_items, size_t failing_item) {
  shim = {num_items, failing_item, {}, 1};
  return reinterpret_cast<StableListHandle>(&shim);
}

TEST(TensorList, GivesEveryHandleBackOnce) {
  {
    TensorList list(new_list(3, SIZE_MAX));
    const TensorList moved(std::move(list));
    EXPECT_EQ(moved.size(), 3u);
    EXPECT_EQ(shim.handles.size(), 3u);
    EXPECT_EQ(shim.num_lists, 0);
  }
  EXPECT_TRUE(shim.handles.empty());
}

TEST(TensorList, GivesBackWhatItHasWhereAnItemFails) {
  EXPECT_THROW(TensorList(new_list(3, 2)), std::runtime_error);
  EXPECT_TRUE(shim.handles.empty());
  EXPECT_EQ(shim.num_lists, 0);
}

}  // namespace
}  // namespace torchtitan_ext::ops
