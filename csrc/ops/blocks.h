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
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>

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

TTE_HOST_DEVICE inline uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

TTE_HOST_DEVICE inline float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// The bits of the absolute value, which grow with it; those of infinity for a NaN.
TTE_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  constexpr uint32_t kInfinity = 0x7f800000;
  const uint32_t bits = bits_of(value) & 0x7fffffff;
  return bits < kInfinity ? bits : kInfinity;
}

// A float of at most the largest number of the dtype, as its bits; the same as c10's conversions, without branches.
template <bool kIsE5m2>
TTE_HOST_DEVICE inline uint8_t fp8_bits(float value) {
  constexpr uint32_t kMantissaBits = kIsE5m2 ? 2 : 3;
  constexpr uint32_t kBias = kIsE5m2 ? 15 : 7;
  constexpr uint32_t kShift = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = (127 - kBias + 1) << 23;
  constexpr uint32_t kSubnormals = (127 - kBias + kShift + 1) << 23;  // a float whose last bit is theirs
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kSubnormals)) - kSubnormals;
  const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
  const uint32_t normal = (magnitude - ((127 - kBias) << 23) + half) >> kShift;
  return static_cast<uint8_t>((magnitude < kSmallestNormal ? subnormal : normal) | (bits >> 24 & 0x80));
}

template <bool kIsE5m2>
TTE_HOST_DEVICE inline uint8_t scaled_bits(float scaled) {
  constexpr float kMost = kIsE5m2 ? 57344.0f : 448.0f;
  scaled = scaled < -kMost ? -kMost : scaled;
  return fp8_bits<kIsE5m2>(scaled > kMost ? kMost : scaled);
}

}  // namespace torchtitan_ext::ops
