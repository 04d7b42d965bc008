// Sums of the hashes of the words that lists of runs read.
#pragma once

#include <cstdint>
#include <span>

#include "core/runs.h"
#include "ops/copy_runs.h"

namespace torchtitan_ext::ops {

// Sources of the runs are addresses. Their destinations are byte positions in the global tensor, of which `word_bytes`
// (1, 2, 4 or 8) make one word.
struct HashedRuns {
  core::RunList runs;
  int64_t word_bytes = 1;
};

// The sum of each list modulo 2^64 (element_hash.h).
void hash_runs_cpu(std::span<const HashedRuns> lists, uint64_t* sums, ParallelFor parallel_for);

// The same on the current stream of the device, without waiting: each sum is added to that in the device's memory.
// Sources must be aligned to words. Throws std::runtime_error in a build without CUDA.
void hash_runs_cuda(std::span<const HashedRuns> lists, uint64_t* sums, int32_t device_index);

}  // namespace torchtitan_ext::ops
