#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <span>

#include "core/check.h"
#include "ops/chunk_table.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

using core::RunList;

enum class Direction { kPack, kUnpack };

// The chunks' copies between the box at `box_offsets` and the shard; offsets of the runs are addresses.
void append_chunks(RunList& runs, std::span<const ChunkView> chunks, const TensorView& box,
                   std::span<const int64_t> box_offsets, const TensorView& shard, Direction direction) {
  runs.start_pair();
  for (const ChunkView& chunk : chunks) {
    core::BoxSide box_side = box.side();
    core::BoxSide shard_side = shard.side();
    box_side.offset_bytes += offset_bytes(chunk.offsets, box_offsets, box.strides, box.item_bytes);
    shard_side.offset_bytes += offset_bytes(chunk.local_offsets, {}, shard.strides, shard.item_bytes);
    if (direction == Direction::kPack) {
      runs.append_box(chunk.sizes, box_side, shard_side, shard.item_bytes);
    } else {
      runs.append_box(chunk.sizes, shard_side, box_side, shard.item_bytes);
    }
  }
}

void unpack_into(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& table,
                 const char* where) {
  const TensorView box = view_of(dst.get(), Access::kWrite, {where, "dst"});
  const TensorView shard_view = view_of(shard.get(), Access::kRead, {where, "the shard"});
  check_same_dtype(box, shard_view, {where, "dst"}, {where, "the shard"});
  check_same_device(box, shard_view, {where, "dst"}, {where, "the shard"});
  const std::vector<ChunkView> chunks =
      checked_chunks(table, box.sizes, dst_offsets, shard_view.sizes, where, "dst_offsets");
  check_disjoint(chunks, &ChunkView::offsets, where, "larger tensor");
  check_separate({&box, 1}, {&shard_view, 1}, where);
  RunList runs;
  append_chunks(runs, chunks, box, dst_offsets, shard_view, Direction::kUnpack);
  copy_runs_on(box, runs);
}

}  // namespace

Tensor pack_shard(const Tensor& src, const Ints& src_offsets, const Ints& shard_sizes, const Ints& chunks) {
  const char* where = "pack_shard";
  const TensorView box = view_of(src.get(), Access::kRead, {where, "src"});
  const std::vector<ChunkView> views =
      checked_chunks(chunks, box.sizes, src_offsets, shard_sizes, where, "src_offsets");
  Tensor shard = empty_on(box, shard_sizes, box.dtype);
  const TensorView shard_view = view_of(shard.get(), Access::kWrite, {where, "the result"});
  RunList runs;
  append_chunks(runs, views, box, src_offsets, shard_view, Direction::kPack);
  copy_runs_on(box, runs);
  return shard;
}

void unpack_shard_(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks) {
  unpack_into(dst, dst_offsets, shard, chunks, "unpack_shard_");
}

Tensor unpack_shard(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks) {
  const TensorView view = view_of(dst.get(), Access::kRead, {"unpack_shard", "dst"});
  Tensor result = empty_on(view, view.sizes, view.dtype);
  torch::stable::copy_(result, dst);
  unpack_into(result, dst_offsets, shard, chunks, "unpack_shard");
  return result;
}

std::vector<Tensor> pack_shards(const TensorList& src, const Ints& tables) {
  const char* where = "pack_shards";
  TTE_CHECK(!src.empty(), where, "got no tensors, expected at least one");
  TableReader reader(tables, where);
  struct Part {
    TensorView box;
    TableReader::Entry entry;
    std::vector<ChunkView> chunks;
  };
  std::vector<Part> parts;
  for (size_t index = 0; index < src.size(); ++index) {
    const Subject subject{where, "src", static_cast<int64_t>(index)};
    const TensorView box = view_of(src[index], Access::kRead, subject);
    const TableReader::Entry entry = reader.next(box.sizes.size());
    parts.push_back(
        {box, entry, checked_chunks(entry.chunks, box.sizes, entry.of_dims, entry.shard_sizes, where, "src_offsets")});
    check_same_device(parts[0].box, box, {where, "src", 0}, subject);
  }
  reader.finish();

  std::vector<Tensor> shards;
  RunList runs;
  for (const Part& part : parts) {
    shards.push_back(empty_on(part.box, part.entry.shard_sizes, part.box.dtype));
    const TensorView shard = view_of(shards.back().get(), Access::kWrite, {where, "the result"});
    append_chunks(runs, part.chunks, part.box, part.entry.of_dims, shard, Direction::kPack);
  }
  copy_runs_on(parts[0].box, runs);
  return shards;
}

void unpack_shards_(const TensorList& dst, const TensorList& shards, const Ints& tables) {
  const char* where = "unpack_shards_";
  TTE_CHECK(!dst.empty(), where, "got no tensors, expected at least one");
  TTE_CHECK(dst.size() == shards.size(), where, "got ", dst.size(), " tensors and ", shards.size(), " shards");
  TableReader reader(tables, where);
  std::vector<TensorView> boxes, shard_views;
  RunList runs;
  for (size_t index = 0; index < dst.size(); ++index) {
    const Subject dst_is{where, "dst", static_cast<int64_t>(index)};
    const Subject shard_is{where, "shards", static_cast<int64_t>(index)};
    const TensorView box = view_of(dst[index], Access::kWrite, dst_is);
    const TensorView shard = view_of(shards[index], Access::kRead, shard_is);
    check_same_dtype(box, shard, dst_is, shard_is);
    check_same_device(box, shard, dst_is, shard_is);
    const TableReader::Entry entry = reader.next(box.sizes.size());
    TTE_CHECK(std::ranges::equal(entry.shard_sizes, shard.sizes), where, shard_is.text(),
              " has another shape than the table says");
    const std::vector<ChunkView> chunks =
        checked_chunks(entry.chunks, box.sizes, entry.of_dims, entry.shard_sizes, where, "dst_offsets");
    check_disjoint(chunks, &ChunkView::offsets, where, "larger tensor");
    append_chunks(runs, chunks, box, entry.of_dims, shard, Direction::kUnpack);
    boxes.push_back(box);
    shard_views.push_back(shard);
    check_same_device(boxes[0], box, {where, "dst", 0}, dst_is);
  }
  reader.finish();
  check_separate(boxes, where, "dst");
  check_separate(boxes, shard_views, where);
  copy_runs_on(boxes[0], runs);
}

}  // namespace torchtitan_ext::ops
