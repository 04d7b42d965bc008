// Sums of the hashes (element_hash.h) of words in the host's memory.
#pragma once

#include <cstdint>

#include "core/runs.h"

namespace torchtitan_ext::core {

// Of `loop.count` runs of `run_bytes`, whole words of `word_bytes` (1, 2, 4 or 8): the first lies at the address `src`
// and stands at byte `dst` of the global tensor.
uint64_t sum_runs(int64_t src, int64_t dst, const Loop& loop, int64_t run_bytes, int64_t word_bytes);

}  // namespace torchtitan_ext::core
