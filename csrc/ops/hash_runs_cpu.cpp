#include <algorithm>
#include <atomic>
#include <vector>

#include "core/word_sums.h"
#include "ops/hash_runs.h"
#include "ops/run_ranges.h"

namespace torchtitan_ext::ops {
namespace {

using core::Loop;

// Hashing 64 KiB takes some 10 us, as long as waking a thread.
constexpr int64_t kGrainBytes = int64_t{128} << 10;

// One list, by all threads where it is long.
uint64_t hash_list(const HashedRuns& list, ParallelFor parallel_for) {
  struct Task {
    RunRanges ranges;
    int64_t word_bytes;
    std::atomic<uint64_t> sum{0};  // of sums: in any order the same
  };
  Task task{RunRanges(list.runs), list.word_bytes};
  const auto body = [](int64_t first, int64_t last, void* context) {
    Task& task = *static_cast<Task*>(context);
    uint64_t sum = 0;
    task.ranges.visit(first, last, [&](int64_t src, int64_t dst, const Loop& loop, int64_t run_bytes) {
      sum += core::sum_runs(src, dst, loop, run_bytes, task.word_bytes);
    });
    task.sum.fetch_add(sum, std::memory_order_relaxed);
  };
  const int64_t num_bytes = list.runs.num_bytes();
  if (num_bytes <= kGrainBytes) {
    if (num_bytes > 0) body(0, num_bytes, &task);
  } else {
    parallel_for(0, num_bytes, kGrainBytes, body, &task);
  }
  return task.sum.load();
}

}  // namespace

void hash_runs_cpu(std::span<const HashedRuns> lists, uint64_t* sums, ParallelFor parallel_for) {
  struct Task {
    std::span<const HashedRuns> lists;
    uint64_t* sums;
    ParallelFor parallel_for;
    std::vector<size_t> short_ones;  // each by one thread
  };
  Task task{lists, sums, parallel_for, {}};
  int64_t short_bytes = 0;
  for (size_t number = 0; number < lists.size(); ++number) {
    const int64_t num_bytes = lists[number].runs.num_bytes();
    if (num_bytes > kGrainBytes) {
      sums[number] = hash_list(lists[number], parallel_for);
    } else {
      task.short_ones.push_back(number);
      short_bytes += num_bytes;
    }
  }
  const auto body = [](int64_t first, int64_t last, void* context) {
    const Task& task = *static_cast<const Task*>(context);
    for (int64_t at = first; at < last; ++at) {
      const size_t number = task.short_ones[static_cast<size_t>(at)];
      task.sums[number] = hash_list(task.lists[number], task.parallel_for);
    }
  };
  const auto count = static_cast<int64_t>(task.short_ones.size());
  if (short_bytes <= kGrainBytes) {
    body(0, count, &task);
  } else {
    parallel_for(0, count, std::max<int64_t>(1, count * kGrainBytes / short_bytes), body, &task);
  }
}

}  // namespace torchtitan_ext::ops
