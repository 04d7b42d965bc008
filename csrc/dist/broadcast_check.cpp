#include "dist/broadcast_check.h"

#include <utility>

#include "core/memory.h"
#include "dist/tensor_fault.h"

namespace torchtitan_ext::dist {
Fault find_fault(at::TensorList tensors) {
  std::vector<core::Memory> memories;
  memories.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    const at::Tensor& tensor = tensors[index];
    std::string reason = fault_of(tensor, tensors[0], Access::kWrite);
    if (!reason.empty()) return {{static_cast<int64_t>(index)}, std::move(reason)};
    // The form for writing: it gives a copy-on-write tensor memory of its own.
    const void* data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
    memories.push_back({reinterpret_cast<uintptr_t>(data), tensor.sizes(), tensor.strides(), tensor.element_size()});
  }
  const auto pair = core::find_shared_memory(memories);
  if (!pair) return {};
  return {{static_cast<int64_t>(pair->first), static_cast<int64_t>(pair->second)},
          "share memory and would both be received into"};
}

std::vector<int64_t> digest_of(at::TensorList tensors) {
  // FNV-1a over whole words, twice with different starts: a slip must not go unseen, nobody is fooled on purpose.
  uint64_t first = 0xcbf29ce484222325, second = 0x9e3779b97f4a7c15;
  const auto add = [&](int64_t word) {
    first = (first ^ static_cast<uint64_t>(word)) * 0x100000001b3;
    first ^= first >> 29;
    second = (second ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccd;
    second ^= second >> 32;
  };
  add(static_cast<int64_t>(tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
  }
  return {static_cast<int64_t>(first), static_cast<int64_t>(second)};
}

}  // namespace torchtitan_ext::dist
