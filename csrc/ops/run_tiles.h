// What one thread of one block does on a CUDA device, for copies and for hashes: tables of entries, which travel as
// kernel arguments, and functions over their tiles (those of hashes in hash_tiles.h). run_tables.h makes the tables,
// copy_runs_cuda.cu and hash_runs_cuda.cu only launch. Plain C++, so that the tests run every block and thread on a CPU.
//
// A launch takes a table of entries and one block per tile. The tiles of all entries are numbered through; a block
// finds its entry by binary search in `first_tile`. Tables of up to 32 KiB are kernel arguments: nothing is allocated,
// copied or waited for, and 5,000 tensors are 5 launches. Above 4 KiB, that is for more than kSmallCapacity entries,
// they need the NVIDIA driver R530.
//
// Two kinds of entries:
//   span: one contiguous copy, any alignment. A tile is 16 KiB of it, aligned at the destination: neighbouring threads
//         move neighbouring 16-byte words (shorter ones where source and destination are aligned differently); the few
//         bytes before the first and behind the last whole word are moved one by one.
//   nest: a loop nest of short runs. All of its words are numbered through in the order of the destination, and
//         neighbouring threads move neighbouring words: writes are coalesced, reads as far as the runs are long. The
//         word is the largest power of two of up to 16 bytes that divides addresses, strides and run. Hashes are sums
//         over the words of a nest, whatever its runs.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TTE_HOST_DEVICE __host__ __device__ inline
#define TTE_UNROLL _Pragma("unroll")
#else
#define TTE_HOST_DEVICE inline
#define TTE_UNROLL
#endif

namespace torchtitan_ext::ops {

constexpr uint32_t kTileThreads = 128;
// Loads of one thread in flight: 8 x 16 B x 2,048 threads of an SM cover the latency of its memory.
constexpr uint32_t kTileUnroll = 8;
constexpr uint32_t kSpanTileBytes = 16 * kTileThreads * kTileUnroll;
constexpr uint32_t kNestTileWords = kTileThreads * kTileUnroll;
constexpr uint32_t kMaxNestLoops = 5;
// A nest is cut into entries of at most so many words: the index of a word stays within 31 bits, as FastDivisor needs.
constexpr int64_t kMaxNestWords = int64_t{1} << 30;
// A nest of longer runs is better off as spans, which do not divide per word.
constexpr int64_t kMaxNestRunBytes = int64_t{32} << 10;

// The words may alias anything: they stand for bytes of tensors of any dtype.
struct __attribute__((aligned(16), may_alias)) Word16 {
  uint64_t low, high;
};
typedef uint64_t __attribute__((may_alias)) Word8;
typedef uint32_t __attribute__((may_alias)) Word4;
typedef uint16_t __attribute__((may_alias)) Word2;
typedef uint8_t Word1;

// Division by a constant of n < 2^31: n / divisor == (n * multiplier) >> (32 + shift), the method of Granlund and
// Montgomery (https://doi.org/10.1145/178243.178249).
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t by) : divisor(by) {
    if (by == 1) return;
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < by) ++log2;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + by - 1) / by);
    shift = log2 - 1;
  }

  TTE_HOST_DEVICE uint32_t divide(uint32_t number) const {
    if (divisor == 1) return number;
    return static_cast<uint32_t>((static_cast<uint64_t>(number) * multiplier) >> 32) >> shift;
  }
};

struct SpanEntry {
  uint64_t src = 0;
  uint64_t dst = 0;
  uint64_t num_bytes = 0;
};

struct NestEntry {
  uint64_t src = 0;
  uint64_t dst = 0;
  uint32_t num_words = 0;
  uint32_t num_loops = 0;
  FastDivisor words_per_run;
  FastDivisor counts[kMaxNestLoops];
  int64_t src_strides[kMaxNestLoops] = {};
  int64_t dst_strides[kMaxNestLoops] = {};
};

// A nest of one of several lists that are hashed together.
struct HashEntry : NestEntry {
  uint32_t list = 0;
};

TTE_HOST_DEVICE uint64_t unaligned_head_bytes(const SpanEntry& entry) {
  const uint64_t head = (16 - (entry.dst & 15)) & 15;
  return head < entry.num_bytes ? head : entry.num_bytes;
}

TTE_HOST_DEVICE uint32_t num_tiles(const SpanEntry& entry) {
  const uint64_t body = entry.num_bytes - unaligned_head_bytes(entry);
  return body == 0 ? 1 : static_cast<uint32_t>((body + kSpanTileBytes - 1) / kSpanTileBytes);
}

TTE_HOST_DEVICE uint32_t num_tiles(const NestEntry& entry) {
  return (entry.num_words + kNestTileWords - 1) / kNestTileWords;
}

// `first_tile[count]` is the number of tiles of the whole table.
template <typename Entry, uint32_t kCapacity>
struct Table {
  uint32_t count = 0;
  uint32_t first_tile[kCapacity + 1] = {};
  Entry entries[kCapacity];

  TTE_HOST_DEVICE uint32_t entry_of(uint32_t tile) const {
    uint32_t low = 0;
    uint32_t high = count;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Small tables for single calls, since a launch copies its arguments; large ones, just below the limit of 32,764 bytes,
// for lists.
template <uint32_t kCapacity>
using SpanTable = Table<SpanEntry, kCapacity>;
template <uint32_t kCapacity>
using NestTable = Table<NestEntry, kCapacity>;
constexpr uint32_t kSmallCapacity = 16;
constexpr uint32_t kSpanCapacity = 1160;
constexpr uint32_t kNestCapacity = 172;
static_assert(sizeof(SpanTable<kSpanCapacity>) <= 32764 && sizeof(NestTable<kNestCapacity>) <= 32764);
static_assert(sizeof(Table<HashEntry, kNestCapacity>) <= 32764);

template <typename Word>
TTE_HOST_DEVICE void copy_span_words(uint64_t dst, uint64_t src, uint32_t num_bytes, uint32_t thread) {
  Word* to = reinterpret_cast<Word*>(dst);
  const Word* from = reinterpret_cast<const Word*>(src);
  const uint32_t num_words = num_bytes / sizeof(Word);
  for (uint32_t first = thread; first < num_words; first += kTileThreads * kTileUnroll) {
    Word words[kTileUnroll];
    TTE_UNROLL
    for (uint32_t step = 0; step < kTileUnroll; ++step) {
      const uint32_t index = first + step * kTileThreads;
      if (index < num_words) words[step] = from[index];
    }
    TTE_UNROLL
    for (uint32_t step = 0; step < kTileUnroll; ++step) {
      const uint32_t index = first + step * kTileThreads;
      if (index < num_words) to[index] = words[step];
    }
  }
}

template <typename SomeTable>
TTE_HOST_DEVICE void copy_span_tile(const SomeTable& table, uint32_t tile, uint32_t thread) {
  const uint32_t position = table.entry_of(tile);
  const SpanEntry& entry = table.entries[position];
  const uint64_t head = unaligned_head_bytes(entry);
  const uint64_t begin = head + static_cast<uint64_t>(tile - table.first_tile[position]) * kSpanTileBytes;
  const uint64_t left = entry.num_bytes - begin;
  const uint32_t num_bytes = static_cast<uint32_t>(left < kSpanTileBytes ? left : kSpanTileBytes);
  const uint32_t body = num_bytes & ~uint32_t{15};
  const uint64_t dst = entry.dst + begin;
  const uint64_t src = entry.src + begin;

  if (begin == head && thread < head) {
    reinterpret_cast<Word1*>(entry.dst)[thread] = reinterpret_cast<const Word1*>(entry.src)[thread];
  }
  if (thread < num_bytes - body) {
    reinterpret_cast<Word1*>(dst)[body + thread] = reinterpret_cast<const Word1*>(src)[body + thread];
  }
  if ((src & 15) == 0) {
    copy_span_words<Word16>(dst, src, body, thread);
  } else if ((src & 7) == 0) {
    copy_span_words<Word8>(dst, src, body, thread);
  } else if ((src & 3) == 0) {
    copy_span_words<Word4>(dst, src, body, thread);
  } else if ((src & 1) == 0) {
    copy_span_words<Word2>(dst, src, body, thread);
  } else {
    copy_span_words<Word1>(dst, src, body, thread);
  }
}

// Calls visit(src, dst, step) for the words of a tile that belong to a thread, `step` counting up from 0.
template <typename Word, typename SomeTable, typename Visit>
TTE_HOST_DEVICE void visit_nest_words(const SomeTable& table, uint32_t tile, uint32_t thread, const Visit& visit) {
  const uint32_t position = table.entry_of(tile);
  const NestEntry& entry = table.entries[position];
  const uint32_t first = (tile - table.first_tile[position]) * kNestTileWords + thread;
  TTE_UNROLL
  for (uint32_t step = 0; step < kTileUnroll; ++step) {
    const uint32_t index = first + step * kTileThreads;
    if (index >= entry.num_words) continue;
    uint32_t rest = entry.words_per_run.divide(index);
    const uint64_t inside = static_cast<uint64_t>(index - rest * entry.words_per_run.divisor) * sizeof(Word);
    uint64_t src = entry.src + inside;
    uint64_t dst = entry.dst + inside;
    for (uint32_t loop = entry.num_loops; loop-- > 0;) {
      const uint32_t outer = entry.counts[loop].divide(rest);
      const int64_t at = rest - outer * entry.counts[loop].divisor;
      src += at * entry.src_strides[loop];
      dst += at * entry.dst_strides[loop];
      rest = outer;
    }
    visit(src, dst, step);
  }
}

// All words are read before the first is written, so that many reads are in flight.
template <typename Word, typename SomeTable>
TTE_HOST_DEVICE void copy_nest_tile(const SomeTable& table, uint32_t tile, uint32_t thread) {
  Word words[kTileUnroll];
  uint64_t places[kTileUnroll];
  TTE_UNROLL
  for (uint32_t step = 0; step < kTileUnroll; ++step) places[step] = 0;
  visit_nest_words<Word>(table, tile, thread, [&](uint64_t src, uint64_t dst, uint32_t step) {
    words[step] = *reinterpret_cast<const Word*>(src);
    places[step] = dst;
  });
  TTE_UNROLL
  for (uint32_t step = 0; step < kTileUnroll; ++step) {
    if (places[step] != 0) *reinterpret_cast<Word*>(places[step]) = words[step];
  }
}

}  // namespace torchtitan_ext::ops
