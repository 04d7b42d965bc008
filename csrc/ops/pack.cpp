#include <torch/csrc/stable/ops.h>

#include <span>

#include "core/check.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

using core::checked_add;
using core::checked_mul;
using core::RunList;

// One chunk of the table, as views into it.
struct ChunkView {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
  std::span<const int64_t> local_offsets;
};

std::vector<ChunkView> read_chunks(std::span<const int64_t> table, size_t num_dims, const char* where) {
  if (num_dims == 0) {
    TTE_CHECK(table.empty(), where, "a 0-d shard has an empty table of chunks, got ", table.size(), " integers");
    return {ChunkView{}};
  }
  TTE_CHECK(table.size() % (3 * num_dims) == 0, where, "the table of chunks has ", table.size(),
            " integers, expected a multiple of 3 * ", num_dims);
  std::vector<ChunkView> chunks;
  chunks.reserve(table.size() / (3 * num_dims));
  for (; !table.empty(); table = table.subspan(3 * num_dims)) {
    chunks.push_back(
        {table.subspan(0, num_dims), table.subspan(num_dims, num_dims), table.subspan(2 * num_dims, num_dims)});
  }
  return chunks;
}

void check_disjoint(std::span<const ChunkView> chunks, std::span<const int64_t> ChunkView::* offsets, const char* where,
                    const char* place) {
  if (chunks.size() < 2) return;
  std::vector<std::span<const int64_t>> all_offsets, all_sizes;
  for (const ChunkView& chunk : chunks) {
    all_offsets.push_back(chunk.*offsets);
    all_sizes.push_back(chunk.sizes);
  }
  const core::BoxPair pair = core::find_overlap(all_offsets, all_sizes);
  TTE_CHECK(pair.first < 0, where, "chunks ", pair.first, " and ", pair.second, " overlap in the ", place);
}

// Every chunk is a box inside the shard and inside the box at `box_offsets`, and the chunks tile the shard.
void check_chunks(std::span<const ChunkView> chunks, std::span<const int64_t> shard_sizes,
                  std::span<const int64_t> box_offsets, std::span<const int64_t> box_sizes, const char* where) {
  int64_t covered = 0;
  for (size_t index = 0; index < chunks.size(); ++index) {
    const ChunkView& chunk = chunks[index];
    for (size_t dim = 0; dim < shard_sizes.size(); ++dim) {
      const int64_t offset = chunk.offsets[dim];
      const int64_t size = chunk.sizes[dim];
      const int64_t local = chunk.local_offsets[dim];
      TTE_CHECK(size > 0, where, "chunk ", index, " has size ", size, " in dim ", dim, ", expected at least 1");
      TTE_CHECK(local >= 0 && checked_add(local, size) <= shard_sizes[dim], where, "chunk ", index, " covers [", local,
                ", ", local + size, ") of dim ", dim, " of the shard, which has ", shard_sizes[dim], " elements");
      const int64_t box_end = checked_add(box_offsets[dim], box_sizes[dim]);
      TTE_CHECK(offset >= box_offsets[dim] && checked_add(offset, size) <= box_end, where, "chunk ", index, " is [",
                offset, ", ", offset + size, ") of dim ", dim, ", but the larger tensor holds [", box_offsets[dim],
                ", ", box_end, ")");
    }
    covered = checked_add(covered, core::num_elements(chunk.sizes));
  }
  const int64_t expected = core::num_elements(shard_sizes);
  check_disjoint(chunks, &ChunkView::local_offsets, where, "shard");
  TTE_CHECK(covered == expected, where, "the chunks cover ", covered, " of the shard's ", expected, " elements");
}

void check_sizes(std::span<const int64_t> sizes, const char* where, const char* name) {
  for (const int64_t size : sizes) TTE_CHECK(size >= 0, where, name, " has a negative size ", size);
}

void check_num_dims(size_t num_dims, size_t expected, const char* where, const char* name) {
  TTE_CHECK(num_dims == expected, where, name, " has ", num_dims, " dims, expected ", expected);
}

int64_t offset_bytes(std::span<const int64_t> offsets, std::span<const int64_t> origin,
                     std::span<const int64_t> strides_bytes) {
  int64_t sum = 0;
  for (size_t dim = 0; dim < offsets.size(); ++dim) {
    const int64_t offset = origin.empty() ? offsets[dim] : offsets[dim] - origin[dim];
    sum = checked_add(sum, checked_mul(offset, strides_bytes[dim]));
  }
  return sum;
}

// The chunks' copies between the box at `box_offsets` and the shard; offsets of the runs are addresses.
enum class Direction { kPack, kUnpack };

RunList make_runs(std::span<const ChunkView> chunks, const TensorView& box, std::span<const int64_t> box_offsets,
                  const TensorView& shard, Direction direction) {
  RunList runs;
  runs.reserve(chunks.size());
  for (const ChunkView& chunk : chunks) {
    const core::BoxSide box_side{
        static_cast<int64_t>(box.address) + offset_bytes(chunk.offsets, box_offsets, box.strides_bytes),
        box.strides_bytes};
    const core::BoxSide shard_side{
        static_cast<int64_t>(shard.address) + offset_bytes(chunk.local_offsets, {}, shard.strides_bytes),
        shard.strides_bytes};
    if (direction == Direction::kPack) {
      runs.append_box(chunk.sizes, box_side, shard_side, shard.item_bytes);
    } else {
      runs.append_box(chunk.sizes, shard_side, box_side, shard.item_bytes);
    }
  }
  return runs;
}

void unpack_into(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks,
                 const char* where) {
  const TensorView box = view_of(dst, Access::kWrite, where, "dst");
  const TensorView shard_view = view_of(shard, Access::kRead, where, "the shard");
  check_same_kind(box, shard_view, where, "dst", "the shard");
  check_num_dims(dst_offsets.size(), box.sizes.size(), where, "dst_offsets");
  check_num_dims(shard_view.sizes.size(), box.sizes.size(), where, "the shard");
  const std::vector<ChunkView> views = read_chunks(chunks, box.sizes.size(), where);
  check_chunks(views, shard_view.sizes, dst_offsets, box.sizes, where);
  check_disjoint(views, &ChunkView::offsets, where, "larger tensor");

  const RunList runs = make_runs(views, box, dst_offsets, shard_view, Direction::kUnpack);
  check_no_overlap(runs, where);
  copy_runs_on(box, runs);
}

}  // namespace

Tensor pack_shard(const Tensor& src, const Ints& src_offsets, const Ints& shard_sizes, const Ints& chunks) {
  const char* where = "pack_shard";
  const TensorView box = view_of(src, Access::kRead, where, "src");
  check_num_dims(src_offsets.size(), box.sizes.size(), where, "src_offsets");
  check_num_dims(shard_sizes.size(), box.sizes.size(), where, "the shard");
  check_sizes(shard_sizes, where, "the shard");
  // Empty shards have no chunks; a 0-d tensor has no size that could be 0.
  const std::vector<ChunkView> views = read_chunks(chunks, box.sizes.size(), where);
  check_chunks(views, shard_sizes, src_offsets, box.sizes, where);

  Tensor shard = torch::stable::new_empty(src, shard_sizes);
  const TensorView shard_view = view_of(shard, Access::kWrite, where, "the result");
  copy_runs_on(shard_view, make_runs(views, box, src_offsets, shard_view, Direction::kPack));
  return shard;
}

void unpack_shard_(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks) {
  unpack_into(dst, dst_offsets, shard, chunks, "unpack_shard_");
}

Tensor unpack_shard(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks) {
  const char* where = "unpack_shard";
  const TensorView dst_view = view_of(dst, Access::kRead, where, "dst");
  Tensor result = torch::stable::new_empty(dst, dst_view.sizes);
  torch::stable::copy_(result, dst);
  unpack_into(result, dst_offsets, shard, chunks, where);
  return result;
}

}  // namespace torchtitan_ext::ops
