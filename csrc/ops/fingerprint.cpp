#include <algorithm>
#include <span>
#include <vector>

#include "core/check.h"
#include "ops/chunk_table.h"
#include "ops/hash_runs.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

// The words of a shard at their places in the global tensor.
HashedRuns hashed_runs(const TensorView& shard, std::span<const int64_t> global_sizes, std::span<const int64_t> chunks,
                       const char* op) {
  const Ints origin(global_sizes.size(), 0);
  const std::vector<ChunkView> views =
      checked_chunks(chunks, global_sizes, origin, shard.sizes, op, "the global shape");
  check_disjoint(views, &ChunkView::offsets, op, "global tensor");
  const Ints strides = core::row_major_strides(global_sizes);
  core::checked_mul(core::num_elements(global_sizes), shard.item_bytes);
  HashedRuns list{{}, std::min<int64_t>(shard.item_bytes, 8)};
  for (const ChunkView& chunk : views) {
    core::BoxSide src = shard.side();
    src.offset_bytes += offset_bytes(chunk.local_offsets, {}, shard.strides, shard.item_bytes);
    const core::BoxSide position{offset_bytes(chunk.offsets, {}, strides, shard.item_bytes), strides};
    list.runs.append_box(chunk.sizes, src, position, shard.item_bytes);
  }
  return list;
}

void check_aligned(const TensorView& shard, const HashedRuns& list, const Subject& subject) {
  TTE_CHECK(shard.device_type != aoti_torch_device_type_cuda() || shard.address % list.word_bytes == 0, subject.op,
            "the memory of ", subject.text(), " is not aligned to its elements; clone() it first");
}

// Args: like: a tensor on the device; the result is int64 of these sizes there.
Tensor hash_on(const TensorView& like, const Ints& sizes, std::span<const HashedRuns> lists) {
  Tensor result = empty_on(like, sizes, aoti_torch_dtype_int64());
  auto* const sums = static_cast<uint64_t*>(result.mutable_data_ptr());
  if (like.device_type == aoti_torch_device_type_cuda()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.get()));
    hash_runs_cuda(lists, sums, like.device_index);
  } else {
    hash_runs_cpu(lists, sums, parallel_for);
  }
  return result;
}

}  // namespace

Tensor fingerprint_shard(const Tensor& shard, const Ints& global_sizes, const Ints& chunks) {
  const char* op = "fingerprint_shard";
  const TensorView view = view_of(shard.get(), Access::kRead, {op, "the shard"});
  const HashedRuns list = hashed_runs(view, global_sizes, chunks, op);
  check_aligned(view, list, {op, "the shard"});
  return hash_on(view, {}, {&list, 1});
}

Tensor fingerprint_shards(const TensorList& shards, const Ints& tables) {
  const char* op = "fingerprint_shards";
  TTE_CHECK(!shards.empty(), op, "got no tensors, expected at least one");
  TableReader reader(tables, op);
  std::vector<TensorView> views;
  std::vector<HashedRuns> lists;
  for (size_t index = 0; index < shards.size(); ++index) {
    const Subject subject{op, "shards", static_cast<int64_t>(index)};
    views.push_back(view_of(shards[index], Access::kRead, subject));
    const TensorView& view = views.back();
    check_same_device(views[0], view, {op, "shards", 0}, subject);
    const TableReader::Entry entry = reader.next(view.sizes.size());
    TTE_CHECK(std::ranges::equal(entry.shard_sizes, view.sizes), op, subject.text(),
              " has another shape than the table says");
    lists.push_back(hashed_runs(view, entry.of_dims, entry.chunks, op));
    check_aligned(view, lists.back(), subject);
  }
  reader.finish();
  return hash_on(views[0], {static_cast<int64_t>(lists.size())}, lists);
}

}  // namespace torchtitan_ext::ops
