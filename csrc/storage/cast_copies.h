// Elements that are cast while they are copied out of blocks of a file.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "storage/casts.h"
#include "storage/run_window.h"

namespace torchtitan_ext::storage {

// The memory of a box whose elements are cast. Runs measure it in elements of the file, so that a nest looks the same with
// a cast and without: what a run calls byte `begin` + n lies at `begin` + n / src_bytes * dst_bytes.
struct CastMemory {
  const Cast* cast = nullptr;
  int64_t begin = 0;
  int64_t box = 0;  // its number
};

// What one worker copies. Blocks end anywhere, so that two of them may have parts of one element: `finish` casts these.
class CastCopies {
 public:
  // Copies `count` runs of a stretch that has a CastMemory, from `memory` on there and from `src` on in a block.
  void copy(const Stretch& stretch, int64_t memory, const char* src, int64_t count);
  // Takes what another worker has left.
  void join(const CastCopies& other);
  // REQUIRES: all stretches were copied, by this worker or those that were joined.
  void finish();

  // Of each box of which a finite number has become infinite, one such number.
  const std::map<int64_t, double>& lost() const { return lost_; }

 private:
  static constexpr size_t kMaxItemBytes = 8;
  struct Piece {
    const CastMemory* memory = nullptr;
    int64_t offset = 0;  // from the beginning of the memory, in bytes of the file
    int64_t num_bytes = 0;
    std::array<char, kMaxItemBytes> bytes{};
  };

  void copy_run(const CastMemory& memory, int64_t offset, const char* src, int64_t num_bytes);
  void cast_items(const CastMemory& memory, int64_t offset, int64_t stride, const char* src, int64_t src_stride,
                  int64_t count);
  void keep_piece(const CastMemory& memory, int64_t offset, const char* src, int64_t num_bytes);

  std::vector<Piece> pieces_;
  std::map<int64_t, double> lost_;
};

}  // namespace torchtitan_ext::storage
