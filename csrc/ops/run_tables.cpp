#include "ops/run_tables.h"

#include <bit>
#include <span>

#include "core/check.h"

namespace torchtitan_ext::ops {
namespace {

constexpr size_t kOldArgumentBytes = 4096;
constexpr int kLargeArgumentsVersion = 12010;

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

// Adds the nest, cut into entries that are short enough and have few enough loops.
void add_nest(std::vector<NestEntry>& entries, int log2, int64_t run_bytes, std::span<const Loop> loops, uint64_t src,
              uint64_t dst) {
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
    entries.push_back(entry);
    return;
  }
  if (loops.empty()) {
    const int64_t half = (num_words / 2) << log2;
    add_nest(entries, log2, half, loops, src, dst);
    add_nest(entries, log2, run_bytes - half, loops, src + half, dst + half);
    return;
  }
  const Loop& outer = loops[0];
  if (loops.size() <= kMaxNestLoops && outer.count > 1) {
    std::vector<Loop> part(loops.begin(), loops.end());
    part[0].count = outer.count / 2;
    add_nest(entries, log2, run_bytes, part, src, dst);
    src += part[0].count * outer.src_stride_bytes;
    dst += part[0].count * outer.dst_stride_bytes;
    part[0].count = outer.count - part[0].count;
    add_nest(entries, log2, run_bytes, part, src, dst);
    return;
  }
  for (int64_t index = 0; index < outer.count; ++index) {
    add_nest(entries, log2, run_bytes, loops.subspan(1), src + index * outer.src_stride_bytes,
             dst + index * outer.dst_stride_bytes);
  }
}

void add_spans(CopyEntries& entries, int64_t run_bytes, std::span<const Loop> loops, uint64_t src, uint64_t dst) {
  if (loops.empty()) {
    entries.spans.push_back({src, dst, static_cast<uint64_t>(run_bytes)});
    return;
  }
  for (int64_t index = 0; index < loops[0].count; ++index) {
    add_spans(entries, run_bytes, loops.subspan(1), src + index * loops[0].src_stride_bytes,
              dst + index * loops[0].dst_stride_bytes);
  }
}

}  // namespace

CopyEntries make_copy_entries(const core::RunList& runs, uint64_t src, uint64_t dst) {
  CopyEntries entries;
  entries.spans.reserve(runs.nests().size());
  for (const RunNest& nest : runs.nests()) {
    const std::span<const Loop> loops = runs.loops_of(nest);
    const uint64_t from = src + nest.src_bytes;
    const uint64_t to = dst + nest.dst_bytes;
    if (loops.empty() || nest.run_bytes > kMaxNestRunBytes) {
      add_spans(entries, nest.run_bytes, loops, from, to);
    } else {
      const int log2 = word_log2(nest, loops, from, to);
      add_nest(entries.nests[log2], log2, nest.run_bytes, loops, from, to);
    }
  }
  return entries;
}

std::array<std::vector<HashEntry>, 4> make_hash_entries(std::span<const HashedRuns> lists) {
  std::array<std::vector<HashEntry>, 4> entries;
  std::vector<NestEntry> of_list;
  for (size_t number = 0; number < lists.size(); ++number) {
    const core::RunList& runs = lists[number].runs;
    const int log2 = std::countr_zero(static_cast<uint64_t>(lists[number].word_bytes));
    of_list.clear();
    for (const RunNest& nest : runs.nests()) {
      add_nest(of_list, log2, nest.run_bytes, runs.loops_of(nest), nest.src_bytes, nest.dst_bytes);
    }
    for (const NestEntry& nest : of_list) {
      entries[static_cast<size_t>(log2)].push_back({nest, static_cast<uint32_t>(number)});
    }
  }
  return entries;
}

std::string launch_error(const char* where, const char* cuda_says, size_t argument_bytes, int driver_version) {
  const std::string said = core::concat(where, ": CUDA says: ", cuda_says);
  if (argument_bytes <= kOldArgumentBytes || driver_version <= 0 || driver_version >= kLargeArgumentsVersion) {
    return said;
  }
  return core::concat(said, "; the kernel takes ", argument_bytes, " bytes of arguments, and more than ",
                      kOldArgumentBytes, " need the NVIDIA driver R530 (CUDA 12.1) or newer, this one is for CUDA ",
                      driver_version / 1000, ".", driver_version % 1000 / 10, ": update it");
}

}  // namespace torchtitan_ext::ops
