#include "core/runs.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Loops of one box, outermost first, on the stack for every tensor in practice.
struct BoxDims {
  std::vector<Loop> loops;
  int64_t run_bytes = 0;
};

int64_t product_of_counts(std::span<const Loop> loops) {
  int64_t product = 1;
  for (const Loop& loop : loops) product = checked_mul(product, loop.count);
  return product;
}

Interval extent_of(int64_t offset, int64_t run_bytes, std::span<const Loop> loops, int64_t Loop::* stride) {
  Interval extent{offset, checked_add(offset, run_bytes)};
  for (const Loop& loop : loops) extent.end = checked_add(extent.end, checked_mul(loop.count - 1, loop.*stride));
  return extent;
}

Interval join(const Interval& left, const Interval& right) {
  return {std::min(left.begin, right.begin), std::max(left.end, right.end)};
}

// From dims to the shortest equivalent nest: dims of size 1 vanish, the destination is walked in order of its memory,
// the contiguous inner dims become the run, and loops of which one continues the other become one.
BoxDims simplify(std::span<const int64_t> sizes, const BoxSide& src, const BoxSide& dst, int64_t item_bytes) {
  BoxDims box;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 1) continue;
    box.loops.push_back(
        {sizes[dim], checked_mul(src.strides[dim], item_bytes), checked_mul(dst.strides[dim], item_bytes)});
  }
  const auto outer_first = [](const Loop& left, const Loop& right) {
    return left.dst_stride_bytes > right.dst_stride_bytes;
  };
  if (!std::is_sorted(box.loops.begin(), box.loops.end(), outer_first)) {
    std::stable_sort(box.loops.begin(), box.loops.end(), outer_first);
  }

  box.run_bytes = item_bytes;
  while (!box.loops.empty()) {
    const Loop& inner = box.loops.back();
    if (inner.src_stride_bytes != box.run_bytes || inner.dst_stride_bytes != box.run_bytes) break;
    box.run_bytes = checked_mul(box.run_bytes, inner.count);
    box.loops.pop_back();
  }

  size_t kept = box.loops.size();
  for (size_t index = box.loops.size(); index-- > 0;) {
    const Loop outer = box.loops[index];
    if (kept < box.loops.size() &&
        outer.src_stride_bytes == checked_mul(box.loops[kept].count, box.loops[kept].src_stride_bytes) &&
        outer.dst_stride_bytes == checked_mul(box.loops[kept].count, box.loops[kept].dst_stride_bytes)) {
      box.loops[kept].count = checked_mul(box.loops[kept].count, outer.count);
    } else {
      box.loops[--kept] = outer;
    }
  }
  box.loops.erase(box.loops.begin(), box.loops.begin() + kept);
  return box;
}

}  // namespace

void RunList::append_box(std::span<const int64_t> sizes, const BoxSide& src, const BoxSide& dst, int64_t item_bytes) {
  for (const int64_t size : sizes) {
    if (size == 0) return;
  }
  const BoxDims box = simplify(sizes, src, dst, item_bytes);
  extent_of(src.offset_bytes, box.run_bytes, box.loops, &Loop::src_stride_bytes);  // for their overflow checks
  extent_of(dst.offset_bytes, box.run_bytes, box.loops, &Loop::dst_stride_bytes);
  join_or_push(src.offset_bytes, dst.offset_bytes, box.run_bytes, box.loops);
}

void RunList::append_bytes(int64_t src_bytes, int64_t dst_bytes, int64_t num_bytes) {
  checked_add(src_bytes, num_bytes);
  checked_add(dst_bytes, num_bytes);
  if (num_bytes != 0) join_or_push(src_bytes, dst_bytes, num_bytes, {});
}

void RunList::join_or_push(int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes, std::span<const Loop> loops) {
  const int64_t num_runs = product_of_counts(loops);
  num_bytes_ = checked_add(num_bytes_, checked_mul(run_bytes, num_runs));
  if (nests_.size() > joinable_from_) {
    RunNest& last = nests_.back();
    if (extend_run(last, src_bytes, dst_bytes, run_bytes, loops)) return;
    if (extend_loop(last, src_bytes, dst_bytes, run_bytes, loops)) return;
    if (repeat(last, src_bytes, dst_bytes, run_bytes, loops)) return;
  }
  nests_.push_back({src_bytes, dst_bytes, run_bytes, num_runs, static_cast<int64_t>(loops_.size()),
                    static_cast<int64_t>(loops.size())});
  loops_.insert(loops_.end(), loops.begin(), loops.end());
}

// [run][new run] at every point of the same loops: the run grows, and swallows the loops that it has become equal to.
bool RunList::extend_run(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes,
                         std::span<const Loop> loops) {
  if (src_bytes != last.src_bytes + last.run_bytes || dst_bytes != last.dst_bytes + last.run_bytes) return false;
  if (!std::ranges::equal(loops, loops_of(last))) return false;
  last.run_bytes = checked_add(last.run_bytes, run_bytes);
  while (last.num_loops > 0) {
    const Loop& inner = loops_.back();
    if (inner.src_stride_bytes != last.run_bytes || inner.dst_stride_bytes != last.run_bytes) break;
    last.run_bytes = checked_mul(last.run_bytes, inner.count);
    last.num_runs /= inner.count;
    last.num_loops -= 1;
    loops_.pop_back();
  }
  return true;
}

// The new nest is what the outermost loop would do next: once (without that loop) or several times (with it).
bool RunList::extend_loop(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes,
                          std::span<const Loop> loops) {
  if (last.num_loops == 0 || run_bytes != last.run_bytes) return false;
  Loop& outer = loops_[last.first_loop];
  if (src_bytes != last.src_bytes + outer.count * outer.src_stride_bytes) return false;
  if (dst_bytes != last.dst_bytes + outer.count * outer.dst_stride_bytes) return false;
  int64_t more = 1;
  if (loops.size() == static_cast<size_t>(last.num_loops)) {
    if (loops[0].src_stride_bytes != outer.src_stride_bytes) return false;
    if (loops[0].dst_stride_bytes != outer.dst_stride_bytes) return false;
    more = loops[0].count;
    loops = loops.subspan(1);
  }
  if (!std::ranges::equal(loops, loops_of(last).subspan(1))) return false;
  last.num_runs = last.num_runs / outer.count * (outer.count + more);
  outer.count += more;
  return true;
}

// The same nest again, further on: an outer loop of two, which extend_loop lets grow.
bool RunList::repeat(RunNest& last, int64_t src_bytes, int64_t dst_bytes, int64_t run_bytes,
                     std::span<const Loop> loops) {
  if (run_bytes != last.run_bytes || !std::ranges::equal(loops, loops_of(last))) return false;
  const Loop outer{2, src_bytes - last.src_bytes, dst_bytes - last.dst_bytes};
  if (outer.src_stride_bytes <= 0 || outer.dst_stride_bytes <= 0) return false;
  loops_.insert(loops_.begin() + last.first_loop, outer);
  last.num_loops += 1;
  last.num_runs *= 2;
  return true;
}

Interval RunList::src_extent() const {
  if (nests_.empty()) return {};
  Interval extent = extent_of(nests_[0].src_bytes, nests_[0].run_bytes, loops_of(nests_[0]), &Loop::src_stride_bytes);
  for (const RunNest& nest : nests_) {
    extent = join(extent, extent_of(nest.src_bytes, nest.run_bytes, loops_of(nest), &Loop::src_stride_bytes));
  }
  return extent;
}

Interval RunList::dst_extent() const {
  if (nests_.empty()) return {};
  Interval extent = extent_of(nests_[0].dst_bytes, nests_[0].run_bytes, loops_of(nests_[0]), &Loop::dst_stride_bytes);
  for (const RunNest& nest : nests_) {
    extent = join(extent, extent_of(nest.dst_bytes, nest.run_bytes, loops_of(nest), &Loop::dst_stride_bytes));
  }
  return extent;
}

std::vector<Run> RunList::enumerate() const {
  std::vector<Run> runs;
  for (const RunNest& nest : nests_) {
    const std::span<const Loop> loops = loops_of(nest);
    for (int64_t point = 0; point < nest.num_runs; ++point) {
      Run run{nest.src_bytes, nest.dst_bytes, nest.run_bytes};
      int64_t rest = point;
      for (size_t index = loops.size(); index-- > 0;) {
        run.src_bytes += rest % loops[index].count * loops[index].src_stride_bytes;
        run.dst_bytes += rest % loops[index].count * loops[index].dst_stride_bytes;
        rest /= loops[index].count;
      }
      runs.push_back(run);
    }
  }
  return runs;
}

}  // namespace torchtitan_ext::core
