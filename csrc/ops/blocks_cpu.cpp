#include <algorithm>
#include <atomic>

#include "ops/blocks.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

// For machines with AVX2 the loops over elements are compiled once more.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TTE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define TTE_WIDE
#endif

constexpr int64_t kGrainElements = int64_t{1} << 14;

TTE_WIDE void round_to_bfloat16(float* values, int64_t count) {  // no NaNs
  for (int64_t index = 0; index < count; ++index) {
    const uint32_t bits = bits_of(values[index]);
    values[index] = float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  }
}

TTE_WIDE uint32_t largest_magnitude(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t index = 0; index < count; ++index) most = std::max(most, magnitude_bits(values[index]));
  return most;
}

TTE_WIDE void multiply(float* values, int64_t count, float factor) {
  for (int64_t index = 0; index < count; ++index) values[index] *= factor;
}

TTE_WIDE void divide(float* values, int64_t count, float factor) {
  for (int64_t index = 0; index < count; ++index) values[index] /= factor;
}

TTE_WIDE void to_e4m3fn(const float* __restrict values, int64_t count, uint8_t* __restrict out) {
  for (int64_t index = 0; index < count; ++index) out[index] = scaled_bits<false>(values[index]);
}

TTE_WIDE void to_e5m2(const float* __restrict values, int64_t count, uint8_t* __restrict out) {
  for (int64_t index = 0; index < count; ++index) out[index] = scaled_bits<true>(values[index]);
}

// Calls `visit(block number, memory of the first element, stride, count, position of the first element in the part)` for
// runs of elements of one block, of rows `begin` to `end` of the part: a row is its last loop.
template <typename Element, typename Visit>
void visit_rows(const BlockedPart& part, int64_t begin, int64_t end, const Visit& visit) {
  const BlockedPart::Loop row_loop = part.num_loops > 0 ? part.loops[part.num_loops - 1] : BlockedPart::Loop();
  const auto* memory = reinterpret_cast<const Element*>(part.address);
  for (int64_t row = begin; row < end; ++row) {
    int64_t at[kMaxBlockDims];
    std::copy_n(part.first, part.num_dims, at);
    const Element* element = memory;
    for (int64_t rest = row, loop = part.num_loops - 2; loop >= 0; --loop) {
      const BlockedPart::Loop& outer = part.loops[loop];
      const int64_t index = rest % outer.size;
      rest /= outer.size;
      element += index * outer.stride;
      at[outer.dim] += index * outer.step;
    }
    int64_t number = part.start;
    for (int64_t dim = 0; dim < part.num_dims; ++dim) {
      if (part.num_loops == 0 || dim != row_loop.dim) number += at[dim] / part.block[dim] * part.grid_strides[dim];
    }
    if (part.num_loops == 0) {
      visit(number, element, 0, 1, row);
      continue;
    }
    const int64_t block = part.block[row_loop.dim];
    for (int64_t index = 0; index < row_loop.size;) {
      const int64_t place = at[row_loop.dim] + index * row_loop.step;
      int64_t count = row_loop.size - index;
      if (row_loop.step > 0) {
        const int64_t left = block - place % block;
        count = std::min(count, (left + row_loop.step - 1) / row_loop.step);
      }
      visit(number + place / block * part.grid_strides[row_loop.dim], element + index * row_loop.stride,
            row_loop.stride, count, row * row_loop.size + index);
      index += count;
    }
  }
}

template <typename Element, typename Visit>
void visit_part(const BlockedPart& part, const Visit& visit) {
  const int64_t row_size = part.num_loops > 0 ? part.loops[part.num_loops - 1].size : 1;
  const int64_t num_rows = part.num_elements / row_size;
  struct Task {
    const BlockedPart& part;
    const Visit& visit;
  } task{part, visit};
  const auto body = [](int64_t begin, int64_t end, void* context) {
    const Task& task = *static_cast<Task*>(context);
    visit_rows<Element>(task.part, begin, end, task.visit);
  };
  const int64_t grain = std::max<int64_t>(1, kGrainElements / row_size);
  if (num_rows <= grain) return body(0, num_rows, &task);
  parallel_for(0, num_rows, grain, body, &task);
}

template <typename Work>
void with_element(BlockDtype dtype, const Work& work) {
  if (dtype == BlockDtype::kFloat) return work.template operator()<float>();
  if (dtype == BlockDtype::kDouble) return work.template operator()<double>();
  if (dtype == BlockDtype::kBFloat16) return work.template operator()<c10::BFloat16>();
  work.template operator()<c10::Half>();
}

// Calls `work(values, count, position of the first)` for a run of elements, a few at a time.
template <typename Element, typename Work>
void in_floats(const Element* element, int64_t stride, int64_t count, BlockDtype rounded, const Work& work) {
  constexpr int64_t kFew = 512;
  float values[kFew];
  for (int64_t from = 0; from < count; from += kFew) {
    const int64_t few = std::min(kFew, count - from);
    const Element* first = element + from * stride;
    if (stride == 1) {
      for (int64_t index = 0; index < few; ++index) values[index] = static_cast<float>(first[index]);
    } else {
      for (int64_t index = 0; index < few; ++index) values[index] = static_cast<float>(first[index * stride]);
    }
    if (rounded == BlockDtype::kBFloat16) {
      round_to_bfloat16(values, few);
    } else if (rounded == BlockDtype::kHalf) {
      for (int64_t index = 0; index < few; ++index) values[index] = rounded_element(values[index], rounded);
    }
    work(values, few, from);
  }
}

void raise_to(float& amax, uint32_t bits) {
  std::atomic_ref<uint32_t> shared(reinterpret_cast<uint32_t&>(amax));
  uint32_t before = shared.load(std::memory_order_relaxed);
  while (before < bits && !shared.compare_exchange_weak(before, bits, std::memory_order_relaxed)) {
  }
}

}  // namespace

void block_amax_cpu(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, float* amax) {
  with_element(dtype, [&]<typename Element>() {
    visit_part<Element>(part, [&](int64_t number, const Element* element, int64_t stride, int64_t count, int64_t) {
      uint32_t most = 0;
      in_floats(element, stride, count, BlockDtype::kFloat, [&](const float* values, int64_t few, int64_t) {
        most = std::max(most, largest_magnitude(values, few));
      });
      // The largest one rounded is the largest of the rounded ones.
      raise_to(amax[number], magnitude_bits(rounded_element(float_of(most), rounded)));
    });
  });
}

void quantize_blocks_cpu(const BlockedPart& part, BlockDtype dtype, BlockDtype rounded, Scaling scaling,
                         const float* factors, uint8_t* out) {
  with_element(dtype, [&]<typename Element>() {
    visit_part<Element>(part, [&](int64_t number, const Element* element, int64_t stride, int64_t count, int64_t at) {
      const float factor = factors[number];
      in_floats(element, stride, count, rounded, [&](float* values, int64_t few, int64_t from) {
        (scaling.divides ? divide : multiply)(values, few, factor);
        (scaling.is_e5m2 ? to_e5m2 : to_e4m3fn)(values, few, out + at + from);
      });
    });
  });
}

}  // namespace torchtitan_ext::ops
