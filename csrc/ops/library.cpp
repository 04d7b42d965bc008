// Every schema of the package, on one page. ops.h has the contracts, torchtitan_ext/ops.py the fake kernels, the
// autograd formulas and the version bumps of the ops that end in "_" (the stable ABI can express none of these).
#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

namespace ops = torchtitan_ext::ops;

STABLE_TORCH_LIBRARY(torchtitan_ext, library) {
  library.def("pack_shard(Tensor src, int[] src_offsets, int[] shard_sizes, int[] chunks) -> Tensor");
  library.def("unpack_shard(Tensor dst, int[] dst_offsets, Tensor shard, int[] chunks) -> Tensor");
  library.def("unpack_shard_(Tensor(a!) dst, int[] dst_offsets, Tensor shard, int[] chunks) -> ()");
}

// The kernels choose the device themselves, from the tensors: the same function stands under both keys. It stands under
// the keys of other layouts too, to refuse them in one sentence: the dispatcher's own answer to a sparse tensor is a
// page long.
static void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("pack_shard", TORCH_BOX(&ops::pack_shard));
  library.impl("unpack_shard", TORCH_BOX(&ops::unpack_shard));
  library.impl("unpack_shard_", TORCH_BOX(&ops::unpack_shard_));
}

STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, CPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, CUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, MkldnnCPU, library) { register_kernels(library); }
