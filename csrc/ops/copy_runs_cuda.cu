// Launches the tiles of run_tiles.h. Needs the CUDA runtime alone, linked statically: one binary loads beside CPU
// torch and beside any CUDA torch; torch's current stream is asked for through a symbol that only a CUDA torch has.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "ops/copy_runs.h"
#include "ops/cuda_launch.h"
#include "ops/run_tables.h"

namespace torchtitan_ext::ops {
namespace {

// Grid: one block per tile. Reads and writes are 16 bytes a thread, neighbouring threads side by side, where the
// alignment of both sides allows. The table stays in the constant bank of the kernel's arguments.
template <typename SomeTable>
__global__ void __launch_bounds__(kTileThreads) copy_spans(const __grid_constant__ SomeTable table) {
  copy_span_tile(table, blockIdx.x, threadIdx.x);
}

// Grid: one block per tile of 1,024 words. Writes are coalesced for a contiguous destination.
template <typename Word, typename SomeTable>
__global__ void __launch_bounds__(kTileThreads) copy_nests(const __grid_constant__ SomeTable table) {
  copy_nest_tile<Word>(table, blockIdx.x, threadIdx.x);
}

template <typename Word>
void launch_nests(const std::vector<NestEntry>& entries, cudaStream_t stream) {
  for_each_table<kNestCapacity>(entries, [&](const auto& table) {
    copy_nests<Word><<<table.first_tile[table.count], kTileThreads, 0, stream>>>(table);
    check_launch(table, "copy_runs");
  });
}

}  // namespace

void copy_runs_cuda(const core::RunList& runs, uintptr_t src, uintptr_t dst, int32_t device_index) {
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const CurrentDevice current(device_index, "copy_runs");
  const cudaStream_t stream = current_stream(device_index);
  const CopyEntries entries = make_copy_entries(runs, src, dst);
  for_each_table<kSpanCapacity>(entries.spans, [&](const auto& table) {
    copy_spans<<<table.first_tile[table.count], kTileThreads, 0, stream>>>(table);
    check_launch(table, "copy_runs");
  });
  launch_nests<Word1>(entries.nests[0], stream);
  launch_nests<Word2>(entries.nests[1], stream);
  launch_nests<Word4>(entries.nests[2], stream);
  launch_nests<Word8>(entries.nests[3], stream);
  launch_nests<Word16>(entries.nests[4], stream);
}

}  // namespace torchtitan_ext::ops
