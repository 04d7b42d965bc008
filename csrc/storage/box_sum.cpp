#include "storage/box_sum.h"

#include <algorithm>
#include <limits>

#include "core/boxes.h"
#include "core/check.h"
#include "core/runs.h"
#include "core/word_sums.h"
#include "storage/run_window.h"

namespace torchtitan_ext::storage {

uint64_t sum_box(uintptr_t address, int64_t item_bytes, std::span<const int64_t> offsets,
                 std::span<const int64_t> sizes, std::span<const int64_t> global_sizes) {
  TTE_CHECK(core::lies_inside({offsets, sizes}, global_sizes) && item_bytes > 0, "sum_box",
            "the box does not lie in the tensor");
  const core::Sizes strides = core::row_major_strides(global_sizes);
  int64_t position = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) position += offsets[dim] * strides[dim];
  core::RunList runs;
  runs.append_box(sizes, {static_cast<int64_t>(address), core::row_major_strides(sizes)},
                  {core::checked_mul(position, item_bytes), strides}, item_bytes);
  const int64_t word_bytes = std::min<int64_t>(item_bytes, sizeof(uint64_t));
  uint64_t sum = 0;
  for (const core::RunNest& nest : runs.nests()) {
    visit_window(runs, nest, 0, std::numeric_limits<int64_t>::max(), [&](const Stretch& stretch) {
      const core::Loop loop{stretch.count, stretch.memory_stride, stretch.file_stride};
      sum += core::sum_runs(stretch.memory, stretch.file_bytes, loop, stretch.run_bytes, word_bytes);
    });
  }
  return sum;
}

}  // namespace torchtitan_ext::storage
