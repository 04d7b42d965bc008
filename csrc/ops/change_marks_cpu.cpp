#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ops/change_marks_kernel.h"

namespace torchtitan_ext::ops {
namespace {

// As many bytes of both sides as copies give to a thread at least.
constexpr int64_t kGrainBytes = int64_t{256} << 10;
// Elements of a strided tensor are copied side by side in blocks that stay in the first cache.
constexpr int64_t kBlockElements = 1024;

void mark_items(const char* left, const char* right, int64_t item_bytes, int64_t num_words, uint64_t* mask) {
  for (int64_t word = 0; word < num_words; ++word) {
    uint64_t bits = 0;
    const int64_t num_bytes = kWordElements * item_bytes;
    if (std::memcmp(left, right, num_bytes) != 0) {
      for (int64_t item = 0; item < kWordElements; ++item) {
        const bool differs = std::memcmp(left + item * item_bytes, right + item * item_bytes, item_bytes) != 0;
        bits |= static_cast<uint64_t>(differs) << item;
      }
    }
    mask[word] = bits;
    left += num_bytes;
    right += num_bytes;
  }
}

// Elements [first, last) of a tensor one behind the other: where they lie so, or in `block`.
const char* side_by_side(const core::Memory& tensor, bool contiguous, int64_t first, int64_t last, char* block) {
  if (contiguous) return reinterpret_cast<const char*>(tensor.address) + first * tensor.item_bytes;
  core::RunList runs;
  core::append_range(runs, tensor, reinterpret_cast<int64_t>(block), first, last, true);
  copy_runs_cpu(runs, 0, 0, nullptr);  // too small for a second thread
  return block;
}

// Room for a block of the widest elements.
struct alignas(64) Block {
  char bytes[kBlockElements * 16];
};

}  // namespace

void mark_words_cpu(const MarkedPair& pair, int64_t first_word, int64_t last_word, uint64_t* mask) {
  const auto mark = mark_kernel().mark;
  const int64_t item_bytes = pair.left.item_bytes;
  const int64_t whole_words = std::min(last_word, pair.num_elements / kWordElements);
  if (pair.left_contiguous && pair.right_contiguous && first_word < whole_words) {
    const int64_t offset = first_word * kWordElements * item_bytes;
    mark(reinterpret_cast<const char*>(pair.left.address) + offset,
         reinterpret_cast<const char*>(pair.right.address) + offset, item_bytes, whole_words - first_word, mask);
    mask += whole_words - first_word;
    first_word = whole_words;
  }
  Block left, right;
  while (first_word < last_word) {
    const int64_t num_words = std::min(last_word - first_word, kBlockElements / kWordElements);
    const int64_t first = first_word * kWordElements;
    const int64_t last = std::min(first + num_words * kWordElements, pair.num_elements);
    const char* of_left = side_by_side(pair.left, pair.left_contiguous, first, last, left.bytes);
    const char* of_right = side_by_side(pair.right, pair.right_contiguous, first, last, right.bytes);
    const int64_t num_bytes = (last - first) * item_bytes, all_bytes = num_words * kWordElements * item_bytes;
    if (num_bytes < all_bytes) {  // the end of the tensor: what is behind it is equal
      if (of_left != left.bytes) std::memcpy(left.bytes, of_left, num_bytes);
      if (of_right != right.bytes) std::memcpy(right.bytes, of_right, num_bytes);
      std::memset(left.bytes + num_bytes, 0, all_bytes - num_bytes);
      std::memset(right.bytes + num_bytes, 0, all_bytes - num_bytes);
      of_left = left.bytes;
      of_right = right.bytes;
    }
    mark(of_left, of_right, item_bytes, num_words, mask);
    mask += num_words;
    first_word += num_words;
  }
}

namespace {

struct Task {
  std::span<const MarkedPair> pairs;
  uint64_t* mask;
  int64_t* counts;
};

// Words [first, last) of the mask.
void mark_range(int64_t first, int64_t last, void* context) {
  const Task& task = *static_cast<const Task*>(context);
  const auto begins = [](int64_t word, const MarkedPair& pair) { return word < pair.first_word; };
  auto pair = std::upper_bound(task.pairs.begin(), task.pairs.end(), first, begins) - 1;
  for (; pair != task.pairs.end() && pair->first_word < last; ++pair) {
    const int64_t from = std::max<int64_t>(first - pair->first_word, 0);
    const int64_t to = std::min(last - pair->first_word, pair->num_words());
    if (from >= to) continue;
    uint64_t* mask = task.mask + pair->first_word + from;
    mark_words_cpu(*pair, from, to, mask);
    const int64_t count = mark_kernel().count(mask, to - from);
    std::atomic_ref<int64_t>(task.counts[pair - task.pairs.begin()]).fetch_add(count, std::memory_order_relaxed);
  }
}

}  // namespace

extern const MarkKernel kBaselineMarks{mark_items, count_bits, indices_of_bits};

const MarkKernel& mark_kernel() {
#ifdef TTE_HAVE_AVX2_MARKS
  static const MarkKernel& chosen = __builtin_cpu_supports("avx2") ? kAvx2Marks : kBaselineMarks;
  return chosen;
#else
  return kBaselineMarks;
#endif
}

void mark_changes_cpu(std::span<const MarkedPair> pairs, uint64_t* mask, int64_t* counts, ParallelFor parallel_for) {
  int64_t num_words = 0, num_bytes = 0;
  for (size_t index = 0; index < pairs.size(); ++index) {
    counts[index] = 0;
    num_words += pairs[index].num_words();
    num_bytes += 2 * pairs[index].num_elements * pairs[index].left.item_bytes;
  }
  if (num_words == 0) return;
  Task task{pairs, mask, counts};
  if (num_bytes <= kGrainBytes) return mark_range(0, num_words, &task);
  // As if all words had the same number of bytes.
  parallel_for(0, num_words, std::max<int64_t>(num_words / (num_bytes / kGrainBytes), 1), mark_range, &task);
}

}  // namespace torchtitan_ext::ops
