#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "ops/blocks.h"
#include "ops/cuda_launch.h"

namespace torchtitan_ext::ops {
namespace {

constexpr int kThreads = 256;

struct Place {
  const void* memory;
  int64_t number;
};

template <typename Element>
__device__ Place place_of(const BlockedPart& part, int64_t element) {
  int64_t at[kMaxBlockDims];
  for (int64_t dim = 0; dim < part.num_dims; ++dim) at[dim] = part.first[dim];
  const Element* memory = reinterpret_cast<const Element*>(part.address);
  for (int64_t loop = part.num_loops - 1; loop >= 0; --loop) {
    const BlockedPart::Loop& one = part.loops[loop];
    const int64_t index = element % one.size;
    element /= one.size;
    memory += index * one.stride;
    at[one.dim] += index * one.step;
  }
  int64_t number = part.start;
  for (int64_t dim = 0; dim < part.num_dims; ++dim) number += at[dim] / part.block[dim] * part.grid_strides[dim];
  return {memory, number};
}

// A thread per element. Where all elements of a warp are of one block, which is what most warps see, one atomic for all.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    find_amax(const __grid_constant__ BlockedPart part, BlockDtype rounded, unsigned int* amax) {
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool is_inside = element < part.num_elements;
  const unsigned int active = __ballot_sync(0xffffffffu, is_inside);
  if (!is_inside) return;
  const Place place = place_of<Element>(part, element);
  const unsigned int bits = magnitude_bits(rounded_element(*static_cast<const Element*>(place.memory), rounded));
  const int leader = __ffs(static_cast<int>(active)) - 1;
  const int64_t of_leader = __shfl_sync(active, place.number, leader);
  if (__all_sync(active, place.number == of_leader)) {
    const unsigned int most = __reduce_max_sync(active, bits);
    if (static_cast<int>(threadIdx.x % 32) == leader) atomicMax(amax + place.number, most);
  } else {
    atomicMax(amax + place.number, bits);
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ BlockedPart part, BlockDtype rounded,
                                                     Scaling scaling, const float* factors, uint8_t* out) {
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (element >= part.num_elements) return;
  const Place place = place_of<Element>(part, element);
  const float value = rounded_element(*static_cast<const Element*>(place.memory), rounded);
  const float factor = factors[place.number];
  const float scaled = scaling.divides ? value / factor : value * factor;
  out[element] = scaling.is_e5m2 ? scaled_bits<true>(scaled) : scaled_bits<false>(scaled);
}

template <typename Work>
void launch(BlockDtype dtype, const BlockedPart& part, int32_t device_index, const Work& work) {
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const CurrentDevice current(device_index, "blocks");
  const cudaStream_t stream = current_stream(device_index);
  const auto num_blocks = static_cast<unsigned int>((part.num_elements + kThreads - 1) / kThreads);
  if (dtype == BlockDtype::kFloat) work.template operator()<float>(num_blocks, stream);
  if (dtype == BlockDtype::kDouble) work.template operator()<double>(num_blocks, stream);
  if (dtype == BlockDtype::kBFloat16) work.template operator()<c10::BFloat16>(num_blocks, stream);
  if (dtype == BlockDtype::kHalf) work.template operator()<c10::Half>(num_blocks, stream);
  check_launch(part, "blocks");
}

}  // namespace

void block_amax_cuda(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, float* amax, int32_t device_index) {
  launch(dtype, part, device_index, [&]<typename Element>(unsigned int num_blocks, cudaStream_t stream) {
    find_amax<Element><<<num_blocks, kThreads, 0, stream>>>(part, rounded, reinterpret_cast<unsigned int*>(amax));
  });
}

void quantize_blocks_cuda(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, Scaling scaling,
                          const float* factors, uint8_t* out, int32_t device_index) {
  launch(dtype, part, device_index, [&]<typename Element>(unsigned int num_blocks, cudaStream_t stream) {
    quantize<Element><<<num_blocks, kThreads, 0, stream>>>(part, rounded, scaling, factors, out);
  });
}

}  // namespace torchtitan_ext::ops
