#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <memory>
#include <span>

#include "core/check.h"
#include "ops/chunk_table.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

using core::RunList;

constexpr int64_t kMaxAlignment = int64_t{1} << 20;  // a disk block or a huge page; more is a mistake

// What a flat buffer keeps of a tensor, which may be on any device.
struct Shape {
  std::span<const int64_t> sizes;
  int32_t dtype = 0;
  int64_t bytes = 0;

  int64_t num_bytes() const { return bytes; }
};

struct FlatLayout {
  std::vector<int64_t> offsets_bytes;
  int64_t num_bytes = 0;
  int64_t largest_gap_bytes = 0;
};

void check_alignment(int64_t alignment, const char* op) {
  TTE_CHECK(alignment >= 1 && alignment <= kMaxAlignment && (alignment & (alignment - 1)) == 0, op, "alignment is ",
            alignment, ", expected a power of two of at most ", kMaxAlignment, " bytes");
}

template <typename View>
FlatLayout lay_out(const std::vector<View>& views, int64_t alignment) {
  FlatLayout layout;
  layout.offsets_bytes.reserve(views.size());
  for (const View& view : views) {
    const int64_t gap = -layout.num_bytes & (alignment - 1);
    layout.largest_gap_bytes = std::max(layout.largest_gap_bytes, gap);
    layout.offsets_bytes.push_back(core::checked_add(layout.num_bytes, gap));
    layout.num_bytes = core::checked_add(layout.offsets_bytes.back(), view.num_bytes());
  }
  return layout;
}

std::vector<Shape> shapes_of(const TensorList& tensors) {
  std::vector<Shape> shapes(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    int64_t *sizes = nullptr, num_dims = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensors[index], &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensors[index], &num_dims));
    Shape& shape = shapes[index];
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensors[index], &shape.dtype));
    shape.sizes = {sizes, static_cast<size_t>(num_dims)};
    const int64_t item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(shape.dtype));
    shape.bytes = core::checked_mul(core::num_elements(shape.sizes), item_bytes);
  }
  return shapes;
}

void check_buffer(const TensorView& buffer, std::span<const TensorView> views, int64_t num_bytes, const char* op,
                  const char* name) {
  check_same_device(buffer, views[0], {op, name}, {op, "tensors", 0});
  TTE_CHECK(buffer.sizes.size() == 1 && buffer.contiguous, op, name, " has ", buffer.sizes.size(),
            " dims, expected a contiguous tensor of 1");
  if (buffer.dtype != aoti_torch_dtype_uint8()) {
    for (size_t index = 0; index < views.size(); ++index) {
      TTE_CHECK(views[index].dtype == buffer.dtype, op, name, " is neither uint8 nor of the dtype of tensors[", index,
                "]");
    }
  }
  TTE_CHECK(buffer.num_bytes() >= num_bytes, op, name, " has ", buffer.num_bytes(), " bytes, the tensors need ",
            num_bytes);
}

void flatten_views(std::span<const TensorView> views, const FlatLayout& layout, const TensorView& out) {
  // The gaps are runs too, from a few zeros: one code path for every device, and no pass over the whole buffer.
  Tensor zeros;
  int64_t zeros_address = 0;
  if (layout.largest_gap_bytes > 0) {
    const int64_t sizes[] = {layout.largest_gap_bytes};
    zeros = empty_on(out, sizes, aoti_torch_dtype_uint8());
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(zeros.get()));
    zeros_address = reinterpret_cast<int64_t>(zeros.const_data_ptr());
  }
  RunList runs;
  runs.reserve(views.size());
  const int64_t base = static_cast<int64_t>(out.address);
  int64_t end = 0;
  for (size_t index = 0; index < views.size(); ++index) {
    const TensorView& view = views[index];
    const int64_t offset = layout.offsets_bytes[index];
    if (offset > end) {
      runs.start_pair();
      runs.append_bytes(zeros_address, base + end, offset - end);
    }
    runs.start_pair();
    if (view.contiguous) {
      runs.append_bytes(static_cast<int64_t>(view.address), base + offset, view.num_bytes());
    } else {
      runs.append_box(view.sizes, view.side(), {base + offset, core::row_major_strides(view.sizes)}, view.item_bytes);
    }
    end = offset + view.num_bytes();
  }
  copy_runs_on(out, runs);
}

}  // namespace

Tensor flatten_tensors(const TensorList& tensors, int64_t alignment, ScalarType dtype) {
  const char* op = "flatten_tensors";
  check_alignment(alignment, op);
  const std::vector<TensorView> views = views_of(tensors, Access::kRead, op, "tensors");
  const FlatLayout layout = lay_out(views, alignment);
  const int32_t out_dtype = static_cast<int32_t>(dtype);
  const int64_t item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(out_dtype));
  TTE_CHECK(layout.num_bytes % item_bytes == 0 && (alignment % item_bytes == 0 || item_bytes % alignment == 0), op,
            "alignment ", alignment, " does not fit a buffer of items of ", item_bytes, " bytes");
  const int64_t sizes[] = {layout.num_bytes / item_bytes};
  Tensor out = empty_on(views[0], sizes, out_dtype);
  const TensorView out_view = view_of(out.get(), Access::kWrite, {op, "the result"});
  check_buffer(out_view, views, layout.num_bytes, op, "the result");
  flatten_views(views, layout, out_view);
  return out;
}

void flatten_into_(const TensorList& tensors, int64_t alignment, const Tensor& out) {
  const char* op = "flatten_into_";
  check_alignment(alignment, op);
  const std::vector<TensorView> views = views_of(tensors, Access::kRead, op, "tensors");
  const FlatLayout layout = lay_out(views, alignment);
  const TensorView out_view = view_of(out.get(), Access::kWrite, {op, "out"});
  check_buffer(out_view, views, layout.num_bytes, op, "out");
  check_separate({&out_view, 1}, views, op);
  flatten_views(views, layout, out_view);
}

void unflatten_tensors_(const TensorList& tensors, const Tensor& flat, int64_t alignment) {
  const char* op = "unflatten_tensors_";
  check_alignment(alignment, op);
  const std::vector<TensorView> views = views_of(tensors, Access::kWrite, op, "tensors");
  const FlatLayout layout = lay_out(views, alignment);
  const TensorView flat_view = view_of(flat.get(), Access::kRead, {op, "flat"});
  check_buffer(flat_view, views, layout.num_bytes, op, "flat");
  check_separate(views, op, "tensors");
  check_separate(views, {&flat_view, 1}, op);

  RunList runs;
  runs.reserve(views.size());
  const int64_t base = static_cast<int64_t>(flat_view.address);
  for (size_t index = 0; index < views.size(); ++index) {
    const TensorView& view = views[index];
    runs.start_pair();
    if (view.contiguous) {
      runs.append_bytes(base + layout.offsets_bytes[index], static_cast<int64_t>(view.address), view.num_bytes());
    } else {
      runs.append_box(view.sizes, {base + layout.offsets_bytes[index], core::row_major_strides(view.sizes)},
                      view.side(), view.item_bytes);
    }
  }
  copy_runs_on(flat_view, runs);
}

std::vector<Tensor> buffer_tensors(const Tensor& buffer, const TensorList& like, int64_t alignment) {
  const char* op = "buffer_tensors";
  check_alignment(alignment, op);
  const std::vector<Shape> shapes = shapes_of(like);
  const FlatLayout layout = lay_out(shapes, alignment);
  const TensorView view = view_of(buffer.get(), Access::kWrite, {op, "buffer"});
  TTE_CHECK(view.device_type == aoti_torch_device_type_cpu() && view.sizes.size() == 1 && view.contiguous, op,
            "the buffer is not a contiguous tensor of 1 dim in CPU memory");
  TTE_CHECK(view.num_bytes() >= layout.num_bytes, op, "the buffer has ", view.num_bytes(), " bytes, the tensors need ",
            layout.num_bytes);
  const auto owner = std::make_shared<const Tensor>(buffer);
  const auto give_back = [](void*, void* context) { delete static_cast<std::shared_ptr<const Tensor>*>(context); };
  std::vector<Tensor> tensors;
  tensors.reserve(shapes.size());
  for (size_t index = 0; index < shapes.size(); ++index) {
    const Shape& shape = shapes[index];
    const std::vector<int64_t> strides = core::row_major_strides(shape.sizes);
    void* address = reinterpret_cast<void*>(view.address + static_cast<uintptr_t>(layout.offsets_bytes[index]));
    // torch::stable::from_blob refuses dtypes that the stable ABI has no name for.
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_from_blob(address, static_cast<int64_t>(shape.sizes.size()), shape.sizes.data(),
                                           strides.data(), 0, shape.dtype, view.device_type, view.device_index, &handle,
                                           aoti_torch_layout_strided(), nullptr, 0, give_back,
                                           new std::shared_ptr<const Tensor>(owner)));
    tensors.emplace_back(handle);
  }
  return tensors;
}

}  // namespace torchtitan_ext::ops
