#include "storage/run_window.h"

#include <cstring>

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

}  // namespace

void copy_stretch(const Stretch& stretch, char* window, int64_t window_begin, Direction direction) {
  char* in_window = window + (stretch.file_bytes - window_begin);
  char* memory = reinterpret_cast<char*>(static_cast<uintptr_t>(stretch.memory));
  if (direction == Direction::kToFile) {
    copy_strided(in_window, stretch.file_stride, memory, stretch.memory_stride, stretch.run_bytes, stretch.count);
  } else {
    copy_strided(memory, stretch.memory_stride, in_window, stretch.file_stride, stretch.run_bytes, stretch.count);
  }
}

}  // namespace torchtitan_ext::storage
