#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "ops/chunk_table.h"
#include "ops/hash_runs.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {

Tensor fingerprint_shard(const Tensor& shard, const Ints& global_sizes, const Ints& chunks) {
  const char* op = "fingerprint_shard";
  const TensorView view = view_of(shard.get(), Access::kRead, {op, "the shard"});
  const Ints origin(global_sizes.size(), 0);
  const std::vector<ChunkView> views = checked_chunks(chunks, global_sizes, origin, view.sizes, op, "the global shape");
  check_disjoint(views, &ChunkView::offsets, op, "global tensor");

  const Ints strides = core::row_major_strides(global_sizes);
  core::checked_mul(core::num_elements(global_sizes), view.item_bytes);
  core::RunList runs;
  for (const ChunkView& chunk : views) {
    core::BoxSide src = view.side();
    src.offset_bytes += offset_bytes(chunk.local_offsets, {}, view.strides, view.item_bytes);
    const core::BoxSide position{offset_bytes(chunk.offsets, {}, strides, view.item_bytes), strides};
    runs.append_box(chunk.sizes, src, position, view.item_bytes);
  }

  const int64_t word_bytes = std::min<int64_t>(view.item_bytes, 8);
  Tensor result = empty_on(view, {}, aoti_torch_dtype_int64());
  if (view.device_type == aoti_torch_device_type_cuda()) {
    TTE_CHECK(view.address % word_bytes == 0, op,
              "the shard's memory is not aligned to its elements; clone() it first");
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.get()));
    hash_runs_cuda(runs, word_bytes, static_cast<uint64_t*>(result.mutable_data_ptr()), view.device_index);
  } else {
    const uint64_t sum = hash_runs_cpu(runs, word_bytes, parallel_for);
    std::memcpy(result.mutable_data_ptr(), &sum, sizeof(sum));
  }
  return result;
}

}  // namespace torchtitan_ext::ops
