// The sum of a box of a tensor that lies in the host's memory.
#pragma once

#include <cstdint>
#include <span>

namespace torchtitan_ext::storage {

// What ops.fingerprint_shard gives: the sum of the hashes of the box's words and of their places in the tensor of
// `global_sizes`. Its elements lie row by row at `address`. Throws std::invalid_argument where the box does not lie in
// the tensor.
uint64_t sum_box(uintptr_t address, int64_t item_bytes, std::span<const int64_t> offsets,
                 std::span<const int64_t> sizes, std::span<const int64_t> global_sizes);

}  // namespace torchtitan_ext::storage
