// What the threads of one block do on a CUDA device to hash a tile: the sum of each thread, and the sum of these over the
// block. hash_runs_cuda.cu only launches. Plain C++ over a `Block`, so that the tests run a block's threads on a CPU.
#pragma once

#include <cstdint>

#include "core/element_hash.h"
#include "ops/run_tiles.h"

namespace torchtitan_ext::ops {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kTileWarps = kTileThreads / kWarpThreads;
static_assert(kTileThreads % kWarpThreads == 0);

// The sum of the hashes of the words that a thread has of a tile. What is a destination in the tables is a position in
// the global tensor here.
template <typename Word, typename SomeTable>
TTE_HOST_DEVICE uint64_t hash_nest_tile(const SomeTable& table, uint32_t tile, uint32_t thread) {
  uint64_t sum = 0;
  visit_nest_words<Word>(table, tile, thread, [&](uint64_t src, uint64_t dst, uint32_t) {
    sum += core::hash_word(*reinterpret_cast<const Word*>(src), dst / sizeof(Word));
  });
  return sum;
}

// Adds up the sums of all threads of a block, each of which calls this once; the result is that of thread 0, and any
// number on the others. Within a warp the upper half of the lanes gives its sums to the lower half, then the next
// quarter, until lane 0 has all; then thread 0 adds up the warps. A Block has
//
//   uint64_t shuffle_down(uint64_t value, uint32_t distance)  the value of the thread so many lanes above, any number
//                                                             above the last lane; all threads of a warp call it at once
//   warp_sums()                                               kTileWarps numbers of 64 bits that all threads see
//   void synchronize()                                        returns when all threads of the block are there
template <typename Block>
TTE_HOST_DEVICE uint64_t sum_over_block(Block& block, uint32_t thread, uint64_t sum) {
  for (uint32_t distance = kWarpThreads / 2; distance > 0; distance /= 2) sum += block.shuffle_down(sum, distance);
  if (thread % kWarpThreads == 0) block.warp_sums()[thread / kWarpThreads] = sum;
  block.synchronize();
  if (thread == 0) {
    for (uint32_t warp = 1; warp < kTileWarps; ++warp) sum += block.warp_sums()[warp];
  }
  return sum;
}

}  // namespace torchtitan_ext::ops
