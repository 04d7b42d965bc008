#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <cstdint>
#include <vector>

#include "ops/cuda_launch.h"
#include "ops/hash_runs.h"
#include "ops/hash_tiles.h"
#include "ops/run_tables.h"

namespace torchtitan_ext::ops {
namespace {

// The block of a running kernel, for sum_over_block.
class CudaBlock {
 public:
  __device__ explicit CudaBlock(unsigned long long* warp_sums) : warp_sums_(warp_sums) {}
  __device__ uint64_t shuffle_down(uint64_t value, uint32_t distance) {
    return __shfl_down_sync(0xffffffffu, static_cast<unsigned long long>(value), distance);
  }
  __device__ unsigned long long* warp_sums() { return warp_sums_; }
  __device__ void synchronize() { __syncthreads(); }

 private:
  unsigned long long* warp_sums_;
};

// Grid: one block per tile of 1,024 words, as copy_nests. Neighbouring threads read neighbouring words. One atomic
// addition per block.
template <typename Word, typename SomeTable>
__global__ void __launch_bounds__(kTileThreads)
    hash_nests(const __grid_constant__ SomeTable table, unsigned long long* sums) {
  __shared__ unsigned long long warp_sums[kTileWarps];
  CudaBlock block(warp_sums);
  const uint64_t sum = sum_over_block(block, threadIdx.x, hash_nest_tile<Word>(table, blockIdx.x, threadIdx.x));
  if (threadIdx.x == 0) {
    atomicAdd(sums + table.entries[table.entry_of(blockIdx.x)].list, static_cast<unsigned long long>(sum));
  }
}

template <typename Word>
void launch(const std::vector<HashEntry>& entries, uint64_t* sums, cudaStream_t stream) {
  for_each_table<kNestCapacity>(entries, [&](const auto& table) {
    hash_nests<Word><<<table.first_tile[table.count], kTileThreads, 0, stream>>>(
        table, reinterpret_cast<unsigned long long*>(sums));
    check_launch(table, "hash_runs");
  });
}

}  // namespace

void hash_runs_cuda(std::span<const HashedRuns> lists, uint64_t* sums, int32_t device_index) {
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const CurrentDevice current(device_index, "hash_runs");
  const cudaStream_t stream = current_stream(device_index);
  const std::array<std::vector<HashEntry>, 4> entries = make_hash_entries(lists);
  launch<Word1>(entries[0], sums, stream);
  launch<Word2>(entries[1], sums, stream);
  launch<Word4>(entries[2], sums, stream);
  launch<Word8>(entries[3], sums, stream);
}

}  // namespace torchtitan_ext::ops
