// Changed elements as lists: a position in the global tensor and the bits for each. Found by the marks of change_marks.h,
// written into shards, hashed, and cut to boxes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/box_walk.h"
#include "core/boxes.h"
#include "core/memory.h"
#include "ops/change_marks.h"
#include "ops/copy_runs.h"

namespace torchtitan_ext::ops {

// ---- from two tensors to a list ----

// The marked elements of one tensor, of which there are `count`, and where they go.
struct MarkedElements {
  // Its chunks, keyed by the index in the local tensor. Places: address now, address before, position in the global tensor.
  using Chunks = std::vector<core::BoxWalk<3>>;
  Chunks chunks;
  int64_t item_bytes = 1;
  const uint64_t* mask = nullptr;  // from the tensor's first word on; bits behind the last element count for nothing
  int64_t num_elements = 0;        // of the local tensor
  int64_t count = 0;
  int64_t* positions = nullptr;
  char* values = nullptr;
  uint64_t* old_sum = nullptr;  // of the hashes of the bits before; set, as the next
  uint64_t* new_sum = nullptr;

  int64_t num_words() const { return mask_words(num_elements); }
};

// The index of the first tensor of which another number of elements is marked than its `count`, and the number, or {-1, 0}.
struct WrongCount {
  int64_t tensor = -1;
  int64_t marked = 0;
};

// Writes positions, ascending for each tensor, values and sums. Where a count is wrong, nothing is written and the first
// one is returned. This form is the specification.
WrongCount list_changes_cpu(std::span<const MarkedElements> tensors, ParallelFor parallel_for);

// Two tensors that are compared and listed in one pass, while their elements are in the cache.
struct ComparedElements {
  MarkedPair pair;
  MarkedElements::Chunks chunks;
  int64_t limit = 0;  // of a tensor in which more elements differ none is listed
};

struct FoundElements {
  struct Piece {
    int64_t count = 0;
    std::unique_ptr<int64_t[]> positions;
    std::unique_ptr<char[]> values;
  };

  int64_t count = 0;  // of all that differ
  std::vector<Piece> pieces;
  uint64_t old_sum = 0, new_sum = 0;
};

std::vector<FoundElements> find_changes_cpu(std::span<const ComparedElements> tensors, ParallelFor parallel_for);

// Writes what was found, and not more than the limit, to the lists of `tensor`, ascending.
void gather_found(const FoundElements& found, const MarkedElements& tensor);

// list_changes_cpu on the current stream of the device, in whose memory masks, lists and sums lie; the sums are 0 before. Does not
// ask whether counts are right: of elements beyond the count nothing is written. Elements and values are aligned to their
// size. Waits for the device only where chunks of a tensor stand in another order than in the global tensor.
void list_changes_cuda(std::span<const MarkedElements> tensors, int32_t device_index);

// Whether each chunk ends, in the local tensor as in the global one, before the next one begins: then a list in the order of
// the local tensor is in that of the global one.
bool keeps_order(const MarkedElements::Chunks& chunks);

// Sorts the list of a tensor by position.
void sort_list(const MarkedElements& tensor);

// ---- from a list to shards ----

// A shard and the elements of its global tensor that are listed.
struct ListedElements {
  // Its chunks, keyed by the position in the global tensor. Place: the address.
  using Chunks = std::vector<core::BoxWalk<1>>;
  Chunks chunks;
  int64_t item_bytes = 1;
  int64_t num_elements = 0;  // of the global tensor
  const int64_t* positions = nullptr;
  int64_t count = 0;
  const char* values = nullptr;  // for write_listed_cpu
};

// The index of the first tensor whose positions do not ascend or are not inside of its global tensor, or -1.
int64_t find_unordered(std::span<const ListedElements> tensors, ParallelFor parallel_for);

// Writes the values of those elements that the shards hold. Positions ascend.
void write_listed_cpu(std::span<const ListedElements> tensors, ParallelFor parallel_for);

// Sets for each tensor the sum of the hashes of the bits that its shard holds at the positions, and how many these are.
void sum_listed_cpu(std::span<const ListedElements> tensors, uint64_t* sums, int64_t* counts, ParallelFor parallel_for);

// The same on the current stream of the device; sums and counts are 0 before. Positions may stand in any order.
void write_listed_cuda(std::span<const ListedElements> tensors, int32_t device_index);
void sum_listed_cuda(std::span<const ListedElements> tensors, uint64_t* sums, int64_t* counts, int32_t device_index);

}  // namespace torchtitan_ext::ops
