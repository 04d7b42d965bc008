// Runs: what is left of a copy between two strided boxes once everything contiguous has been joined.
//
// A run is one contiguous copy. A box copy is a loop nest around a run: with source strides s and destination strides d,
//
//     for i in [0, count_0): for j in [0, count_1): ...
//       copy(dst + i * d_0 + j * d_1 + ..., src + i * s_0 + j * s_1 + ..., run_bytes)
//
// The nest is kept, not its runs: 128 MiB in runs of 256 B are half a million copies and one nest.
//
// Example: columns [2, 4) of a 3 x 8 float32 tensor into a contiguous 3 x 2 shard. The rows are contiguous on the
// destination's side only, so one nest is left: run_bytes 8, one loop {count 3, src_stride 32, dst_stride 8}, source
// offset 8. Rows [1, 3) instead are contiguous on both sides: run_bytes 64 and no loop.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// One contiguous copy, in bytes from the beginning of either side.
struct Run {
  int64_t src_bytes = 0;
  int64_t dst_bytes = 0;
  int64_t num_bytes = 0;

  bool operator==(const Run&) const = default;
};

struct Loop {
  int64_t count = 0;
  int64_t src_stride_bytes = 0;
  int64_t dst_stride_bytes = 0;

  bool operator==(const Loop&) const = default;
};

// `num_runs` is the product of the counts of its loops (1 without loops), which are
// `loops()[first_loop, first_loop + num_loops)` of the RunList that holds it, outermost first. Of loops with positive strides the outermost has the
// largest destination stride, so the destination is written in order.
struct RunNest {
  int64_t src_bytes = 0;
  int64_t dst_bytes = 0;
  int64_t run_bytes = 0;
  int64_t num_runs = 1;
  int64_t first_loop = 0;
  int64_t num_loops = 0;
};

// One side of a box copy: where its first element lies, in bytes, and the strides of its dims, in elements.
struct BoxSide {
  int64_t offset_bytes = 0;
  std::span<const int64_t> strides;
};

class RunList {
 public:
  // Adds the copy of a box of `sizes` elements of `item_bytes` each. Joins it with what was added before where both
  // sides go on where the last nest stops, or where it repeats the last nest at a constant distance. A box with a size
  // 0 adds nothing. Strides are not negative. Throws std::overflow_error, before anything is added.
  void append_box(std::span<const int64_t> sizes, const BoxSide& src, const BoxSide& dst, int64_t item_bytes);

  // Adds one contiguous copy, joined in the same way.
  void append_bytes(int64_t src_bytes, int64_t dst_bytes, int64_t num_bytes);

  // What is added from here on is not joined with what is there: another pair of tensors begins, and a chance
  // neighbourhood of their addresses would make loops that help nobody.
  void start_pair() { joinable_from_ = nests_.size(); }

  void reserve(size_t num_nests) { nests_.reserve(num_nests); }

  const std::vector<RunNest>& nests() const { return nests_; }
  const std::vector<Loop>& loops() const { return loops_; }
  std::span<const Loop> loops_of(const RunNest& nest) const {
    return std::span<const Loop>(loops_).subspan(nest.first_loop, nest.num_loops);
  }

  // Of all runs together.
  int64_t num_bytes() const { return num_bytes_; }

  // From the first to one past the last byte that the list touches on one side.
  Interval src_extent() const;
  Interval dst_extent() const;

  // Every single run, in the order in which the nests are walked. For tests and small lists.
  std::vector<Run> enumerate() const;

 private:
  void join_or_push(int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes, std::span<const Loop> loops);
  bool extend_run(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes, std::span<const Loop> loops);
  bool extend_loop(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes, std::span<const Loop> loops);
  bool repeat(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes, std::span<const Loop> loops);

  std::vector<RunNest> nests_;
  std::vector<Loop> loops_;  // of all nests, in their order; those of the last nest stand last
  size_t joinable_from_ = 0;
  int64_t num_bytes_ = 0;
};

}  // namespace torchtitan_ext::core
