// The CUDA kernels' work, block by block and thread by thread on a CPU, and the CPU kernel, against copying byte by
// byte.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/element_hash.h"
#include "ops/copy_runs.h"
#include "ops/hash_runs.h"
#include "ops/hash_tiles.h"
#include "ops/run_tables.h"

namespace torchtitan_ext::ops {
namespace {

using core::RunList;
using core::Sizes;
using Bytes = std::vector<uint8_t>;

template <typename Word>
void run_nests(const std::vector<NestEntry>& entries) {
  for_each_table<kNestCapacity>(entries, [](const auto& table) {
    for (uint32_t tile = 0; tile < table.first_tile[table.count]; ++tile) {
      for (uint32_t thread = 0; thread < kTileThreads; ++thread) copy_nest_tile<Word>(table, tile, thread);
    }
  });
}

void run_tiles(const RunList& runs, uintptr_t src, uintptr_t dst) {
  const CopyEntries entries = make_copy_entries(runs, src, dst);
  for_each_table<kSpanCapacity>(entries.spans, [](const auto& table) {
    for (uint32_t tile = 0; tile < table.first_tile[table.count]; ++tile) {
      for (uint32_t thread = 0; thread < kTileThreads; ++thread) copy_span_tile(table, tile, thread);
    }
  });
  run_nests<Word1>(entries.nests[0]);
  run_nests<Word2>(entries.nests[1]);
  run_nests<Word4>(entries.nests[2]);
  run_nests<Word8>(entries.nests[3]);
  run_nests<Word16>(entries.nests[4]);
}

// Many short ranges, to cut runs where threads would.
void parallel_for(int64_t begin, int64_t end, int64_t, RangeBody body, void* context) {
  const int64_t step = std::max<int64_t>((end - begin) / 7, 1);
  for (int64_t first = begin; first < end; first += step) body(first, std::min(first + step, end), context);
}

Bytes expected(const RunList& runs, const Bytes& src, size_t size) {
  Bytes dst(size, 0xee);
  for (const core::Run& run : runs.enumerate()) {
    std::memcpy(dst.data() + run.dst_bytes, src.data() + run.src_bytes, run.num_bytes);
  }
  return dst;
}

void check(const RunList& runs, int64_t src_shift, int64_t dst_shift) {
  const size_t src_size = runs.src_extent().end + src_shift;
  const size_t dst_size = runs.dst_extent().end + dst_shift;
  Bytes src(src_size);
  std::mt19937 random(1);
  for (uint8_t& byte : src) byte = static_cast<uint8_t>(random());
  const Bytes shifted(src.begin() + src_shift, src.end());
  const Bytes result = expected(runs, shifted, dst_size - dst_shift);
  for (const bool tiles : {true, false}) {
    Bytes dst(dst_size, 0xee);
    const uintptr_t from = reinterpret_cast<uintptr_t>(src.data()) + src_shift;
    const uintptr_t to = reinterpret_cast<uintptr_t>(dst.data()) + dst_shift;
    if (tiles) {
      run_tiles(runs, from, to);
    } else {
      copy_runs_cpu(runs, from, to, parallel_for);
    }
    ASSERT_EQ(Bytes(dst.begin() + dst_shift, dst.end()), result) << (tiles ? "tiles" : "CPU kernel");
    ASSERT_EQ(Bytes(dst.begin(), dst.begin() + dst_shift), Bytes(dst_shift, 0xee));
  }
}

TEST(RunTables, FastDivisor) {
  std::mt19937 random(3);
  for (int round = 0; round < 200000; ++round) {
    const uint32_t divisor = (random() >> (random() % 31)) | 1u;
    const uint32_t by = std::max(divisor & 0x7fffffffu, 1u) + (random() & 1);
    const uint32_t number = (random() >> (random() % 31)) & 0x7fffffffu;
    ASSERT_EQ(FastDivisor(by).divide(number), number / by) << number << " / " << by;
  }
  ASSERT_EQ(FastDivisor(0x40000000u).divide(0x7fffffffu), 1u);
}

TEST(RunTables, SpansOfEverySizeAndAlignment) {
  for (const int64_t size : {1, 15, 16, 17, 1000, 16383, 16384, 16385, 40000, 600000}) {
    for (const int64_t src_shift : {0, 1, 2, 4, 8}) {
      for (const int64_t dst_shift : {0, 1, 6}) {
        RunList runs;
        runs.append_bytes(0, 0, size);
        check(runs, src_shift, dst_shift);
      }
    }
  }
}

TEST(RunTables, MoreSpansThanOneTableTakes) {
  RunList runs;
  int64_t src = 0, dst = 0;
  for (int64_t index = 0; index < 3000; ++index) {
    runs.start_pair();
    runs.append_bytes(src, dst, 8 + index % 37);
    src += 64 + index % 5;
    dst += 8 + index % 37;
  }
  check(runs, 0, 0);
}

TEST(RunTables, RandomNests) {
  std::mt19937 random(11);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 600; ++round) {
    const int64_t num_dims = draw(1, 7);
    const int64_t item_bytes = int64_t{1} << draw(0, 4);
    Sizes sizes(num_dims), src_strides(num_dims), dst_strides(num_dims);
    int64_t src_stride = 1, dst_stride = 1;
    for (int64_t dim = num_dims; dim-- > 0;) {
      sizes[dim] = draw(1, num_dims > 4 ? 4 : 12);
      src_strides[dim] = src_stride;
      dst_strides[dim] = dst_stride;
      src_stride *= sizes[dim] + draw(0, 2);
      dst_stride *= sizes[dim] + (draw(0, 2) == 0);
    }
    if (draw(0, 1)) {
      const int64_t left = draw(0, num_dims - 1), right = draw(0, num_dims - 1);
      std::swap(src_strides[left], src_strides[right]);
      src_strides[left] *= 16;  // still apart
    }
    RunList runs;
    runs.append_box(sizes, {0, src_strides}, {0, dst_strides}, item_bytes);
    if (draw(0, 3) == 0) runs.append_box(sizes, {4, src_strides}, {runs.dst_extent().end, dst_strides}, item_bytes);
    check(runs, draw(0, 1) * draw(0, 16), draw(0, 1) * draw(0, 16));
  }
}

TEST(RunTables, LargeNestsUseSeveralTilesAndRanges) {
  for (const int64_t row_bytes : {4, 12, 96, 256, 5000, 40000, 100000, 300}) {
    RunList runs;
    const int64_t num_bytes = row_bytes == 300 ? 9000000 : 2000000;  // 9 MB are streamed
    const Sizes sizes{num_bytes / row_bytes, row_bytes};
    const Sizes src_strides{row_bytes + 24, 1}, dst_strides{row_bytes, 1};
    runs.append_box(sizes, {8, src_strides}, {0, dst_strides}, 1);
    check(runs, 0, 0);
    RunList back;
    back.append_box(sizes, {0, dst_strides}, {8, src_strides}, 1);
    check(back, 0, 0);
  }
}

TEST(RunTables, LongNestsAreCutIntoEntries) {
  RunList runs;  // never copied: only how it is cut matters
  const Sizes sizes{3, int64_t{1} << 29, 1}, src_strides{int64_t{1} << 40, 4, 1}, dst_strides{int64_t{1} << 30, 2, 1};
  runs.append_box(sizes, {0, src_strides}, {0, dst_strides}, 1);
  const CopyEntries entries = make_copy_entries(runs, 0, 0);
  int64_t num_words = 0;
  for (const NestEntry& entry : entries.nests[0]) {
    EXPECT_LE(entry.num_words, kMaxNestWords);
    num_words += entry.num_words;
  }
  EXPECT_EQ(num_words, int64_t{3} << 29);
  EXPECT_TRUE(entries.spans.empty());
}

// Elements of a box whose position in the global tensor is their place in `dst`, on both kernels, against one by one.
TEST(RunTables, HashesAgree) {
  Bytes memory(1 << 20);
  std::mt19937 random(5);
  for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random());
  const int64_t base = reinterpret_cast<int64_t>(memory.data());
  for (const int64_t word_bytes : {1, 2, 4, 8}) {
    for (const int64_t columns : {1, 3, 100, 1000}) {
      for (const int64_t pitch : {int64_t{0}, int64_t{2}}) {
        const Sizes sizes{97, columns}, src_strides{columns + pitch, 1}, dst_strides{1000, 1};
        RunList runs;
        runs.append_box(sizes, {base, src_strides}, {8 * word_bytes, dst_strides}, word_bytes);
        uint64_t expected = 0;
        for (const core::Run& run : runs.enumerate()) {
          for (int64_t at = 0; at < run.num_bytes; at += word_bytes) {
            uint64_t word = 0;
            std::memcpy(&word, reinterpret_cast<const char*>(run.src_bytes + at), word_bytes);
            expected += core::hash_word(word, (run.dst_bytes + at) / word_bytes);
          }
        }
        const std::vector<HashedRuns> lists(3, HashedRuns{runs, word_bytes});
        std::vector<uint64_t> by_cpu(lists.size());
        hash_runs_cpu(lists, by_cpu.data(), parallel_for);
        EXPECT_EQ(by_cpu, std::vector<uint64_t>(lists.size(), expected));
        std::vector<uint64_t> sums(lists.size());
        const auto add_tiles = [&](const auto& table, auto word) {
          for (uint32_t tile = 0; tile < table.first_tile[table.count]; ++tile) {
            uint64_t& sum = sums[table.entries[table.entry_of(tile)].list];
            for (uint32_t thread = 0; thread < kTileThreads; ++thread) {
              sum += hash_nest_tile<decltype(word)>(table, tile, thread);
            }
          }
        };
        const auto entries = make_hash_entries(lists);
        for_each_table<kNestCapacity>(entries[0], [&](const auto& table) { add_tiles(table, Word1{}); });
        for_each_table<kNestCapacity>(entries[1], [&](const auto& table) { add_tiles(table, Word2{}); });
        for_each_table<kNestCapacity>(entries[2], [&](const auto& table) { add_tiles(table, Word4{}); });
        for_each_table<kNestCapacity>(entries[3], [&](const auto& table) { add_tiles(table, Word8{}); });
        EXPECT_EQ(sums, by_cpu);
      }
    }
  }
}

// A block of threads of the CPU, which meet at barriers where those of a GPU go in step.
class HostBlock {
 public:
  class Thread {
   public:
    Thread(HostBlock& block, uint32_t number) : block_(block), number_(number) {}
    uint64_t shuffle_down(uint64_t value, uint32_t distance) {
      std::barrier<>& warp = block_.warps_[number_ / kWarpThreads];
      block_.shuffled_[number_] = value;
      warp.arrive_and_wait();
      // What a GPU gives above the last lane is not to be relied on.
      const uint64_t got = number_ % kWarpThreads + distance < kWarpThreads ? block_.shuffled_[number_ + distance] : 77;
      warp.arrive_and_wait();
      return got;
    }
    uint64_t* warp_sums() { return block_.warp_sums_.data(); }
    void synchronize() { block_.all_.arrive_and_wait(); }

   private:
    HostBlock& block_;
    uint32_t number_;
  };

  // The numbers that run(thread, number of the thread) returns for the threads of the block.
  template <typename Run>
  std::vector<uint64_t> run(const Run& run) {
    std::vector<uint64_t> results(kTileThreads);
    std::vector<std::thread> threads;
    for (uint32_t number = 0; number < kTileThreads; ++number) {
      threads.emplace_back([&, number] {
        Thread thread(*this, number);
        results[number] = run(thread, number);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }

 private:
  std::array<std::barrier<>, kTileWarps> warps_ = {std::barrier<>(kWarpThreads), std::barrier<>(kWarpThreads),
                                                   std::barrier<>(kWarpThreads), std::barrier<>(kWarpThreads)};
  std::barrier<> all_{kTileThreads};
  std::array<uint64_t, kTileThreads> shuffled_{};
  std::array<uint64_t, kTileWarps> warp_sums_{};
};

TEST(RunTables, BlocksAddUpWhatTheirThreadsHave) {
  std::mt19937_64 random(9);
  HostBlock block;
  for (uint32_t round = 0; round < 40; ++round) {
    std::vector<uint64_t> sums(kTileThreads);
    for (uint64_t& sum : sums) sum = round < 20 ? random() : 0;
    // Alone, the number of each lane and of each warp arrives.
    if (round >= 20) sums[(round - 20) * 33 % kTileThreads] = random();
    uint64_t expected = 0;
    for (const uint64_t sum : sums) expected += sum;
    const auto results =
        block.run([&](auto& thread, uint32_t number) { return sum_over_block(thread, number, sums[number]); });
    ASSERT_EQ(results[0], expected) << "round " << round;
  }
}

// The whole kernel, but for its one atomic addition.
TEST(RunTables, BlocksHashTheirTiles) {
  std::vector<uint32_t> memory(40000);
  std::mt19937 random(13);
  for (uint32_t& word : memory) word = random();
  const int64_t base = reinterpret_cast<int64_t>(memory.data());
  const Sizes sizes{5, 1000}, src_strides{1003, 1}, dst_strides{1000, 1};
  RunList runs;
  runs.append_box(sizes, {base, src_strides}, {4000, dst_strides}, 4);
  runs.append_box(sizes, {base + 40000, src_strides}, {40000, dst_strides}, 4);
  HostBlock block;
  uint64_t sum = 0;
  const HashedRuns list{runs, 4};
  for_each_table<kNestCapacity>(make_hash_entries({&list, 1})[2], [&](const auto& table) {
    for (uint32_t tile = 0; tile < table.first_tile[table.count]; ++tile) {
      sum += block.run([&](auto& thread, uint32_t number) {
        return sum_over_block(thread, number, hash_nest_tile<Word4>(table, tile, number));
      })[0];
    }
  });
  uint64_t expected = 0;
  hash_runs_cpu({&list, 1}, &expected, parallel_for);
  EXPECT_EQ(sum, expected);
}

TEST(RunTables, FailedLaunchesNameAnOldDriver) {
  EXPECT_EQ(launch_error("copy_runs", "invalid argument", 30000, 12010), "copy_runs: CUDA says: invalid argument");
  EXPECT_EQ(launch_error("copy_runs", "invalid argument", 4096, 12000), "copy_runs: CUDA says: invalid argument");
  EXPECT_EQ(launch_error("copy_runs", "invalid argument", 30000, 0), "copy_runs: CUDA says: invalid argument");
  EXPECT_EQ(
      launch_error("hash_runs", "invalid argument", 30000, 12000),
      "hash_runs: CUDA says: invalid argument; the kernel takes 30000 bytes of arguments, and more than 4096 need "
      "the NVIDIA driver R530 (CUDA 12.1) or newer, this one is for CUDA 12.0: update it");
}

// Small tables run on every driver; what more than 16 entries need, see launch_error.
static_assert(sizeof(SpanTable<kSmallCapacity>) <= 4096 && sizeof(NestTable<kSmallCapacity>) <= 4096);
static_assert(sizeof(SpanTable<kSpanCapacity>) > 4096 && sizeof(NestTable<kNestCapacity>) > 4096);

}  // namespace
}  // namespace torchtitan_ext::ops
