#include "ops/chunk_table.h"

#include "core/boxes.h"
#include "core/check.h"

namespace torchtitan_ext::ops {
namespace {

using core::checked_add;
using core::checked_mul;

std::vector<ChunkView> read_chunks(std::span<const int64_t> table, size_t num_dims, const char* op) {
  if (num_dims == 0) {
    TTE_CHECK(table.empty(), op, "a 0-d shard has an empty table of chunks, got ", table.size(), " integers");
    return {ChunkView{}};
  }
  TTE_CHECK(table.size() % (3 * num_dims) == 0, op, "the table of chunks has ", table.size(),
            " integers, expected a multiple of 3 * ", num_dims);
  std::vector<ChunkView> chunks;
  chunks.reserve(table.size() / (3 * num_dims));
  for (; !table.empty(); table = table.subspan(3 * num_dims)) {
    chunks.push_back(
        {table.subspan(0, num_dims), table.subspan(num_dims, num_dims), table.subspan(2 * num_dims, num_dims)});
  }
  return chunks;
}

// Every chunk is a box inside the shard and inside the box at `box_offsets`, and the chunks tile the shard.
void check_chunks(std::span<const ChunkView> chunks, std::span<const int64_t> shard_sizes,
                  std::span<const int64_t> box_offsets, std::span<const int64_t> box_sizes, const char* op) {
  int64_t covered = 0;
  for (size_t index = 0; index < chunks.size(); ++index) {
    const ChunkView& chunk = chunks[index];
    for (size_t dim = 0; dim < shard_sizes.size(); ++dim) {
      const int64_t offset = chunk.offsets[dim];
      const int64_t size = chunk.sizes[dim];
      const int64_t local = chunk.local_offsets[dim];
      TTE_CHECK(size > 0, op, "chunk ", index, " has size ", size, " in dim ", dim, ", expected at least 1");
      TTE_CHECK(local >= 0 && checked_add(local, size) <= shard_sizes[dim], op, "chunk ", index, " covers [", local,
                ", ", local + size, ") of dim ", dim, " of the shard, which has ", shard_sizes[dim], " elements");
      const int64_t box_end = checked_add(box_offsets[dim], box_sizes[dim]);
      TTE_CHECK(offset >= box_offsets[dim] && checked_add(offset, size) <= box_end, op, "chunk ", index, " is [",
                offset, ", ", offset + size, ") of dim ", dim, ", but the larger tensor holds [", box_offsets[dim],
                ", ", box_end, ")");
    }
    covered = checked_add(covered, core::num_elements(chunk.sizes));
  }
  const int64_t expected = core::num_elements(shard_sizes);
  check_disjoint(chunks, &ChunkView::local_offsets, op, "shard");
  TTE_CHECK(covered == expected, op, "the chunks cover ", covered, " of the shard's ", expected, " elements");
}

void check_sizes(std::span<const int64_t> sizes, const char* op, const char* name) {
  for (const int64_t size : sizes) TTE_CHECK(size >= 0, op, name, " has a negative size ", size);
}

void check_num_dims(size_t num_dims, size_t expected, const char* op, const char* name) {
  TTE_CHECK(num_dims == expected, op, name, " has ", num_dims, " dims, expected ", expected);
}

}  // namespace

TableReader::Entry TableReader::next(size_t num_dims) {
  const int64_t num_chunks = take(1)[0];
  TTE_CHECK(num_chunks >= 0 && num_chunks <= static_cast<int64_t>(rest_.size() + 1), where_, "the table says ",
            num_chunks, " chunks and has ", rest_.size(), " more integers");
  const std::span<const int64_t> of_dims = take(num_dims);
  const std::span<const int64_t> shard_sizes = take(num_dims);
  return {of_dims, shard_sizes, take(3 * num_dims * static_cast<size_t>(num_chunks))};
}

std::span<const int64_t> TableReader::take(size_t count) {
  TTE_CHECK(count <= rest_.size(), where_, "the table ends too early: ", rest_.size(), " integers are left, expected ",
            count);
  const std::span<const int64_t> taken = rest_.first(count);
  rest_ = rest_.subspan(count);
  return taken;
}

void TableReader::finish() const {
  TTE_CHECK(rest_.empty(), where_, "the table has ", rest_.size(), " integers behind the last tensor's");
}

std::vector<ChunkView> checked_chunks(std::span<const int64_t> table, std::span<const int64_t> box_sizes,
                                      std::span<const int64_t> box_offsets, std::span<const int64_t> shard_sizes,
                                      const char* op, const char* offsets_name) {
  check_num_dims(shard_sizes.size(), box_sizes.size(), op, "the shard");
  check_num_dims(box_offsets.size(), box_sizes.size(), op, offsets_name);
  check_sizes(shard_sizes, op, "the shard");
  std::vector<ChunkView> chunks = read_chunks(table, box_sizes.size(), op);
  check_chunks(chunks, shard_sizes, box_offsets, box_sizes, op);
  return chunks;
}

void check_disjoint(std::span<const ChunkView> chunks, std::span<const int64_t> ChunkView::* offsets, const char* op,
                    const char* place) {
  if (chunks.size() < 2) return;
  std::vector<core::Box> boxes;
  for (const ChunkView& chunk : chunks) boxes.push_back({chunk.*offsets, chunk.sizes});
  const auto pair = core::find_colliding_pair(boxes);
  TTE_CHECK(!pair, op, "chunks ", pair->first, " and ", pair->second, " overlap in the ", place);
}

int64_t offset_bytes(std::span<const int64_t> offsets, std::span<const int64_t> origin,
                     std::span<const int64_t> strides, int64_t item_bytes) {
  int64_t sum = 0;
  for (size_t dim = 0; dim < offsets.size(); ++dim) {
    const int64_t offset = origin.empty() ? offsets[dim] : offsets[dim] - origin[dim];
    sum = checked_add(sum, checked_mul(offset, strides[dim]));
  }
  return checked_mul(sum, item_bytes);
}

}  // namespace torchtitan_ext::ops
