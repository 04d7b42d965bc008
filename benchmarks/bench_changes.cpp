// The bodies of the operators of changes, on one thread, against reading both sides once and against writing as many
// cache lines as elements have changed. Prints one JSON object; Built by
// `cmake --build build/dev --target bench_changes`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ops/change_lists.h"
#include "ops/change_marks.h"

namespace {

using namespace torchtitan_ext;
using core::BoxWalk;

constexpr int64_t kBytes = int64_t{256} << 20;  // of either side
constexpr int64_t kColumns = 4096;

void on_one_thread(int64_t begin, int64_t end, int64_t, ops::RangeBody body, void* context) {
  body(begin, end, context);
}

// Best of several; all take turns, so that whatever else the machine does hits all of them.
std::vector<double> best_seconds(const std::vector<std::function<void()>>& functions, int repeats) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> best(functions.size(), 1e9);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (size_t index = 0; index < functions.size(); ++index) {
      const auto start = Clock::now();
      functions[index]();
      best[index] = std::min(best[index], std::chrono::duration<double>(Clock::now() - start).count());
    }
  }
  return best;
}

volatile uint64_t sink;

void read(const std::vector<uint64_t>& left, const std::vector<uint64_t>& right) {
  uint64_t sums[8] = {};
  for (size_t at = 0; at < left.size(); at += 8) {
    for (size_t lane = 0; lane < 8; ++lane) sums[lane] += left[at + lane] ^ right[at + lane];
  }
  for (const uint64_t sum : sums) sink = sink + sum;
}

// One store to each of `count` cache lines, evenly spread over the memory.
void write_lines(std::vector<uint64_t>& memory, int64_t count) {
  const int64_t lines = static_cast<int64_t>(memory.size()) / 8;
  const uint64_t step = (static_cast<uint64_t>(lines) << 20) / static_cast<uint64_t>(count);
  uint64_t at = 0;
  for (int64_t index = 0; index < count; ++index, at += step) memory[(at >> 20) * 8] = at;
}

void measure(const char* separator, int64_t item_bytes, double share, int repeats) {
  const int64_t num_elements = kBytes / item_bytes;
  std::mt19937_64 random(1);
  std::vector<uint64_t> base(kBytes / 8), now;
  for (uint64_t& word : base) word = random();
  now = base;
  char* bytes = reinterpret_cast<char*>(now.data());
  std::geometric_distribution<int64_t> gap(share);
  for (int64_t at = share < 1 ? gap(random) : 0; at < num_elements; at += 1 + (share < 1 ? gap(random) : 0)) {
    bytes[at * item_bytes] ^= 1;
  }

  const std::vector<int64_t> sizes{num_elements / kColumns, kColumns}, strides{kColumns, 1};
  const std::vector<int64_t> byte_strides{kColumns * item_bytes, item_bytes};
  const auto side = [&](const std::vector<uint64_t>& memory) {
    return core::Memory{reinterpret_cast<uintptr_t>(memory.data()), sizes, strides, item_bytes};
  };
  const ops::MarkedPair pair{side(now), side(base), true, true, num_elements, 0};
  std::vector<uint64_t> mask(pair.num_words());
  int64_t count = 0;
  ops::mark_changes_cpu({&pair, 1}, mask.data(), &count, on_one_thread);

  std::vector<int64_t> positions(count);
  std::vector<char> values(count * item_bytes);
  uint64_t old_sum = 0, new_sum = 0, sum = 0;
  int64_t found = 0;
  const auto address = [](const std::vector<uint64_t>& memory) { return reinterpret_cast<int64_t>(memory.data()); };
  const BoxWalk<3> box(sizes, 0, strides, {address(now), address(base), 0}, {byte_strides, byte_strides, strides});
  const ops::MarkedElements marked{{box},         item_bytes, mask.data(), pair.num_words(), count, positions.data(),
                                   values.data(), &old_sum,   &new_sum};
  std::vector<uint64_t> target = base, lines = base;
  const BoxWalk<1> whole(sizes, 0, strides, {address(target)}, {byte_strides});
  // A quarter of the columns: what tensor parallelism over four ranks gives to one of them.
  const std::vector<int64_t> narrow_sizes{sizes[0], kColumns / 4};
  const BoxWalk<1> narrow(narrow_sizes, kColumns / 2, strides, {address(target) + kColumns / 2 * item_bytes},
                          {byte_strides});
  const ops::ListedElements onto{{whole}, item_bytes, num_elements, positions.data(), count, values.data()};
  const ops::ListedElements onto_narrow{{narrow}, item_bytes, num_elements, positions.data(), count, values.data()};

  const std::vector<double> seconds = best_seconds(
      {[&] { read(now, base); }, [&] { ops::mark_changes_cpu({&pair, 1}, mask.data(), &count, on_one_thread); },
       [&] { ops::list_changes_cpu({&marked, 1}, on_one_thread); },
       [&] {
         const ops::ComparedElements compared{pair, {box}, num_elements};
         ops::gather_found(ops::find_changes_cpu({&compared, 1}, on_one_thread)[0], marked);
       },
       [&] { write_lines(lines, count); },
       [&] {
         ops::find_unordered({&onto, 1}, on_one_thread);
         ops::write_listed_cpu({&onto, 1}, on_one_thread);
       },
       [&] { ops::sum_listed_cpu({&onto, 1}, &sum, &found, on_one_thread); },
       [&] { ops::write_listed_cpu({&onto_narrow, 1}, on_one_thread); }},
      repeats);
  const double read_seconds = seconds[0], write_seconds = seconds[4];
  std::printf(
      "%s\"%ld B, %g %%\": {\"read_ms\": %.2f, \"mark_to_read\": %.3f, \"mark_and_list_to_read\": %.3f, "
      "\"find_to_read\": %.3f, \"write_lines_ms\": %.2f, \"apply_to_write\": %.3f, \"sum_to_write\": %.3f, "
      "\"apply_quarter_to_write\": %.3f}",
      separator, static_cast<long>(item_bytes), share * 100, read_seconds * 1e3, seconds[1] / read_seconds,
      (seconds[1] + seconds[2]) / read_seconds, seconds[3] / read_seconds, write_seconds * 1e3,
      seconds[5] / write_seconds, seconds[6] / write_seconds, seconds[7] / write_seconds);
}

}  // namespace

int main() {
  std::printf("{");
  measure("", 2, 0.001, 5);
  for (const double share : {0.01, 0.03, 0.3}) measure(", ", 2, share, 5);
  for (const int64_t item_bytes : {1, 4, 8}) measure(", ", item_bytes, 0.01, 5);
  std::printf("}\n");
}
