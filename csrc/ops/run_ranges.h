// Walks part of a RunList: how the CPU kernels share the bytes of a list among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/runs.h"

namespace torchtitan_ext::ops {

// Cuts of long runs fall on multiples of a cache line from the beginning of the run, so no item is cut.
constexpr int64_t kCutBytes = 64;
// A run is cut between threads only where both parts stay long.
constexpr int64_t kCutRunBytes = int64_t{64} << 10;

// Calls visit(src, dst, loop, run_bytes) for stretches of runs at even distances: `loop.count` runs of `run_bytes`
// each, the first at `src` and `dst` (addresses, or whatever the offsets of the list count from).
class RunRanges {
 public:
  explicit RunRanges(const core::RunList& runs) : runs_(runs) {}

  // The runs that belong to bytes [first, last) of the list, as if its runs lay one behind the other. Disjoint ranges
  // that cover all bytes visit each byte once.
  template <typename Visit>
  void visit(int64_t first, int64_t last, const Visit& visit) const {
    int64_t first_byte = 0;  // of the nest; summed up anew for each range, since a table of the sums costs more
    for (const core::RunNest& nest : runs_.nests()) {
      if (first_byte >= last) return;
      const int64_t num_bytes = nest.run_bytes * nest.num_runs;
      const int64_t begin = std::max<int64_t>(first - first_byte, 0);
      const int64_t end = std::min(last - first_byte, num_bytes);
      first_byte += num_bytes;
      if (begin >= end) continue;
      const std::span<const core::Loop> loops = runs_.loops_of(nest);
      if (end - begin == num_bytes) {
        visit_runs(nest, loops, 0, nest.num_runs, visit);  // the rule, and no division
      } else if (nest.run_bytes >= kCutRunBytes) {
        visit_bytes(nest, loops, cut(nest, begin), cut(nest, end), visit);
      } else {
        // A run belongs to the range that holds its first byte.
        const int64_t first_run = (begin + nest.run_bytes - 1) / nest.run_bytes;
        visit_runs(nest, loops, first_run, (end + nest.run_bytes - 1) / nest.run_bytes, visit);
      }
    }
  }

  // All runs, in order.
  template <typename Visit>
  static void visit_all(const core::RunList& runs, const Visit& visit) {
    for (const core::RunNest& nest : runs.nests()) visit_runs(nest, runs.loops_of(nest), 0, nest.num_runs, visit);
  }

 private:
  static int64_t cut(const core::RunNest& nest, int64_t byte) { return byte - byte % nest.run_bytes % kCutBytes; }

  // Runs [first, last) of a nest, counted in the order of its loops.
  template <typename Visit>
  static void visit_runs(const core::RunNest& nest, std::span<const core::Loop> loops, int64_t first, int64_t last,
                         const Visit& visit) {
    if (loops.empty()) {
      if (first < last) visit(nest.src_bytes, nest.dst_bytes, core::Loop{last - first, 0, 0}, nest.run_bytes);
      return;
    }
    const core::Loop& inner = loops.back();
    while (first < last) {
      // Where the inner loop stands, from the number of the run; a division per inner loop costs nothing beside the
      // loop.
      int64_t rest = first / inner.count;
      const int64_t inner_index = first % inner.count;
      int64_t src = nest.src_bytes + inner_index * inner.src_stride_bytes;
      int64_t dst = nest.dst_bytes + inner_index * inner.dst_stride_bytes;
      for (size_t index = loops.size() - 1; index-- > 0;) {
        const int64_t position = rest % loops[index].count;
        rest /= loops[index].count;
        src += position * loops[index].src_stride_bytes;
        dst += position * loops[index].dst_stride_bytes;
      }
      const int64_t count = std::min(inner.count - inner_index, last - first);
      visit(src, dst, core::Loop{count, inner.src_stride_bytes, inner.dst_stride_bytes}, nest.run_bytes);
      first += count;
    }
  }

  // Bytes [first, last) of a nest of long runs.
  template <typename Visit>
  static void visit_bytes(const core::RunNest& nest, std::span<const core::Loop> loops, int64_t first, int64_t last,
                          const Visit& visit) {
    while (first < last) {
      const int64_t run = first / nest.run_bytes;
      const int64_t begin = first % nest.run_bytes;
      const int64_t num_bytes = std::min(nest.run_bytes - begin, last - first);
      const core::RunNest part{nest.src_bytes + begin, nest.dst_bytes + begin, num_bytes, nest.num_runs, 0, 0};
      visit_runs(part, loops, run, run + 1, visit);
      first += num_bytes;
    }
  }

  const core::RunList& runs_;
};

}  // namespace torchtitan_ext::ops
