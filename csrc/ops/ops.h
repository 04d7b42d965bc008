// The kernels behind the schemas of library.cpp, which run on CPU and CUDA tensors alike: they check, make runs and
// hand them to copy_runs. Every argument is checked before the first byte moves; bad ones are std::invalid_argument
// (ValueError) and sizes beyond int64 std::overflow_error.
//
// A shard travels as integers: its sizes, and a table of its chunks with `offsets | sizes | local_offsets` for each (3
// * num_dims integers). The one chunk of a 0-d shard has none, so its table is empty.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace torchtitan_ext::ops {

using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// Copies the chunks out of `src`, which holds the box at `src_offsets` of the global tensor, any strides, into a new
// contiguous tensor of `shard_sizes`. The chunks must tile the shard.
Tensor pack_shard(const Tensor& src, const Ints& src_offsets, const Ints& shard_sizes, const Ints& chunks);

// The inverse: copies `shard`, any strides, into the chunks' places in `dst`, which holds the box at `dst_offsets` of
// the global tensor; the rest of `dst` is unchanged. The chunks must not overlap.
void unpack_shard_(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks);

// The same into a contiguous copy of `dst`.
Tensor unpack_shard(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks);

}  // namespace torchtitan_ext::ops
