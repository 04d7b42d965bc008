#include "ops/tensor_view.h"

#include "core/check.h"
#include "ops/copy_runs.h"

namespace torchtitan_ext::ops {
namespace {

using core::checked_add;
using core::checked_mul;

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}

bool is_quantized(int32_t dtype) {
  using torch::headeronly::ScalarType;
  const ScalarType type = static_cast<ScalarType>(dtype);
  return type == ScalarType::QInt8 || type == ScalarType::QUInt8 || type == ScalarType::QInt32 ||
         type == ScalarType::QUInt4x2 || type == ScalarType::QUInt2x4;
}

}  // namespace

TensorView view_of(const Tensor& tensor, Access access, std::string_view where, std::string_view name) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  TTE_CHECK(layout == aoti_torch_layout_strided(), where, name, " is sparse; convert it with .to_dense() first");

  TensorView view;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &view.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &view.device_type));
  TTE_CHECK(!is_quantized(view.dtype), where, name,
            " is quantized: its bytes mean nothing without scale and zero point");
  TTE_CHECK(view.device_type == aoti_torch_device_type_cpu() || view.device_type == aoti_torch_device_type_cuda(),
            where, name, " is neither on a CPU nor on a CUDA device");
  view.device_index = tensor.get_device_index();
  view.item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(view.dtype));
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  view.sizes.assign(sizes.begin(), sizes.end());
  view.num_elements = core::num_elements(view.sizes);

  int64_t span = 1;  // elements from the first to one past the last
  view.strides_bytes.reserve(strides.size());
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    view.strides_bytes.push_back(checked_mul(strides[dim], view.item_bytes));
    if (view.num_elements != 0) span = checked_add(span, checked_mul(view.sizes[dim] - 1, strides[dim]));
  }
  if (view.num_elements == 0) return view;

  int64_t storage_bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_bytes));
  const int64_t needed_bytes = checked_mul(checked_add(tensor.storage_offset(), span), view.item_bytes);
  TTE_CHECK(needed_bytes <= storage_bytes, where, name, " spans ", needed_bytes, " bytes of storage, which has ",
            storage_bytes, "; was it freed or resized?");
  const void* data = access == Access::kWrite ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
  TTE_CHECK(data != nullptr, where, name, " has no memory; was its storage freed?");
  view.address = reinterpret_cast<uintptr_t>(data);
  if (access == Access::kWrite) {
    TTE_CHECK(!core::may_overlap_itself(view.sizes, view.strides_bytes), where, name,
              " cannot be written: several of its elements share memory; clone() it first");
  }
  return view;
}

void check_same_kind(const TensorView& left, const TensorView& right, std::string_view where,
                     std::string_view left_name, std::string_view right_name) {
  TTE_CHECK(left.dtype == right.dtype, where, left_name, " and ", right_name, " have different dtypes");
  TTE_CHECK(left.device_type == right.device_type && left.device_index == right.device_index, where, left_name, " and ",
            right_name, " are on different devices");
}

void check_no_overlap(const core::RunList& runs, std::string_view where) {
  const core::Extent src = runs.src_extent();
  const core::Extent dst = runs.dst_extent();
  TTE_CHECK(src.end <= dst.begin || dst.end <= src.begin, where,
            "source and destination share memory; clone() one of them first");
}

void copy_runs_on(const TensorView& device_of, const core::RunList& runs) {
  if (runs.nests().empty()) return;
  if (device_of.device_type == aoti_torch_device_type_cuda()) {
    copy_runs_cuda(runs, 0, 0, device_of.device_index);
  } else {
    copy_runs_cpu(runs, 0, 0, parallel_for);
  }
}

}  // namespace torchtitan_ext::ops
