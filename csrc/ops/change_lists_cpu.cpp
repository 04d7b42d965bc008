#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "core/element_hash.h"
#include "ops/change_lists.h"
#include "ops/change_marks.h"
#include "ops/change_tiles.h"
#include "ops/chunk_table.h"

namespace torchtitan_ext::ops {
namespace {

using core::BoxWalk;
using core::hash_element;

// A list is cut between threads in pieces of so many words of a mask or so many elements: some 100 us of work.
constexpr int64_t kPieceWords = 1024;
constexpr int64_t kPieceElements = 8192;
// Elements of a list lie far apart: so many of them are fetched ahead.
constexpr int64_t kAhead = 16;
// Words of a mask whose bits become a list of indices at once.
constexpr int64_t kIndexWords = 256;

template <typename Word>
inline Word load(int64_t address) {
  Word bits;
  std::memcpy(&bits, reinterpret_cast<const void*>(address), sizeof(Word));
  return bits;
}

void add(uint64_t& sum, uint64_t more) {
  if (more != 0) std::atomic_ref<uint64_t>(sum).fetch_add(more, std::memory_order_relaxed);
}

// ---- from two tensors to a list ----

// Words [first_word, last_word) of a tensor's mask, whose elements come `first` in its list.
struct Piece {
  const MarkedElements* tensor;
  int64_t first_word, last_word;
  int64_t first = 0;
  int64_t count = 0;
};

// The run of the local tensor that has element `index`. `chunk` is the one where it was found last.
BoxWalk<3>::Run run_of(const MarkedElements::Chunks& chunks, size_t& chunk, int64_t index) {
  while (true) {
    const BoxWalk<3>::Run run = chunks[chunk].seek(index);
    if (run.begin <= index) return run;  // chunks tile the shard, so one of them has it
    if (++chunk == chunks.size()) chunk = 0;
  }
}

// Element `index` is on its way into the cache if it is in the same run; else a fetch of what is not there does nothing.
inline void fetch(const BoxWalk<3>::Run& run, const BoxWalk<3>::Places& strides, int64_t index) {
  const int64_t inside = index - run.begin;
  __builtin_prefetch(reinterpret_cast<const void*>(run.places[0] + inside * strides[0]));
  __builtin_prefetch(reinterpret_cast<const void*>(run.places[1] + inside * strides[1]));
}

// The sums of the hashes of listed bits.
struct HashSums {
  uint64_t before = 0, now = 0;
};

// How many of the bits of words of a mask stand for elements: the last word of a tensor may have others behind these.
int64_t count_words(const uint64_t* mask, int64_t first_word, int64_t num_words, int64_t num_elements) {
  const int64_t count = mark_kernel().count(mask, num_words);
  const int64_t last = num_elements - (first_word + num_words - 1) * kWordElements;
  return last < kWordElements ? count - __builtin_popcountll(mask[num_words - 1] >> last) : count;
}

// Lists the elements marked in words of a mask, which begin at `mask` and are those from `first_word` on of a tensor.
template <typename Word>
HashSums list_words(const MarkedElements::Chunks& chunks, const uint64_t* mask, int64_t first_word, int64_t num_words,
                    int64_t num_elements, int64_t* positions, char* values) {
  constexpr int64_t kBytes = sizeof(Word);
  size_t chunk = 0;
  BoxWalk<3>::Run run;
  run.end = 0;
  BoxWalk<3>::Places strides{};
  HashSums sums;
  uint16_t indices[kIndexWords * kWordElements + kIndexSlack];
  for (int64_t word = 0; word < num_words; word += kIndexWords) {
    int64_t count = mark_kernel().indices(mask + word, std::min(kIndexWords, num_words - word), indices);
    const int64_t origin = (first_word + word) * kWordElements;
    while (count > 0 && origin + indices[count - 1] >= num_elements) --count;
    for (int64_t next = 0; next < std::min(count, kAhead); ++next) fetch(run, strides, origin + indices[next]);
    for (int64_t next = 0; next < count; ++next) {
      const int64_t index = origin + indices[next];
      if (index >= run.end) {
        run = run_of(chunks, chunk, index);
        strides = chunks[chunk].strides();
      }
      if (next + kAhead < count) fetch(run, strides, origin + indices[next + kAhead]);
      const int64_t inside = index - run.begin;
      const Word now = load<Word>(run.places[0] + inside * strides[0]);
      const Word before = load<Word>(run.places[1] + inside * strides[1]);
      const int64_t position = run.places[2] + inside * strides[2];
      *positions++ = position;
      std::memcpy(values, &now, kBytes);
      values += kBytes;
      sums.before += hash_element(before, position);
      sums.now += hash_element(now, position);
    }
  }
  return sums;
}

template <typename Word>
void sort_words(const MarkedElements& tensor) {
  if (std::is_sorted(tensor.positions, tensor.positions + tensor.count)) return;
  struct Element {
    int64_t position;
    Word value;
  };
  std::vector<Element> elements(tensor.count);
  constexpr int64_t kBytes = sizeof(Word);
  for (int64_t at = 0; at < tensor.count; ++at) {
    elements[at].position = tensor.positions[at];
    std::memcpy(&elements[at].value, tensor.values + at * kBytes, kBytes);
  }
  std::ranges::sort(elements, {}, &Element::position);
  for (int64_t at = 0; at < tensor.count; ++at) {
    tensor.positions[at] = elements[at].position;
    std::memcpy(tensor.values + at * kBytes, &elements[at].value, kBytes);
  }
}

void count_pieces(int64_t first, int64_t last, void* context) {
  Piece* pieces = static_cast<Piece*>(context);
  for (Piece* piece = pieces + first; piece != pieces + last; ++piece) {
    piece->count = count_words(piece->tensor->mask + piece->first_word, piece->first_word,
                               piece->last_word - piece->first_word, piece->tensor->num_elements);
  }
}

void list_pieces(int64_t first, int64_t last, void* context) {
  const Piece* pieces = static_cast<const Piece*>(context);
  for (const Piece* piece = pieces + first; piece != pieces + last; ++piece) {
    if (piece->count == 0) continue;
    const MarkedElements& tensor = *piece->tensor;
    const HashSums sums = with_word(tensor.item_bytes, [&](auto word) {
      return list_words<decltype(word)>(
          tensor.chunks, tensor.mask + piece->first_word, piece->first_word, piece->last_word - piece->first_word,
          tensor.num_elements, tensor.positions + piece->first, tensor.values + piece->first * tensor.item_bytes);
    });
    add(*tensor.old_sum, sums.before);
    add(*tensor.new_sum, sums.now);
  }
}

// ---- both at once ----

struct FindTask {
  std::span<const ComparedElements> tensors;
  std::vector<FoundElements>& found;
  std::vector<std::pair<int64_t, int64_t>> pieces;  // (tensor, number of the piece)
};

void find_pieces(int64_t first, int64_t last, void* context) {
  FindTask& task = *static_cast<FindTask*>(context);
  uint64_t mask[kPieceWords];
  for (int64_t at = first; at < last; ++at) {
    const auto [index, number] = task.pieces[at];
    const ComparedElements& tensor = task.tensors[index];
    FoundElements& found = task.found[index];
    const int64_t first_word = number * kPieceWords;
    const int64_t last_word = std::min(first_word + kPieceWords, tensor.pair.num_words());
    mark_words_cpu(tensor.pair, first_word, last_word, mask);
    const int64_t count = mark_kernel().count(mask, last_word - first_word);
    const int64_t so_far = std::atomic_ref<int64_t>(found.count).fetch_add(count) + count;
    if (count == 0 || so_far > tensor.limit) continue;
    FoundElements::Piece& piece = found.pieces[number];
    const int64_t item_bytes = tensor.pair.left.item_bytes;
    piece.count = count;
    piece.positions.reset(new int64_t[count]);
    piece.values.reset(new char[count * item_bytes]);
    const HashSums sums = with_word(item_bytes, [&](auto word) {
      return list_words<decltype(word)>(tensor.chunks, mask, first_word, last_word - first_word,
                                        tensor.pair.num_elements, piece.positions.get(), piece.values.get());
    });
    add(found.old_sum, sums.before);
    add(found.new_sum, sums.now);
  }
}

// ---- from a list to shards ----

// Calls visit(tensor, first, last) for the elements of each tensor that are among [first, last) of all lists.
template <typename Visit>
void visit_lists(std::span<const ListedElements> tensors, int64_t first, int64_t last, const Visit& visit) {
  for (size_t index = 0; index < tensors.size() && last > 0; ++index) {
    const int64_t count = tensors[index].count;
    const int64_t begin = std::max<int64_t>(first, 0), end = std::min(last, count);
    if (begin < end) visit(index, begin, end);
    first -= count;
    last -= count;
  }
}

int64_t total(std::span<const ListedElements> tensors) {
  int64_t count = 0;
  for (const ListedElements& tensor : tensors) count += tensor.count;
  return count;
}

// The first of ascending positions [at, last) that is not below `bound`. It is near.
int64_t skip_to(const int64_t* positions, int64_t at, int64_t last, int64_t bound) {
  int64_t step = 1;
  while (at + step < last && positions[at + step] < bound) {
    at += step;
    step *= 2;
  }
  return std::lower_bound(positions + at, positions + std::min(at + step, last), bound) - positions;
}

// Calls visit(at, place) for those of positions [at, last) that lie in a box.
template <typename Visit>
inline void visit_inside(const int64_t* positions, int64_t at, int64_t last, const BoxWalk<1>& box,
                         const Visit& visit) {
  const int64_t stride = box.strides()[0];
  while (at < last) {
    const BoxWalk<1>::Run run = box.seek(positions[at]);
    if (run.begin == core::kNoKey) return;
    at = skip_to(positions, at, last, run.begin);
    const int64_t origin = run.places[0] - run.begin * stride;
    for (; at < last && positions[at] < run.end; ++at) visit(at, origin + positions[at] * stride);
  }
}

// As above; `place` is an address, and those of the next elements are on their way into the cache.
template <bool kWrite, typename Visit>
inline void visit_addresses(const ListedElements& tensor, int64_t first, int64_t last, const Visit& visit) {
  for (const BoxWalk<1>& chunk : tensor.chunks) {
    const int64_t stride = chunk.strides()[0];
    visit_inside(tensor.positions, first, last, chunk, [&](int64_t at, int64_t address) {
      if (at + kAhead < last) {  // in the same run, or nowhere: a fetch of what is not there does nothing
        const int64_t distance = tensor.positions[at + kAhead] - tensor.positions[at];
        __builtin_prefetch(reinterpret_cast<const void*>(address + distance * stride), kWrite);
      }
      visit(at, address);
    });
  }
}

struct ListTask {
  std::span<const ListedElements> tensors;
  uint64_t* sums = nullptr;
  int64_t* counts = nullptr;
  std::atomic<int64_t> unordered{-1};
};

void run_lists(ListTask& task, RangeBody body, ParallelFor parallel_for) {
  const int64_t count = total(task.tensors);
  if (count <= kPieceElements) {
    if (count > 0) body(0, count, &task);
  } else {
    parallel_for(0, count, kPieceElements, body, &task);
  }
}

}  // namespace

WrongCount list_changes_cpu(std::span<const MarkedElements> tensors, ParallelFor parallel_for) {
  std::vector<Piece> pieces;
  for (const MarkedElements& tensor : tensors) {
    for (int64_t word = 0; word < tensor.num_words(); word += kPieceWords) {
      pieces.push_back({&tensor, word, std::min(word + kPieceWords, tensor.num_words())});
    }
  }
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  const auto run = [&](RangeBody body, int64_t grain) {
    if (num_pieces <= grain) return body(0, num_pieces, pieces.data());
    parallel_for(0, num_pieces, grain, body, pieces.data());
  };
  run(count_pieces, 64);

  std::vector<int64_t> marked(tensors.size(), 0);
  for (Piece& piece : pieces) {
    piece.first = marked[piece.tensor - tensors.data()];
    marked[piece.tensor - tensors.data()] += piece.count;
  }
  for (size_t index = 0; index < tensors.size(); ++index) {
    if (marked[index] != tensors[index].count) return {static_cast<int64_t>(index), marked[index]};
  }
  for (const MarkedElements& tensor : tensors) *tensor.old_sum = *tensor.new_sum = 0;
  run(list_pieces, 2);
  for (const MarkedElements& tensor : tensors) {
    if (!keeps_order(tensor.chunks)) sort_list(tensor);
  }
  return {};
}

std::vector<FoundElements> find_changes_cpu(std::span<const ComparedElements> tensors, ParallelFor parallel_for) {
  std::vector<FoundElements> found(tensors.size());
  FindTask task{tensors, found, {}};
  for (size_t index = 0; index < tensors.size(); ++index) {
    const int64_t num_pieces = (tensors[index].pair.num_words() + kPieceWords - 1) / kPieceWords;
    found[index].pieces.resize(num_pieces);
    for (int64_t number = 0; number < num_pieces; ++number) {
      task.pieces.emplace_back(static_cast<int64_t>(index), number);
    }
  }
  const int64_t num_pieces = static_cast<int64_t>(task.pieces.size());
  if (num_pieces <= 2) {
    find_pieces(0, num_pieces, &task);
  } else {
    parallel_for(0, num_pieces, 2, find_pieces, &task);
  }
  for (size_t index = 0; index < tensors.size(); ++index) {
    if (found[index].count > tensors[index].limit) found[index].old_sum = found[index].new_sum = 0;
  }
  return found;
}

void gather_found(const FoundElements& found, const MarkedElements& tensor) {
  int64_t at = 0;
  for (const FoundElements::Piece& piece : found.pieces) {
    if (piece.count == 0) continue;
    std::memcpy(tensor.positions + at, piece.positions.get(), piece.count * sizeof(int64_t));
    std::memcpy(tensor.values + at * tensor.item_bytes, piece.values.get(), piece.count * tensor.item_bytes);
    at += piece.count;
  }
  if (!keeps_order(tensor.chunks)) sort_list(tensor);
}

bool keeps_order(const MarkedElements::Chunks& chunks) {
  for (size_t index = 1; index < chunks.size(); ++index) {
    const BoxWalk<3>&before = chunks[index - 1], &chunk = chunks[index];
    if (before.last_key() >= chunk.first_key() || before.last_places()[2] >= chunk.first_places()[2]) return false;
  }
  return true;
}

void sort_list(const MarkedElements& tensor) {
  with_word(tensor.item_bytes, [&](auto word) { sort_words<decltype(word)>(tensor); });
}

int64_t find_unordered(std::span<const ListedElements> tensors, ParallelFor parallel_for) {
  ListTask task{tensors};
  const RangeBody body = [](int64_t first, int64_t last, void* context) {
    ListTask& task = *static_cast<ListTask*>(context);
    visit_lists(task.tensors, first, last, [&](size_t index, int64_t begin, int64_t end) {
      const ListedElements& tensor = task.tensors[index];
      bool is_ordered = tensor.positions[begin] >= 0 && tensor.positions[end - 1] < tensor.num_elements;
      for (int64_t at = std::max<int64_t>(begin, 1); at < end; ++at) {
        is_ordered &= tensor.positions[at - 1] < tensor.positions[at];
      }
      if (is_ordered) return;
      int64_t before = task.unordered.load();
      const int64_t found = static_cast<int64_t>(index);
      while ((before < 0 || found < before) && !task.unordered.compare_exchange_weak(before, found)) {
      }
    });
  };
  run_lists(task, body, parallel_for);
  return task.unordered.load();
}

void write_listed_cpu(std::span<const ListedElements> tensors, ParallelFor parallel_for) {
  ListTask task{tensors};
  const RangeBody body = [](int64_t first, int64_t last, void* context) {
    const ListTask& task = *static_cast<const ListTask*>(context);
    visit_lists(task.tensors, first, last, [&](size_t index, int64_t begin, int64_t end) {
      const ListedElements& tensor = task.tensors[index];
      with_word(tensor.item_bytes, [&](auto word) {
        visit_addresses<true>(tensor, begin, end, [&](int64_t at, int64_t address) {
          constexpr int64_t kBytes = sizeof(word);
          std::memcpy(reinterpret_cast<void*>(address), tensor.values + at * kBytes, kBytes);
        });
      });
    });
  };
  run_lists(task, body, parallel_for);
}

void sum_listed_cpu(std::span<const ListedElements> tensors, uint64_t* sums, int64_t* counts,
                    ParallelFor parallel_for) {
  std::fill_n(sums, tensors.size(), uint64_t{0});
  std::fill_n(counts, tensors.size(), int64_t{0});
  ListTask task{tensors, sums, counts};
  const RangeBody body = [](int64_t first, int64_t last, void* context) {
    const ListTask& task = *static_cast<const ListTask*>(context);
    visit_lists(task.tensors, first, last, [&](size_t index, int64_t begin, int64_t end) {
      const ListedElements& tensor = task.tensors[index];
      uint64_t sum = 0;
      int64_t count = 0;
      with_word(tensor.item_bytes, [&](auto word) {
        visit_addresses<false>(tensor, begin, end, [&](int64_t at, int64_t address) {
          sum += hash_element(load<decltype(word)>(address), tensor.positions[at]);
          ++count;
        });
      });
      add(task.sums[index], sum);
      std::atomic_ref<int64_t>(task.counts[index]).fetch_add(count, std::memory_order_relaxed);
    });
  };
  run_lists(task, body, parallel_for);
}

}  // namespace torchtitan_ext::ops
