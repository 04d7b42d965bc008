// Shards as they travel through a schema: tables of integers, read and checked.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torchtitan_ext::ops {

// One chunk of a table `offsets | sizes | local_offsets`, as views into it.
struct ChunkView {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
  std::span<const int64_t> local_offsets;
};

// Reads the parts of `tables` that belong to one tensor after the other; ops.h has the formats.
class TableReader {
 public:
  TableReader(std::span<const int64_t> tables, const char* where) : rest_(tables), where_(where) {}

  // `num_chunks | a number for each dim | shard_sizes | chunks`. The first numbers are offsets of a box, or global sizes.
  struct Entry {
    std::span<const int64_t> of_dims, shard_sizes, chunks;
  };

  Entry next(size_t num_dims);
  void finish() const;

 private:
  std::span<const int64_t> take(size_t count);

  std::span<const int64_t> rest_;
  const char* where_;
};

// The chunks of a table. Throws std::invalid_argument unless every one of them is a box inside the shard and inside the
// box at `box_offsets` of the global tensor, and they tile the shard. `op` and `offsets_name` are for messages.
std::vector<ChunkView> checked_chunks(std::span<const int64_t> table, std::span<const int64_t> box_sizes,
                                      std::span<const int64_t> box_offsets, std::span<const int64_t> shard_sizes,
                                      const char* op, const char* offsets_name);

// Throws std::invalid_argument where two chunks share an element at `offsets`, which are those in `place`.
void check_disjoint(std::span<const ChunkView> chunks, std::span<const int64_t> ChunkView::* offsets, const char* op,
                    const char* place);

// Of an element at `offsets` (less `origin`, if one is given) in a tensor of these strides, in elements.
int64_t offset_bytes(std::span<const int64_t> offsets, std::span<const int64_t> origin,
                     std::span<const int64_t> strides, int64_t item_bytes);

}  // namespace torchtitan_ext::ops
