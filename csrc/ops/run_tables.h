// From a list of runs to the tables of entries that CUDA kernels take as arguments (run_tiles.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/runs.h"
#include "ops/hash_runs.h"
#include "ops/run_tiles.h"

namespace torchtitan_ext::ops {

// What a list of runs, whose offsets count from `src` and `dst`, comes to. `nests[i]` has words of 1 << i bytes.
struct CopyEntries {
  std::vector<SpanEntry> spans;
  std::array<std::vector<NestEntry>, 5> nests;
};

CopyEntries make_copy_entries(const core::RunList& runs, uint64_t src, uint64_t dst);

// The same for hashing, whose destinations may be any numbers: entry i has words of 1 << i bytes. Sources are aligned to
// words.
std::array<std::vector<HashEntry>, 4> make_hash_entries(std::span<const HashedRuns> lists);

// Calls launch(table) for tables that hold all entries, small ones where they suffice.
template <uint32_t kCapacity, typename Entry, typename Launch>
void for_each_table(const std::vector<Entry>& entries, const Launch& launch) {
  const auto fill = [&](auto& table, size_t first, size_t count) {
    table.count = static_cast<uint32_t>(count);
    uint32_t tile = 0;
    for (size_t index = 0; index < count; ++index) {
      table.entries[index] = entries[first + index];
      table.first_tile[index] = tile;
      tile += num_tiles(table.entries[index]);
    }
    table.first_tile[count] = tile;
    launch(table);
  };
  for (size_t first = 0; first < entries.size(); first += kCapacity) {
    const size_t count = std::min<size_t>(entries.size() - first, kCapacity);
    if (count <= kSmallCapacity) {
      Table<Entry, kSmallCapacity> table;
      fill(table, first, count);
    } else {
      Table<Entry, kCapacity> table;
      fill(table, first, count);
    }
  }
}

// What a failed launch is told as. Kernel arguments above 4 KiB, which large tables are, came with CUDA 12.1: an older
// driver refuses them, whatever it says. `driver_version` is that of cudaDriverGetVersion, e.g. 12010.
std::string launch_error(const char* where, const char* cuda_says, size_t argument_bytes, int driver_version);

}  // namespace torchtitan_ext::ops
