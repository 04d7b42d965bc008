#include "ops/copy_tiles.h"

#include <bit>
#include <span>

namespace torchtitan_ext::ops {
namespace {

using core::Loop;
using core::RunNest;

// log2 of the largest word of up to 16 bytes that divides everything.
int word_log2(const RunNest& nest, std::span<const Loop> loops, uint64_t src, uint64_t dst) {
  uint64_t all = 16 | src | dst | static_cast<uint64_t>(nest.run_bytes);
  for (const Loop& loop : loops) {
    all |= static_cast<uint64_t>(loop.src_stride_bytes) | static_cast<uint64_t>(loop.dst_stride_bytes);
  }
  return std::countr_zero(all);
}

// Adds the nest, unrolling its outer loops until the rest is short enough for one entry.
void add_nest(CopyTiles& tiles, int log2, int64_t run_bytes, std::span<const Loop> loops, uint64_t src, uint64_t dst) {
  int64_t num_words = run_bytes >> log2;
  for (const Loop& loop : loops) num_words *= loop.count;  // at most the bytes of the tensor
  if (loops.size() <= kMaxNestLoops && num_words <= kMaxNestWords) {
    NestEntry entry;
    entry.src = src;
    entry.dst = dst;
    entry.num_words = static_cast<uint32_t>(num_words);
    entry.num_loops = static_cast<uint32_t>(loops.size());
    entry.words_per_run = FastDivisor(static_cast<uint32_t>(run_bytes >> log2));
    for (size_t index = 0; index < loops.size(); ++index) {
      entry.counts[index] = FastDivisor(static_cast<uint32_t>(loops[index].count));
      entry.src_strides[index] = loops[index].src_stride_bytes;
      entry.dst_strides[index] = loops[index].dst_stride_bytes;
    }
    tiles.nests[log2].push_back(entry);
    return;
  }
  if (loops.size() <= kMaxNestLoops && loops[0].count > 1) {  // too long: halve the outermost loop
    std::vector<Loop> half(loops.begin(), loops.end());
    half[0].count = loops[0].count / 2;
    add_nest(tiles, log2, run_bytes, half, src, dst);
    src += half[0].count * loops[0].src_stride_bytes;
    dst += half[0].count * loops[0].dst_stride_bytes;
    half[0].count = loops[0].count - half[0].count;
    add_nest(tiles, log2, run_bytes, half, src, dst);
    return;
  }
  for (int64_t index = 0; index < loops[0].count; ++index) {
    add_nest(tiles, log2, run_bytes, loops.subspan(1), src + index * loops[0].src_stride_bytes,
             dst + index * loops[0].dst_stride_bytes);
  }
}

void add_spans(CopyTiles& tiles, int64_t run_bytes, std::span<const Loop> loops, uint64_t src, uint64_t dst) {
  if (loops.empty()) {
    tiles.spans.push_back({src, dst, static_cast<uint64_t>(run_bytes)});
    return;
  }
  for (int64_t index = 0; index < loops[0].count; ++index) {
    add_spans(tiles, run_bytes, loops.subspan(1), src + index * loops[0].src_stride_bytes,
              dst + index * loops[0].dst_stride_bytes);
  }
}

}  // namespace

CopyTiles make_copy_tiles(const core::RunList& runs, uint64_t src, uint64_t dst) {
  CopyTiles tiles;
  tiles.spans.reserve(runs.nests().size());
  for (const RunNest& nest : runs.nests()) {
    const std::span<const Loop> loops = runs.loops_of(nest);
    const uint64_t from = src + nest.src_bytes;
    const uint64_t to = dst + nest.dst_bytes;
    if (loops.empty() || nest.run_bytes > kMaxNestRunBytes) {
      add_spans(tiles, nest.run_bytes, loops, from, to);
    } else {
      add_nest(tiles, word_log2(nest, loops, from, to), nest.run_bytes, loops, from, to);
    }
  }
  return tiles;
}

}  // namespace torchtitan_ext::ops
