// Every schema of the package, on one page. ops.h has the contracts, torchtitan_ext/ops.py the fake kernels, the
// autograd formulas and the version bumps of the ops that end in "_" (the stable ABI can express none of these).
#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

namespace ops = torchtitan_ext::ops;

STABLE_TORCH_LIBRARY(torchtitan_ext, library) {
  library.def("pack_shard(Tensor src, SymInt[] src_offsets, SymInt[] shard_sizes, SymInt[] chunks) -> Tensor");
  library.def("unpack_shard(Tensor dst, SymInt[] dst_offsets, Tensor shard, SymInt[] chunks) -> Tensor");
  library.def("unpack_shard_(Tensor(a!) dst, SymInt[] dst_offsets, Tensor shard, SymInt[] chunks) -> ()");
  library.def("pack_shards(Tensor[] src, SymInt[] tables) -> Tensor[]");
  library.def("unpack_shards_(Tensor(a!)[] dst, Tensor[] shards, SymInt[] tables) -> ()");
  library.def("flatten_tensors(Tensor[] tensors, int alignment, ScalarType dtype) -> Tensor");
  library.def("flatten_into_(Tensor[] tensors, int alignment, Tensor(a!) out) -> ()");
  library.def("unflatten_tensors_(Tensor(a!)[] tensors, Tensor flat, int alignment) -> ()");
  // For staging: its results share memory with the buffer, which torch.compile cannot know.
  library.def("buffer_tensors(Tensor buffer, Tensor[] like, int alignment) -> Tensor[]");
  library.def("memory_table(Tensor[] tensors) -> Tensor");
  // Kernels in csrc/dist, in a library of their own.
  library.def("broadcast_coalesced_(Tensor(a!)[] tensors, str group_name, int src, int bucket_bytes) -> ()");
  library.def(
      "exchange_runs_(Tensor[] sources, Tensor(a!)[] targets, Tensor sends, Tensor receives, str group_name, int "
      "digest, "
      "int bucket_bytes, float timeout_seconds) -> ()");
  library.def("check_broadcast(Tensor[] tensors) -> (int[] digest, int[] positions, str reason)");
  library.def("fingerprint_shard(Tensor shard, SymInt[] global_sizes, SymInt[] chunks) -> Tensor");
  library.def("fingerprint_shards(Tensor[] shards, SymInt[] tables) -> Tensor");
}

// The kernels choose the device themselves, from the tensors: the same function stands under both keys. It stands under
// the keys of other layouts too, to refuse them in one sentence: the dispatcher's own answer to a sparse tensor is a
// page long.
static void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("pack_shard", TORCH_BOX(&ops::pack_shard));
  library.impl("unpack_shard", TORCH_BOX(&ops::unpack_shard));
  library.impl("unpack_shard_", TORCH_BOX(&ops::unpack_shard_));
  library.impl("pack_shards", TORCH_BOX(&ops::pack_shards));
  library.impl("unpack_shards_", TORCH_BOX(&ops::unpack_shards_));
  library.impl("flatten_tensors", TORCH_BOX(&ops::flatten_tensors));
  library.impl("flatten_into_", TORCH_BOX(&ops::flatten_into_));
  library.impl("unflatten_tensors_", TORCH_BOX(&ops::unflatten_tensors_));
  library.impl("fingerprint_shard", TORCH_BOX(&ops::fingerprint_shard));
  library.impl("fingerprint_shards", TORCH_BOX(&ops::fingerprint_shards));
}

STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, CPU, library) { register_kernels(library); }
// Of tensors on any device, whose memory is not touched.
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, CompositeExplicitAutograd, library) {
  library.impl("buffer_tensors", TORCH_BOX(&ops::buffer_tensors));
  library.impl("memory_table", TORCH_BOX(&ops::memory_table));
}
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, CUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCUDA, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, MkldnnCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCPU, library) { register_kernels(library); }
STABLE_TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCUDA, library) { register_kernels(library); }
