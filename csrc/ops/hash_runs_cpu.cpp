#include <atomic>

#include "core/word_sums.h"
#include "ops/hash_runs.h"
#include "ops/run_ranges.h"

namespace torchtitan_ext::ops {
namespace {

using core::Loop;

// Hashing 64 KiB takes some 10 us, as long as waking a thread.
constexpr int64_t kGrainBytes = int64_t{128} << 10;

}  // namespace

uint64_t hash_runs_cpu(const core::RunList& runs, int64_t word_bytes, ParallelFor parallel_for) {
  struct Task {
    RunRanges ranges;
    int64_t word_bytes;
    std::atomic<uint64_t> sum{0};  // of sums: in any order the same
  };
  Task task{RunRanges(runs), word_bytes};
  const auto body = [](int64_t first, int64_t last, void* context) {
    Task& task = *static_cast<Task*>(context);
    uint64_t sum = 0;
    task.ranges.visit(first, last, [&](int64_t src, int64_t dst, const Loop& loop, int64_t run_bytes) {
      sum += core::sum_runs(src, dst, loop, run_bytes, task.word_bytes);
    });
    task.sum.fetch_add(sum, std::memory_order_relaxed);
  };
  const int64_t num_bytes = runs.num_bytes();
  if (num_bytes <= kGrainBytes) {
    if (num_bytes > 0) body(0, num_bytes, &task);
  } else {
    parallel_for(0, num_bytes, kGrainBytes, body, &task);
  }
  return task.sum.load();
}

}  // namespace torchtitan_ext::ops
