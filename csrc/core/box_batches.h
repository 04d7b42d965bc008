// Boxes of tensors in parts that fit into one buffer, batch by batch: for readers with little memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/boxes.h"

namespace torchtitan_ext::core {

struct SizedBox {
  Chunk box;  // local_offsets count for nothing
  int64_t item_bytes = 1;
};

// A part of one of the boxes. Its elements are neighbours in the row-major order of the box.
struct BoxPart {
  size_t box = 0;
  Sizes offsets;  // in the tensor, as those of the box
  Sizes sizes;
  int64_t first_byte = 0;  // in the box, row-major
  int64_t num_bytes = 0;
  int64_t begin = 0;    // in the buffer, in bytes; parts lie there one behind the other, aligned
  bool is_last = true;  // of its box

  bool operator==(const BoxPart&) const = default;
};

// Each box in parts of at most `max_bytes`, or one element, cut as BoxParts does; a box without elements is one part.
// A batch has parts, in order, as long as they fit into `max_bytes`, and at most `max_parts`.
//
//   boxes of 8 and 100 bytes, max_bytes 64:  the first box; the first 64 bytes of the second; its last 36
class BoxBatches {
 public:
  BoxBatches(std::vector<SizedBox> boxes, int64_t max_bytes, size_t max_parts);

  // Empty behind the last one.
  std::vector<BoxPart> next();

 private:
  std::vector<SizedBox> boxes_;
  int64_t max_bytes_;
  size_t max_parts_;
  size_t box_ = 0;  // of the next part
  int64_t part_ = 0, first_byte_ = 0;
};

}  // namespace torchtitan_ext::core
