// Sums of the hashes of the words that a list of runs reads.
#pragma once

#include <cstdint>

#include "core/runs.h"
#include "ops/copy_runs.h"

namespace torchtitan_ext::ops {

// Sources of the runs are addresses. Their destinations are byte positions in the global tensor, of which `word_bytes`
// (1, 2, 4 or 8) make one word. Returns the sum modulo 2^64 (element_hash.h).
uint64_t hash_runs_cpu(const core::RunList& runs, int64_t word_bytes, ParallelFor parallel_for);

// The same on the current stream of the device, without waiting: the sum is added to `*result`, in the device's memory.
// Sources must be aligned to words. Throws std::runtime_error in a build without CUDA.
void hash_runs_cuda(const core::RunList& runs, int64_t word_bytes, uint64_t* result, int32_t device_index);

}  // namespace torchtitan_ext::ops
