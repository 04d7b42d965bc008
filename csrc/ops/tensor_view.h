// What the ops need to know of a tensor, read once and checked: its memory as plain numbers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/runs.h"
#include "ops/copy_runs.h"
#include "ops/tensor_list.h"

namespace torchtitan_ext::ops {

using torch::stable::Tensor;

enum class Access { kRead, kWrite };

// Who is checked, for messages: "flatten_into_: tensors[3] ...". Made into text only when something is wrong.
struct Subject {
  std::string_view op;
  std::string_view name;
  int64_t position = -1;

  std::string text() const;
};

// `address` is that of the first element, 0 where there is none. All elements lie inside the tensor's storage. Sizes
// and strides, in elements, are the tensor's own: a view must not outlive its tensor.
struct TensorView {
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  uintptr_t address = 0;
  int64_t num_elements = 0;
  int64_t item_bytes = 0;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  bool contiguous = false;

  int64_t num_bytes() const { return num_elements * item_bytes; }
  core::BoxSide side() const { return {static_cast<int64_t>(address), strides}; }
  core::Memory memory() const { return {address, sizes, strides, item_bytes}; }
};

// What a getter of torch's C interface tells of a tensor.
template <typename Value>
Value read(AOTITorchError (*getter)(AtenTensorHandle, Value*), AtenTensorHandle tensor) {
  Value value{};
  TORCH_ERROR_CODE_CHECK(getter(tensor, &value));
  return value;
}

// Reads a tensor. Throws std::invalid_argument for one that is not strided, is quantized, is neither on a CPU nor on a
// CUDA device, or whose storage was freed or shrunk below what it spans (FSDP2 and resize_ do that), and, for
// Access::kWrite, one whose elements may share memory (an expanded tensor).
TensorView view_of(AtenTensorHandle tensor, Access access, const Subject& subject);

// Those of a list on one device, which has at least one. `name` is that of the argument.
std::vector<TensorView> views_of(const TensorList& tensors, Access access, const char* op, const char* name);

// A new contiguous tensor on the device of `like`.
Tensor empty_on(const TensorView& like, std::span<const int64_t> sizes, int32_t dtype);

// Throw std::invalid_argument unless both have the same dtype, the same device.
void check_same_dtype(const TensorView& left, const TensorView& right, const Subject& left_is, const Subject& right_is);
void check_same_device(const TensorView& left, const TensorView& right, const Subject& left_is,
                       const Subject& right_is);

// Throw std::invalid_argument where two of the tensors that are written share memory, or one of them and one that is
// read.
void check_separate(std::span<const TensorView> written, std::string_view op, std::string_view name);
void check_separate(std::span<const TensorView> written, std::span<const TensorView> read, std::string_view op);

// torch's own, in the form that the CPU kernels take.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context);

// Copies on the device of `on`. Offsets of the runs are addresses.
void copy_runs_on(const TensorView& on, const core::RunList& runs);

}  // namespace torchtitan_ext::ops
