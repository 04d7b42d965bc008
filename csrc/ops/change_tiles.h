// What one thread of one block does on a CUDA device for the operators of changes. changes_cuda.cu only launches. Plain C++,
// so that the tests run every block and thread on a CPU.
//
// A launch takes a table in the memory of the device: one entry for each tensor, and the numbers of their boxes
// (core::BoxWalk::append_numbers). The tiles of all tensors are numbered through, one block each; a block finds its tensor by
// binary search.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/element_hash.h"
#include "ops/run_tiles.h"

namespace torchtitan_ext::ops {

// Of one mask: 64 words are 4,096 elements. A thread makes one byte of the mask at a time, or lists the bits of one word.
constexpr int64_t kMaskTileBytes = kTileThreads * kTileUnroll;
constexpr int64_t kMaskTileWords = kTileThreads;
constexpr int64_t kListTileElements = kTileThreads * kTileUnroll;

struct MarkEntry {
  int64_t first_tile = 0;
  int64_t tensor = 0;  // of the list
  uint64_t left = 0, right = 0;
  int64_t num_elements = 0;
  int64_t first_word = 0;
  int64_t item_bytes = 1;
  int64_t box = -1;        // among the numbers, with two places: of a tensor that is not contiguous
  int64_t is_aligned = 0;  // both sides, to 16 bytes
};

struct ListEntry {
  int64_t first_tile = 0;
  uint64_t mask = 0;  // addresses, as the next
  uint64_t positions = 0, values = 0, old_sum = 0, new_sum = 0;
  int64_t num_elements = 0;
  int64_t count = 0;
  int64_t item_bytes = 1;
  int64_t first_box = 0, num_boxes = 0;  // with three places
};

struct ListedEntry {
  int64_t first_tile = 0;
  int64_t tensor = 0;
  uint64_t positions = 0, values = 0;
  int64_t count = 0;
  int64_t item_bytes = 1;
  int64_t first_box = 0, num_boxes = 0;  // with one place
};

template <typename Entry>
struct ChangeTable {
  const Entry* entries = nullptr;
  const int64_t* numbers = nullptr;
  int64_t count = 0;

  TTE_HOST_DEVICE int64_t entry_of(int64_t tile) const {
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (entries[middle].first_tile <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Calls function(Word{}) with the word of that many bytes.
template <typename Function>
TTE_HOST_DEVICE auto with_word(int64_t item_bytes, const Function& function) {
  if (item_bytes == 1) return function(uint8_t{});
  if (item_bytes == 2) return function(uint16_t{});
  if (item_bytes == 4) return function(uint32_t{});
  if (item_bytes == 8) return function(uint64_t{});
  return function(Word16{});
}

template <typename Word>
struct Aliasing {
  typedef Word __attribute__((may_alias)) type;
};
template <>
struct Aliasing<Word16> {
  typedef Word16 type;
};

template <typename Word>
TTE_HOST_DEVICE Word load_word(int64_t address) {
  return *reinterpret_cast<const typename Aliasing<Word>::type*>(address);
}

template <typename Word>
TTE_HOST_DEVICE bool differ(const Word& left, const Word& right) {
  if constexpr (sizeof(Word) == 16) {
    return left.low != right.low || left.high != right.high;
  } else {
    return left != right;
  }
}

template <uint32_t kPlaces>
TTE_HOST_DEVICE int64_t numbers_of_box(const int64_t* box) {
  return 2 + kPlaces + box[1] * (2 + kPlaces);
}

// The places of the element with this key, if it is in the box.
template <uint32_t kPlaces>
TTE_HOST_DEVICE bool find_places(const int64_t* box, int64_t key, int64_t* places) {
  int64_t rest = key - box[0];
  if (rest < 0) return false;
  for (uint32_t place = 0; place < kPlaces; ++place) places[place] = box[2 + place];
  const int64_t num_dims = box[1];
  const int64_t* dims = box + 2 + kPlaces;
  for (int64_t dim = 0; dim < num_dims; ++dim, dims += 2 + kPlaces) {
    const int64_t index = rest / dims[1];
    if (index >= dims[0]) return false;
    rest -= index * dims[1];
    for (uint32_t place = 0; place < kPlaces; ++place) places[place] += index * dims[2 + place];
  }
  return true;
}

template <uint32_t kPlaces>
TTE_HOST_DEVICE bool find_places(const int64_t* boxes, int64_t num_boxes, int64_t key, int64_t* places) {
  for (int64_t box = 0; box < num_boxes; ++box, boxes += numbers_of_box<kPlaces>(boxes)) {
    if (find_places<kPlaces>(boxes, key, places)) return true;
  }
  return false;
}

TTE_HOST_DEVICE uint32_t bits_set(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __popcll(bits);
#else
  return static_cast<uint32_t>(__builtin_popcountll(bits));
#endif
}

TTE_HOST_DEVICE uint32_t lowest_bit(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctzll(bits));
#endif
}

// Eight elements that lie one behind the other, aligned to 16 bytes (8 where all of them are 8 bytes): one bit for each.
template <uint32_t kItemBytes>
TTE_HOST_DEVICE uint32_t differing_bits(uint64_t left, uint64_t right) {
  constexpr uint32_t kLanes = kItemBytes;  // of 8 bytes
  uint64_t lanes[kLanes];
  if constexpr (kLanes == 1) {
    lanes[0] = *reinterpret_cast<const Word8*>(left) ^ *reinterpret_cast<const Word8*>(right);
  } else {
    TTE_UNROLL
    for (uint32_t lane = 0; lane < kLanes; lane += 2) {
      const Word16 of_left = reinterpret_cast<const Word16*>(left)[lane / 2];
      const Word16 of_right = reinterpret_cast<const Word16*>(right)[lane / 2];
      lanes[lane] = of_left.low ^ of_right.low;
      lanes[lane + 1] = of_left.high ^ of_right.high;
    }
  }
  uint32_t bits = 0;
  TTE_UNROLL
  for (uint32_t item = 0; item < 8; ++item) {
    bool differs;
    if constexpr (kItemBytes == 16) {
      differs = (lanes[2 * item] | lanes[2 * item + 1]) != 0;
    } else {
      constexpr uint64_t kMask = kItemBytes == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * kItemBytes % 64)) - 1;
      differs = (lanes[item * kItemBytes / 8] >> (8 * (item * kItemBytes % 8)) & kMask) != 0;
    }
    bits |= static_cast<uint32_t>(differs) << item;
  }
  return bits;
}

// Byte `byte` of the mask of a tensor.
template <typename Word>
TTE_HOST_DEVICE uint32_t mask_byte(const ChangeTable<MarkEntry>& table, const MarkEntry& entry, int64_t byte) {
  constexpr int64_t kBytes = sizeof(Word);
  const int64_t first = 8 * byte;
  if (entry.is_aligned && first + 8 <= entry.num_elements) {
    return differing_bits<kBytes>(entry.left + first * kBytes, entry.right + first * kBytes);
  }
  uint32_t bits = 0;
  for (int64_t item = 0; item < 8 && first + item < entry.num_elements; ++item) {
    int64_t places[2] = {static_cast<int64_t>(entry.left) + (first + item) * kBytes,
                         static_cast<int64_t>(entry.right) + (first + item) * kBytes};
    if (entry.box >= 0) find_places<2>(table.numbers + entry.box, first + item, places);
    const bool differs = differ(load_word<Word>(places[0]), load_word<Word>(places[1]));
    bits |= static_cast<uint32_t>(differs) << item;
  }
  return bits;
}

// Writes a thread's bytes of a tile of the mask; returns how many elements differ. Neighbouring threads read neighbouring
// elements.
TTE_HOST_DEVICE uint64_t mark_tile(const ChangeTable<MarkEntry>& table, uint64_t* mask, int64_t tile, uint32_t thread) {
  const MarkEntry& entry = table.entries[table.entry_of(tile)];
  const int64_t num_bytes = (entry.num_elements + 63) / 64 * 8;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(mask + entry.first_word);
  uint64_t count = 0;
  const int64_t first = (tile - entry.first_tile) * kMaskTileBytes + thread;
  for (uint32_t step = 0; step < kTileUnroll; ++step) {
    const int64_t byte = first + step * kTileThreads;
    if (byte >= num_bytes) break;
    const uint32_t bits =
        with_word(entry.item_bytes, [&](auto word) { return mask_byte<decltype(word)>(table, entry, byte); });
    bytes[byte] = static_cast<uint8_t>(bits);
    count += bits_set(bits);
  }
  return count;
}

// Without the bits behind the last element, which stand for none.
TTE_HOST_DEVICE uint64_t mask_word(const ListEntry& entry, int64_t word) {
  const int64_t left = entry.num_elements - word * 64;
  if (left <= 0) return 0;
  const uint64_t bits = reinterpret_cast<const uint64_t*>(entry.mask)[word];
  return left < 64 ? bits & ((uint64_t{1} << left) - 1) : bits;
}

// How many elements a thread has in a tile: it has one word of the mask.
TTE_HOST_DEVICE uint64_t count_tile(const ChangeTable<ListEntry>& table, int64_t tile, uint32_t thread) {
  const ListEntry& entry = table.entries[table.entry_of(tile)];
  return bits_set(mask_word(entry, (tile - entry.first_tile) * kMaskTileWords + thread));
}

// The sums of all numbers before each of them, in one block. First each thread adds up its part of the numbers, then, when
// all have done so, it writes the sums of its part. `parts` has room for kScanThreads numbers that all threads see.
constexpr uint32_t kScanThreads = 1024;

TTE_HOST_DEVICE int64_t scan_begin(int64_t count, uint32_t thread) {
  return count / kScanThreads * thread + (thread < count % kScanThreads ? thread : count % kScanThreads);
}

TTE_HOST_DEVICE void scan_parts(const int64_t* numbers, int64_t count, uint32_t thread, int64_t* parts) {
  int64_t sum = 0;
  for (int64_t at = scan_begin(count, thread); at < scan_begin(count, thread + 1); ++at) sum += numbers[at];
  parts[thread] = sum;
}

TTE_HOST_DEVICE void scan_write(int64_t* numbers, int64_t count, uint32_t thread, const int64_t* parts) {
  int64_t sum = 0;
  for (uint32_t before = 0; before < thread; ++before) sum += parts[before];
  for (int64_t at = scan_begin(count, thread); at < scan_begin(count, thread + 1); ++at) {
    const int64_t number = numbers[at];
    numbers[at] = sum;
    sum += number;
  }
}

struct ListSums {
  uint64_t before = 0, now = 0;
};

// Lists the elements that a thread has in a tile. `starts` has for each tile how many elements come before it.
TTE_HOST_DEVICE ListSums list_tile(const ChangeTable<ListEntry>& table, const int64_t* starts, int64_t tile,
                                   uint32_t thread) {
  const ListEntry& entry = table.entries[table.entry_of(tile)];
  const int64_t first = (tile - entry.first_tile) * kMaskTileWords;
  int64_t at = starts[tile] - starts[entry.first_tile];
  // Those of the threads before this one. Cheaper than it looks: a block's words are in its cache.
  for (uint32_t before = 0; before < thread; ++before) at += bits_set(mask_word(entry, first + before));
  const int64_t origin = (first + thread) * 64;
  return with_word(entry.item_bytes, [&](auto word) {
    using Word = decltype(word);
    ListSums sums;
    for (uint64_t bits = mask_word(entry, first + thread); bits != 0 && at < entry.count; bits &= bits - 1, ++at) {
      int64_t places[3] = {0, 0, 0};
      if (!find_places<3>(table.numbers + entry.first_box, entry.num_boxes, origin + lowest_bit(bits), places))
        continue;
      const Word now = load_word<Word>(places[0]);
      reinterpret_cast<int64_t*>(entry.positions)[at] = places[2];
      reinterpret_cast<typename Aliasing<Word>::type*>(entry.values)[at] = now;
      sums.now += core::hash_element(now, static_cast<uint64_t>(places[2]));
      sums.before += core::hash_element(load_word<Word>(places[1]), static_cast<uint64_t>(places[2]));
    }
    return sums;
  });
}

// Calls visit(word, position, address, at) for those listed elements of a tile that a thread has and the shard holds.
template <typename Visit>
TTE_HOST_DEVICE void visit_listed_tile(const ChangeTable<ListedEntry>& table, const ListedEntry& entry, int64_t tile,
                                       uint32_t thread, const Visit& visit) {
  const int64_t first = (tile - entry.first_tile) * kListTileElements + thread;
  for (uint32_t step = 0; step < kTileUnroll; ++step) {
    const int64_t at = first + step * kTileThreads;
    if (at >= entry.count) break;
    const int64_t position = reinterpret_cast<const int64_t*>(entry.positions)[at];
    int64_t address = 0;
    if (!find_places<1>(table.numbers + entry.first_box, entry.num_boxes, position, &address)) continue;
    visit(position, address, at);
  }
}

TTE_HOST_DEVICE void write_tile(const ChangeTable<ListedEntry>& table, int64_t tile, uint32_t thread) {
  const ListedEntry& entry = table.entries[table.entry_of(tile)];
  visit_listed_tile(table, entry, tile, thread, [&](int64_t, int64_t address, int64_t at) {
    with_word(entry.item_bytes, [&](auto word) {
      using Word = typename Aliasing<decltype(word)>::type;
      *reinterpret_cast<Word*>(address) = reinterpret_cast<const Word*>(entry.values)[at];
    });
  });
}

struct FoundSum {
  uint64_t sum = 0, found = 0;
};

TTE_HOST_DEVICE FoundSum sum_tile(const ChangeTable<ListedEntry>& table, int64_t tile, uint32_t thread) {
  const ListedEntry& entry = table.entries[table.entry_of(tile)];
  FoundSum result;
  visit_listed_tile(table, entry, tile, thread, [&](int64_t position, int64_t address, int64_t) {
    result.sum += with_word(entry.item_bytes, [&](auto word) {
      return core::hash_element(load_word<decltype(word)>(address), static_cast<uint64_t>(position));
    });
    result.found += 1;
  });
  return result;
}

}  // namespace torchtitan_ext::ops
