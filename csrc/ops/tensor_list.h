// A list of tensors as an argument of an op.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace torchtitan_ext::ops {

// Owns the handles. A vector of torch::stable::Tensor would cost one more allocation for each of them, and give them
// back one by one (python_lock.h).
class TensorList {
 public:
  // Takes the list over, also where it throws.
  explicit TensorList(StableListHandle list);
  ~TensorList();
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  TensorList& operator=(TensorList&&) = delete;

  bool empty() const { return handles_.empty(); }
  size_t size() const { return handles_.size(); }
  AtenTensorHandle operator[](size_t index) const { return handles_[index]; }

 private:
  TensorList() = default;

  std::vector<AtenTensorHandle> handles_;
};

}  // namespace torchtitan_ext::ops

// How TORCH_BOX makes one of an argument on the dispatcher's stack.
template <>
struct torch::stable::detail::ToImpl<torchtitan_ext::ops::TensorList> {
  static torchtitan_ext::ops::TensorList call(StableIValue value, uint64_t, bool) {
    return torchtitan_ext::ops::TensorList(to<StableListHandle>(value));
  }
};
