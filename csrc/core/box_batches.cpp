#include "core/box_batches.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace torchtitan_ext::core {

// A cache line, in which elements of any dtype fit.
constexpr int64_t kAlignment = 64;

BoxBatches::BoxBatches(std::vector<SizedBox> boxes, int64_t max_bytes, size_t max_parts)
    : boxes_(std::move(boxes)), max_bytes_(max_bytes), max_parts_(max_parts) {
  TTE_CHECK(max_parts > 0, "BoxBatches", "got batches of 0 parts");
  for (const SizedBox& one : boxes_) {
    TTE_CHECK(one.item_bytes > 0 && one.box.offsets.size() == one.box.sizes.size(), "BoxBatches", "got ",
              one.box.offsets.size(), " offsets and ", one.box.sizes.size(), " sizes of elements of ", one.item_bytes,
              " bytes");
  }
}

std::vector<BoxPart> BoxBatches::next() {
  std::vector<BoxPart> batch;
  int64_t begin = 0;
  for (; box_ < boxes_.size(); ++box_, part_ = 0, first_byte_ = 0) {
    const int64_t item_bytes = boxes_[box_].item_bytes;
    const BoxParts parts(boxes_[box_].box, max_bytes_ / item_bytes);
    for (; part_ < parts.size(); ++part_) {
      Chunk part = parts.at(part_);
      const int64_t num_bytes = checked_mul(num_elements(part.sizes), item_bytes);
      const bool fits = batch.size() < max_parts_ && num_bytes <= max_bytes_ - begin;
      if (!batch.empty() && !fits) return batch;
      batch.push_back({box_, std::move(part.offsets), std::move(part.sizes), first_byte_, num_bytes, begin,
                       part_ + 1 == parts.size()});
      first_byte_ += num_bytes;
      begin = checked_add(begin, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
    }
  }
  return batch;
}

}  // namespace torchtitan_ext::core
