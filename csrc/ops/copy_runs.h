// The one primitive under all ops: copy the runs of a list from one memory to another.
#pragma once

#include <cstdint>

#include "core/runs.h"

namespace torchtitan_ext::ops {

// Calls body(first, last, context) for disjoint ranges that cover [begin, end), maybe on several threads, none of them
// shorter than `grain` but the last. `torch_parallel_for` has this form; so the kernel can be measured and tested
// without torch.
using RangeBody = void (*)(int64_t first, int64_t last, void* context);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context);

// Copies every run of `runs`, whose offsets count from the addresses `src` and `dst` (0 where the offsets are
// addresses). The caller has checked that all of it lies in memory it owns and that source and destination do not
// overlap. This form is the specification: the CUDA kernel writes the same bytes.
void copy_runs_cpu(const core::RunList& runs, uintptr_t src, uintptr_t dst, ParallelFor parallel_for);

// The same on the current stream of the device, without waiting for it. Throws std::runtime_error in a build without
// CUDA.
void copy_runs_cuda(const core::RunList& runs, uintptr_t src, uintptr_t dst, int32_t device_index);

}  // namespace torchtitan_ext::ops
