// Blocks of a tensor, each with one scale, seen from a part of the tensor that lies anywhere: the largest element of each
// block, and elements divided by their scales.
//
// A part is a strided view whose dims step through dims of the tensor. Blocks tile the tensor from its first element on,
// the last ones may be cut off; the *grid* has a number for each of them, in row-major order, from `start` on.
//
//   rows 3-4 of a 6 x 4 tensor, blocks of 2 x 4: first {3, 0}, block {2, 4}, grid_strides {1, 1}: row 3 lies in block
//   start + 1, row 4 in block start + 2
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define TTE_HOST_DEVICE __host__ __device__
#else
#define TTE_HOST_DEVICE
#endif

namespace torchtitan_ext::ops {

inline constexpr int64_t kMaxBlockDims = 16;

struct BlockedPart {
  struct Loop {
    int64_t size = 1;
    int64_t stride = 0;  // elements of memory
    int64_t dim = 0;     // of the tensor
    int64_t step = 0;    // elements of that dim
  };
  uintptr_t address = 0;
  int64_t num_elements = 0;
  int64_t num_loops = 0;
  int64_t num_dims = 0;  // of the tensor
  int64_t start = 0;     // of the grid
  Loop loops[kMaxBlockDims];
  int64_t first[kMaxBlockDims] = {};  // of the part, in the tensor
  int64_t block[kMaxBlockDims] = {};
  int64_t grid_strides[kMaxBlockDims] = {};
};

// What the elements are, and what becomes of each before anything else: it is rounded to a dtype that has no more bits.
enum class BlockDtype : uint8_t { kFloat, kDouble, kBFloat16, kHalf };

struct Scaling {
  bool divides = false;  // by its factor, instead of a multiplication
  bool is_e5m2 = false;  // else e4m3fn
};

// `amax[number]` becomes the largest absolute value of each block's elements, and of what it was; infinite for a NaN.
void block_amax_cpu(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, float* amax);
void block_amax_cuda(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, float* amax, int32_t device_index);

// Each element by the factor of its block, clamped to what fp8 has, as fp8 in row-major order of the part.
void quantize_blocks_cpu(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, Scaling scaling,
                         const float* factors, uint8_t* out);
void quantize_blocks_cuda(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, Scaling scaling,
                          const float* factors, uint8_t* out, int32_t device_index);

template <typename Element>
TTE_HOST_DEVICE inline float rounded_element(Element element, BlockDtype rounded) {
  const float value = static_cast<float>(element);
  if (rounded == BlockDtype::kBFloat16) return static_cast<float>(c10::BFloat16(value));
  if (rounded == BlockDtype::kHalf) return static_cast<float>(c10::Half(value));
  return value;
}

// The bits of the absolute value, which grow with it; those of infinity for a NaN.
TTE_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  constexpr uint32_t kInfinity = 0x7f800000;
#ifdef __CUDA_ARCH__
  const uint32_t bits = __float_as_uint(value) & 0x7fffffff;
#else
  const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffff;
#endif
  return bits < kInfinity ? bits : kInfinity;
}

TTE_HOST_DEVICE inline uint8_t scaled_bits(float value, float factor, Scaling scaling) {
  const float most = scaling.is_e5m2 ? 57344.0f : 448.0f;
  float scaled = scaling.divides ? value / factor : value * factor;
  scaled = scaled < -most ? -most : scaled > most ? most : scaled;
  return scaling.is_e5m2 ? c10::Float8_e5m2(scaled).x : c10::Float8_e4m3fn(scaled).x;
}

}  // namespace torchtitan_ext::ops
