// The kernels behind the schemas of library.cpp, which run on CPU and CUDA tensors alike: they check, make runs and
// hand them to copy_runs. Every argument is checked before the first byte moves; bad ones are std::invalid_argument
// (ValueError) and sizes beyond int64 std::overflow_error. No op waits for the device.
//
// A shard travels as integers: its sizes, and a table of its chunks with `offsets | sizes | local_offsets` for each
// (3 * num_dims integers). The one chunk of a 0-d shard has none, so its table is empty.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "ops/tensor_list.h"

namespace torchtitan_ext::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// ---- pack.cpp ----

// Copies the chunks out of `src`, which holds the box at `src_offsets` of the global tensor, any strides, into a new
// contiguous tensor of `shard_sizes`. The chunks must tile the shard.
Tensor pack_shard(const Tensor& src, const Ints& src_offsets, const Ints& shard_sizes, const Ints& chunks);

// The inverse: copies `shard`, any strides, into the chunks' places in `dst`, which holds the box at `dst_offsets` of
// the global tensor; the rest of `dst` is unchanged. The chunks must not overlap.
void unpack_shard_(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks);

// The same into a contiguous copy of `dst`.
Tensor unpack_shard(const Tensor& dst, const Ints& dst_offsets, const Tensor& shard, const Ints& chunks);

// Many tensors in one call. `tables` has for each of them
// `num_chunks | offsets of the box | shard_sizes | offsets, sizes, local_offsets of each chunk`. All on one device.
std::vector<Tensor> pack_shards(const TensorList& src, const Ints& tables);
void unpack_shards_(const TensorList& dst, const TensorList& shards, const Ints& tables);

// ---- flatten.cpp ----
//
// A flat buffer holds the bytes of tensors one behind the other, each contiguous in row-major order and beginning at a
// multiple of `alignment` bytes; what lies between them is zero. It ends with the last tensor. All tensors on one
// device.

// A new 1-d buffer of `dtype`: Byte for tensors of any dtypes, or the dtype that all of them have.
Tensor flatten_tensors(const TensorList& tensors, int64_t alignment, ScalarType dtype);

// The same into the beginning of `out` (1-d, contiguous, long enough, of such a dtype); what lies behind is unchanged.
void flatten_into_(const TensorList& tensors, int64_t alignment, const Tensor& out);

// The inverse: fills the tensors, any strides, from the beginning of such a buffer. They must not share memory.
void unflatten_tensors_(const TensorList& tensors, const Tensor& flat, int64_t alignment);

// Tensors of the shapes and dtypes of `like` (on any device) in the flat buffer that holds their elements, which lives as
// long as any of them. Unlike a view, each has a storage of its own that ends with it: saved alone, it is as long as
// itself.
std::vector<Tensor> buffer_tensors(const Tensor& buffer, const TensorList& like, int64_t alignment);

// ---- memory_table.cpp ----

// Where strided tensors of any device lie and how they are read, to see later whether they are as they were. An int64 tensor
// on the CPU of a row each: the address of the first element, and a hash of dtype, device, sizes and strides.
Tensor memory_table(const TensorList& tensors);

// ---- fingerprint.cpp ----

// The sum, modulo 2^64, of the hashes of the shard's words at their places in the global tensor (element_hash.h): a 0-d
// int64 tensor on the shard's device. Sums of disjoint chunks add up to that of the whole tensor.
Tensor fingerprint_shard(const Tensor& shard, const Ints& global_sizes, const Ints& chunks);
// The sums of many shards on one device, int64 there of shape (shards). Tables as for `pack_shards`, with the sizes of the
// global tensor in place of offsets.
Tensor fingerprint_shards(const TensorList& shards, const Ints& tables);

}  // namespace torchtitan_ext::ops
