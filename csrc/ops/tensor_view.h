// What the ops need to know of a tensor, read once and checked: its memory as plain numbers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string_view>

#include "core/runs.h"

namespace torchtitan_ext::ops {

using torch::stable::Tensor;

enum class Access { kRead, kWrite };

// `address` is that of the first element, 0 where there is none. All elements lie inside the tensor's storage.
struct TensorView {
  core::Sizes sizes;
  core::Sizes strides_bytes;
  uintptr_t address = 0;
  int64_t num_elements = 0;
  int64_t item_bytes = 0;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;

  int64_t num_bytes() const { return num_elements * item_bytes; }
};

// Reads `tensor`, called `name` in messages of the op `where`. Throws std::invalid_argument for a tensor that is not
// strided, whose storage was freed or shrunk below what the tensor spans (FSDP2 and resize_ do that), and, for
// Access::kWrite, whose elements may share memory (an expanded tensor).
TensorView view_of(const Tensor& tensor, Access access, std::string_view where, std::string_view name);

// Throws std::invalid_argument unless both have the same dtype and the same device.
void check_same_kind(const TensorView& left, const TensorView& right, std::string_view where,
                     std::string_view left_name, std::string_view right_name);

// Throws std::invalid_argument where the bytes between the first and the last that `runs` reads and those that it
// writes meet. Offsets of the runs are addresses.
void check_no_overlap(const core::RunList& runs, std::string_view where);

// Copies on the device of `dst`. Offsets of the runs are addresses.
void copy_runs_on(const TensorView& device_of, const core::RunList& runs);

}  // namespace torchtitan_ext::ops
