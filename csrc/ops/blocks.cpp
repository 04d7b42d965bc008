#include "ops/blocks.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

BlockDtype dtype_of(int32_t dtype, const char* op, const char* what) {
  if (dtype == aoti_torch_dtype_float32()) return BlockDtype::kFloat;
  if (dtype == aoti_torch_dtype_float64()) return BlockDtype::kDouble;
  if (dtype == aoti_torch_dtype_bfloat16()) return BlockDtype::kBFloat16;
  TTE_CHECK(dtype == aoti_torch_dtype_float16(), op, what, " must be float32, float64, bfloat16 or float16");
  return BlockDtype::kHalf;
}

BlockDtype rounding_of(ScalarType rounded, const char* op) {
  if (rounded == ScalarType::BFloat16) return BlockDtype::kBFloat16;
  if (rounded == ScalarType::Half) return BlockDtype::kHalf;
  TTE_CHECK(rounded == ScalarType::Float, op, "rounded must be float32, bfloat16 or float16");
  return BlockDtype::kFloat;
}

// Reads the tables of ops.h, one part after the other.
class TableReader {
 public:
  TableReader(const Ints& tables, const char* op) : tables_(tables), op_(op) {}

  int64_t next(int64_t least, int64_t most = std::numeric_limits<int64_t>::max()) {
    TTE_CHECK(place_ < tables_.size(), op_, "tables end too early");
    const int64_t value = tables_[place_++];
    TTE_CHECK(value >= least && value <= most, op_, "tables[", place_ - 1, "] is ", value, ", expected ", least,
              " or more", most == std::numeric_limits<int64_t>::max() ? "" : ", and less than dims");
    return value;
  }

  // `num_blocks`: of the grid of all tensors.
  BlockedPart part_of(const TensorView& view, int64_t num_blocks) {
    BlockedPart part;
    part.address = view.address;
    part.num_elements = view.num_elements;
    part.num_loops = static_cast<int64_t>(view.sizes.size());
    part.num_dims = next(0);
    TTE_CHECK(part.num_dims <= kMaxBlockDims && part.num_loops <= kMaxBlockDims, op_, "tensors have at most ",
              kMaxBlockDims, " dims");
    part.start = next(0);
    for (int64_t dim = 0; dim < part.num_dims; ++dim) part.block[dim] = next(1);
    for (int64_t dim = 0; dim < part.num_dims; ++dim) part.grid_strides[dim] = next(0);
    for (int64_t dim = 0; dim < part.num_dims; ++dim) part.first[dim] = next(0);
    int64_t last[kMaxBlockDims];
    std::copy_n(part.first, part.num_dims, last);
    for (int64_t loop = 0; loop < part.num_loops; ++loop) {
      const size_t index = static_cast<size_t>(loop);
      const int64_t dim = next(0, part.num_dims - 1);
      part.loops[loop] = {view.sizes[index], view.strides[index], dim, next(0)};
      last[dim] = core::checked_add(last[dim], core::checked_mul(view.sizes[index] - 1, part.loops[loop].step));
    }
    if (part.num_elements == 0) return part;
    int64_t number = part.start;
    for (int64_t dim = 0; dim < part.num_dims; ++dim) {
      number = core::checked_add(number, core::checked_mul(last[dim] / part.block[dim], part.grid_strides[dim]));
    }
    TTE_CHECK(number < num_blocks, op_, "tables name block ", number, " of ", num_blocks);
    return part;
  }

  void end() const { TTE_CHECK(place_ == tables_.size(), op_, "tables have more than the tensors need"); }

 private:
  const Ints& tables_;
  const char* op_;
  size_t place_ = 0;
};

std::vector<BlockedPart> parts_of(const std::vector<TensorView>& views, const Ints& tables, int64_t num_blocks,
                                  const char* op) {
  TableReader reader(tables, op);
  std::vector<BlockedPart> parts;
  for (const TensorView& view : views) parts.push_back(reader.part_of(view, num_blocks));
  reader.end();
  return parts;
}

TensorView grid_view(const Tensor& grid, Access access, const TensorView& like, const char* op, const char* name) {
  const TensorView view = view_of(grid.get(), access, {op, name});
  TTE_CHECK(view.dtype == aoti_torch_dtype_float32() && view.sizes.size() == 1 && view.contiguous, op, name,
            " must be 1-d, contiguous float32");
  check_same_device(view, like, {op, name}, {op, "tensors", 0});
  return view;
}

}  // namespace

void block_amax_(const TensorList& tensors, const Ints& tables, ScalarType rounded, const Tensor& amax) {
  const char* op = "block_amax_";
  if (tensors.empty()) return;
  const std::vector<TensorView> views = views_of(tensors, Access::kRead, op, "tensors");
  const TensorView grid = grid_view(amax, Access::kWrite, views.front(), op, "amax");
  const std::vector<BlockedPart> parts = parts_of(views, tables, grid.num_elements, op);
  const BlockDtype rounding = rounding_of(rounded, op);
  std::vector<BlockDtype> dtypes;
  for (const TensorView& view : views) dtypes.push_back(dtype_of(view.dtype, op, "tensors"));
  auto* most = static_cast<float*>(amax.mutable_data_ptr());
  for (size_t index = 0; index < parts.size(); ++index) {
    if (parts[index].num_elements == 0) continue;
    if (grid.device_type == aoti_torch_device_type_cuda()) {
      block_amax_cuda(parts[index], dtypes[index], rounding, most, grid.device_index);
    } else {
      block_amax_cpu(parts[index], dtypes[index], rounding, most);
    }
  }
}

void quantize_blocks_(const TensorList& tensors, const Ints& tables, ScalarType rounded, const Tensor& factors,
                      bool divides, const TensorList& out) {
  const char* op = "quantize_blocks_";
  TTE_CHECK(tensors.size() == out.size(), op, "got ", tensors.size(), " tensors and ", out.size(), " in out");
  if (tensors.empty()) return;
  const std::vector<TensorView> views = views_of(tensors, Access::kRead, op, "tensors");
  const std::vector<TensorView> filled = views_of(out, Access::kWrite, op, "out");
  const TensorView grid = grid_view(factors, Access::kRead, views.front(), op, "factors");
  check_same_device(filled.front(), grid, {op, "out", 0}, {op, "factors"});
  const std::vector<BlockedPart> parts = parts_of(views, tables, grid.num_elements, op);
  const BlockDtype rounding = rounding_of(rounded, op);
  std::vector<BlockDtype> dtypes;
  for (size_t index = 0; index < views.size(); ++index) {
    dtypes.push_back(dtype_of(views[index].dtype, op, "tensors"));
    const TensorView& to = filled[index];
    TTE_CHECK(to.dtype == aoti_torch_dtype_float8_e4m3fn() || to.dtype == aoti_torch_dtype_float8_e5m2(), op, "out[",
              index, "] must be float8_e4m3fn or float8_e5m2");
    TTE_CHECK(to.contiguous && std::ranges::equal(to.sizes, views[index].sizes), op, "out[", index,
              "] must be contiguous and have the sizes of tensors[", index, "]");
  }
  check_separate(filled, op, "out");
  check_separate(filled, views, op);
  for (size_t index = 0; index < parts.size(); ++index) {
    if (parts[index].num_elements == 0) continue;
    const Scaling scaling{divides, filled[index].dtype == aoti_torch_dtype_float8_e5m2()};
    const auto* of_block = reinterpret_cast<const float*>(grid.address);
    auto* bytes = reinterpret_cast<uint8_t*>(filled[index].address);
    if (grid.device_type == aoti_torch_device_type_cuda()) {
      quantize_blocks_cuda(parts[index], dtypes[index], rounding, scaling, of_block, bytes, grid.device_index);
    } else {
      quantize_blocks_cpu(parts[index], dtypes[index], rounding, scaling, of_block, bytes);
    }
  }
}

}  // namespace torchtitan_ext::ops
