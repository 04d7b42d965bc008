#include "storage/run_window.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "storage/cast_copies.h"

namespace torchtitan_ext::storage {
namespace {

// A copy of constant size compiles to one or two moves instead of a call.
template <size_t kBytes>
void copy_items(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t count) {
  for (int64_t index = 0; index < count; ++index, dst += dst_stride, src += src_stride) std::memcpy(dst, src, kBytes);
}

void copy_strided(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t run_bytes,
                  int64_t count) {
  switch (run_bytes) {
    case 1:
      return copy_items<1>(dst, dst_stride, src, src_stride, count);
    case 2:
      return copy_items<2>(dst, dst_stride, src, src_stride, count);
    case 4:
      return copy_items<4>(dst, dst_stride, src, src_stride, count);
    case 8:
      return copy_items<8>(dst, dst_stride, src, src_stride, count);
    case 16:
      return copy_items<16>(dst, dst_stride, src, src_stride, count);
    default:
      for (int64_t index = 0; index < count; ++index, dst += dst_stride, src += src_stride) {
        std::memcpy(dst, src, static_cast<size_t>(run_bytes));
      }
  }
}

// Of each stretch so many runs at a time: their lines, one per run, stay in the first cache.
constexpr int64_t kRunsAtATime = 64;

bool are_alike(const Stretch& left, const Stretch& right) {
  return left.run_bytes == right.run_bytes && left.count == right.count && left.file_stride == right.file_stride &&
         left.memory_stride == right.memory_stride;
}

}  // namespace

void copy_stretch(const Stretch& stretch, char* window, int64_t window_begin, Direction direction) {
  char* in_window = window + (stretch.file_bytes - window_begin);
  char* memory = pointer(stretch.memory);
  if (direction == Direction::kToFile) {
    copy_strided(in_window, stretch.file_stride, memory, stretch.memory_stride, stretch.run_bytes, stretch.count);
  } else {
    copy_strided(memory, stretch.memory_stride, in_window, stretch.file_stride, stretch.run_bytes, stretch.count);
  }
}

void copy_from_window(std::span<const Stretch> stretches, const char* window, int64_t window_begin, CastCopies& casts) {
  while (!stretches.empty()) {
    const Stretch& first = stretches.front();
    size_t num_alike = 1;
    while (num_alike < stretches.size() && are_alike(stretches[num_alike], first)) ++num_alike;
    for (int64_t run = 0; run < first.count; run += kRunsAtATime) {
      const int64_t count = std::min(kRunsAtATime, first.count - run);
      for (const Stretch& stretch : stretches.first(num_alike)) {
        const char* src = window + (stretch.file_bytes - window_begin + run * stretch.file_stride);
        const int64_t memory = stretch.memory + run * stretch.memory_stride;
        if (stretch.cast_memory != nullptr) {
          casts.copy(stretch, memory, src, count);
        } else {
          copy_strided(pointer(memory), stretch.memory_stride, src, stretch.file_stride, stretch.run_bytes, count);
        }
      }
    }
    stretches = stretches.subspan(num_alike);
  }
}

void copy_nest(const core::RunList& runs, const core::RunNest& nest) {
  const std::span<const core::Loop> loops = runs.loops_of(nest);
  if (loops.empty()) return copy_strided(pointer(nest.dst_bytes), 0, pointer(nest.src_bytes), 0, nest.run_bytes, 1);
  TTE_CHECK(loops.size() <= kMaxLoops, "copy", "has ", loops.size(), " loops, expected at most ", kMaxLoops);
  const core::Loop& inner = loops.back();
  std::array<int64_t, kMaxLoops> at{};
  while (true) {
    int64_t dst = nest.dst_bytes;
    int64_t src = nest.src_bytes;
    for (size_t index = 0; index + 1 < loops.size(); ++index) {
      dst += at[index] * loops[index].dst_stride_bytes;
      src += at[index] * loops[index].src_stride_bytes;
    }
    copy_strided(pointer(dst), inner.dst_stride_bytes, pointer(src), inner.src_stride_bytes, nest.run_bytes,
                 inner.count);
    size_t index = loops.size() - 1;
    while (index > 0 && ++at[index - 1] == loops[index - 1].count) at[--index] = 0;
    if (index == 0) return;
  }
}

}  // namespace torchtitan_ext::storage
