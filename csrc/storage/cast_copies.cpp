#include "storage/cast_copies.h"

#include <algorithm>
#include <utility>

namespace torchtitan_ext::storage {

void CastCopies::copy(const Stretch& stretch, int64_t memory, const char* src, int64_t count) {
  const CastMemory& dst = *stretch.cast_memory;
  const int64_t offset = memory - dst.begin;
  if (stretch.run_bytes == dst.cast->src_bytes && offset % stretch.run_bytes == 0) {
    return cast_items(dst, offset, stretch.memory_stride, src, stretch.file_stride, count);
  }
  for (int64_t index = 0; index < count; ++index) {
    copy_run(dst, offset + index * stretch.memory_stride, src + index * stretch.file_stride, stretch.run_bytes);
  }
}

void CastCopies::join(const CastCopies& other) {
  pieces_.insert(pieces_.end(), other.pieces_.begin(), other.pieces_.end());
  lost_.insert(other.lost_.begin(), other.lost_.end());
}

void CastCopies::finish() {
  std::map<std::pair<const CastMemory*, int64_t>, std::array<char, kMaxItemBytes>> items;
  for (const Piece& piece : pieces_) {
    const int64_t inside = piece.offset % piece.memory->cast->src_bytes;
    std::copy_n(piece.bytes.begin(), piece.num_bytes, items[{piece.memory, piece.offset - inside}].begin() + inside);
  }
  for (const auto& [place, bytes] : items) cast_items(*place.first, place.second, 0, bytes.data(), 0, 1);
  pieces_.clear();
}

// A run of any bytes: its first and last element may be cut.
void CastCopies::copy_run(const CastMemory& memory, int64_t offset, const char* src, int64_t num_bytes) {
  const int64_t item_bytes = memory.cast->src_bytes;
  const int64_t front = std::min(num_bytes, (item_bytes - offset % item_bytes) % item_bytes);
  const int64_t back = (num_bytes - front) % item_bytes;
  keep_piece(memory, offset, src, front);
  cast_items(memory, offset + front, item_bytes, src + front, item_bytes, (num_bytes - front) / item_bytes);
  keep_piece(memory, offset + num_bytes - back, src + num_bytes - back, back);
}

void CastCopies::cast_items(const CastMemory& memory, int64_t offset, int64_t stride, const char* src,
                            int64_t src_stride, int64_t count) {
  const Cast& cast = *memory.cast;
  char* dst = pointer(memory.begin + offset / cast.src_bytes * cast.dst_bytes);
  const char* lost = cast.copy(dst, stride / cast.src_bytes * cast.dst_bytes, src, src_stride, count);
  if (lost != nullptr) lost_.emplace(memory.box, cast.number(lost));
}

void CastCopies::keep_piece(const CastMemory& memory, int64_t offset, const char* src, int64_t num_bytes) {
  if (num_bytes == 0) return;
  Piece piece{&memory, offset, num_bytes};
  std::copy_n(src, num_bytes, piece.bytes.begin());
  pieces_.push_back(piece);
}

}  // namespace torchtitan_ext::storage
