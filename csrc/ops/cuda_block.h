#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/hash_tiles.h"

namespace torchtitan_ext::ops {

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

}  // namespace torchtitan_ext::ops
