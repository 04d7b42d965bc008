// copy_runs_cpu alone, on one thread and with a ready list of runs, against memcpy of the same bytes. Prints one JSON
// object.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "ops/copy_runs.h"

namespace {

using torchtitan_ext::core::RunList;

void on_one_thread(int64_t begin, int64_t end, int64_t, torchtitan_ext::ops::RangeBody body, void* context) {
  body(begin, end, context);
}

// Best of many, the two in turn: whatever else runs on the machine hits both.
std::pair<double, double> best_seconds(const std::function<void()>& left, const std::function<void()>& right,
                                       int repeats) {
  using Clock = std::chrono::steady_clock;
  std::pair<double, double> best{1e9, 1e9};
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = Clock::now();
    left();
    const auto middle = Clock::now();
    right();
    const auto end = Clock::now();
    best.first = std::min(best.first, std::chrono::duration<double>(middle - start).count());
    best.second = std::min(best.second, std::chrono::duration<double>(end - middle).count());
  }
  return best;
}

}  // namespace

int main() {
  std::printf("{");
  const std::pair<int64_t, int64_t> cases[] = {{5000, 1024}, {5000, 26844}, {300, 447392}};
  for (const auto& [count, bytes] : cases) {
    std::vector<std::vector<char>> tensors(count, std::vector<char>(bytes, 1));
    std::vector<char> flat(count * bytes, 2), reference(count * bytes, 3);
    RunList runs;
    for (int64_t index = 0; index < count; ++index) {
      runs.start_pair();
      runs.append_bytes(reinterpret_cast<int64_t>(tensors[index].data()),
                        reinterpret_cast<int64_t>(flat.data()) + index * bytes, bytes);
    }
    const auto [copy, memcpy_seconds] =
        best_seconds([&] { torchtitan_ext::ops::copy_runs_cpu(runs, 0, 0, on_one_thread); },
                     [&] { std::memcpy(flat.data(), reference.data(), flat.size()); }, bytes > 2000 ? 40 : 2000);
    std::printf("%s\"%lld x %lld B\": {\"copy_runs_ms\": %.4f, \"memcpy_ms\": %.4f, \"ratio\": %.3f}",
                count == 5000 && bytes == 1024 ? "" : ", ", static_cast<long long>(count),
                static_cast<long long>(bytes), copy * 1e3, memcpy_seconds * 1e3, memcpy_seconds / copy);
  }
  std::printf("}\n");
}
