#include "dist/tensor_fault.h"

#include "core/memory.h"

namespace torchtitan_ext::dist {

std::string fault_of(const at::Tensor& tensor, const at::Tensor& first, Access access) {
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return "is of a subclass; pass the rank's own plain tensor";
  if (tensor.is_nested()) return "is nested; pass the tensor of its values";
  if (tensor.layout() != at::kStrided) return "is sparse; convert it with .to_dense() first";
  if (tensor.is_quantized()) return "is quantized; dequantize it first";
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    return c10::str("is neither on a CPU nor on a CUDA device but on ", tensor.device());
  }
  if (tensor.device() != first.device()) {
    return c10::str("is on ", tensor.device(), ", the first one on ", first.device(), "; call once per device");
  }
  if (tensor.is_conj() || tensor.is_neg()) return "is a lazily conjugated or negated view; pass what it views";
  if (tensor.numel() == 0) return {};
  const int64_t end = core::extent_of({0, tensor.sizes(), tensor.strides(), tensor.element_size()}).end;
  if (tensor.storage_offset() * tensor.element_size() + end > static_cast<int64_t>(tensor.storage().nbytes())) {
    return "spans more bytes than its storage has; was it freed or resized?";
  }
  if (access == Access::kWrite && !tensor.is_contiguous() &&
      core::may_overlap_itself(tensor.sizes(), tensor.strides())) {
    return "cannot be received into: several of its elements share memory; clone() it first";
  }
  return {};
}

}  // namespace torchtitan_ext::dist
