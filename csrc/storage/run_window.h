// Walks the runs of a nest that fall into a window of a file. In storage the destination side of a run list is always
// the file, whichever way the bytes go: so a nest is walked in the order of the file.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "core/check.h"
#include "core/runs.h"

namespace torchtitan_ext::storage {

constexpr size_t kMaxLoops = 64;

// An address as run lists have it.
inline char* pointer(int64_t address) { return reinterpret_cast<char*>(static_cast<uintptr_t>(address)); }

class CastCopies;
struct CastMemory;

// `count` runs of `run_bytes` at even distances.
struct Stretch {
  int64_t file_bytes = 0;  // where the first one lies in the file
  int64_t memory = 0;      // and in memory
  int64_t run_bytes = 0;
  int64_t count = 1;
  int64_t file_stride = 0;
  int64_t memory_stride = 0;
  const CastMemory* cast_memory = nullptr;  // what `memory` is an address in; none where it is plain memory

  int64_t file_end() const { return file_bytes + (count - 1) * file_stride + run_bytes; }
};

inline int64_t file_end_of(const core::RunList& runs, const core::RunNest& nest) {
  int64_t end = nest.dst_bytes + nest.run_bytes;
  for (const core::Loop& loop : runs.loops_of(nest)) end += (loop.count - 1) * loop.dst_stride_bytes;
  return end;
}

// Whether each loop steps over all of the loops inside it, so that the runs lie one behind the other in the file.
inline bool is_in_file_order(const core::RunList& runs, const core::RunNest& nest) {
  int64_t extent = nest.run_bytes;
  const std::span<const core::Loop> loops = runs.loops_of(nest);
  for (size_t index = loops.size(); index-- > 0;) {
    if (loops[index].dst_stride_bytes < extent) return false;
    extent = core::checked_add(extent, core::checked_mul(loops[index].count - 1, loops[index].dst_stride_bytes));
  }
  return loops.size() <= kMaxLoops;
}

// Calls visit(stretch) for what lies in bytes [begin, end) of the file; runs on its edges are cut. The nest is in file
// order.
template <typename Visit>
void visit_window(const core::RunList& runs, const core::RunNest& nest, int64_t begin, int64_t end,
                  const Visit& visit) {
  const std::span<const core::Loop> loops = runs.loops_of(nest);
  std::array<int64_t, kMaxLoops> at{};
  int64_t rest = std::max<int64_t>(begin - nest.dst_bytes, 0);
  for (size_t index = 0; index < loops.size(); ++index) {
    at[index] = std::min(rest / loops[index].dst_stride_bytes, loops[index].count - 1);
    rest -= at[index] * loops[index].dst_stride_bytes;
  }
  // Goes on by `count` runs of the innermost loop; false behind the last one.
  const auto advance = [&](int64_t count) {
    for (size_t index = loops.size(); index-- > 0;) {
      at[index] += count;
      if (at[index] < loops[index].count) return true;
      at[index] = 0;
      count = 1;
    }
    return false;
  };
  if (rest >= nest.run_bytes && !advance(1)) return;
  while (true) {
    int64_t file_bytes = nest.dst_bytes;
    int64_t memory = nest.src_bytes;
    for (size_t index = 0; index < loops.size(); ++index) {
      file_bytes += at[index] * loops[index].dst_stride_bytes;
      memory += at[index] * loops[index].src_stride_bytes;
    }
    if (file_bytes >= end) return;
    const int64_t cut_front = std::max<int64_t>(begin - file_bytes, 0);
    const int64_t cut_back = std::max<int64_t>(file_bytes + nest.run_bytes - end, 0);
    int64_t count = 1;
    if (cut_front > 0 || cut_back > 0 || loops.empty()) {
      visit(Stretch{file_bytes + cut_front, memory + cut_front, nest.run_bytes - cut_front - cut_back, 1, 0, 0});
    } else {
      const core::Loop& inner = loops.back();
      const int64_t fitting = (end - nest.run_bytes - file_bytes) / inner.dst_stride_bytes + 1;
      count = std::min(inner.count - at[loops.size() - 1], fitting);
      visit(Stretch{file_bytes, memory, nest.run_bytes, count, inner.dst_stride_bytes, inner.src_stride_bytes});
    }
    if (!advance(count)) return;
  }
}

enum class Direction { kToFile, kFromFile };

// Copies a stretch between memory and `window`, which holds the file's bytes from `window_begin` on.
void copy_stretch(const Stretch& stretch, char* window, int64_t window_begin, Direction direction);

// Copies stretches from `window`, those of memory with casts by `casts`. Those of one form behind each other are copied
// side by side, a few runs of each at a time: where memory has them turned, these lie in the same cache lines.
void copy_from_window(std::span<const Stretch> stretches, const char* window, int64_t window_begin, CastCopies& casts);

// Copies a nest from memory to memory; runs are copied in order.
void copy_nest(const core::RunList& runs, const core::RunNest& nest);

}  // namespace torchtitan_ext::storage
