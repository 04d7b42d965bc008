// copy_runs_cpu alone, on one thread and with a ready list of runs, against memcpy of the same bytes. Prints one JSON
// object.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
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

// Begins at a cache line, as torch's own memory does.
struct alignas(64) Line {
  char bytes[64];
};

class Bytes {
 public:
  Bytes(int64_t num_bytes, char value) : lines_(num_bytes / sizeof(Line) + 1), num_bytes_(num_bytes) {
    std::memset(data(), value, num_bytes);
  }
  char* data() { return lines_[0].bytes; }
  const char* data() const { return lines_[0].bytes; }
  size_t size() const { return static_cast<size_t>(num_bytes_); }

 private:
  std::vector<Line> lines_;
  int64_t num_bytes_;
};

void report(const char* separator, const std::string& name, const RunList& runs, Bytes& flat, const Bytes& reference,
            int repeats) {
  const auto [copy, memcpy_seconds] =
      best_seconds([&] { torchtitan_ext::ops::copy_runs_cpu(runs, 0, 0, on_one_thread); },
                   [&] { std::memcpy(flat.data(), reference.data(), flat.size()); }, repeats);
  std::printf("%s\"%s\": {\"copy_runs_ms\": %.4f, \"memcpy_ms\": %.4f, \"ratio\": %.3f}", separator, name.c_str(),
              copy * 1e3, memcpy_seconds * 1e3, memcpy_seconds / copy);
}

int64_t address(const Bytes& bytes) { return reinterpret_cast<int64_t>(bytes.data()); }

void flatten(const char* separator, int64_t count, int64_t num_bytes, int repeats) {
  const std::vector<Bytes> tensors(count, Bytes(num_bytes, 1));
  Bytes flat(count * num_bytes, 2);
  const Bytes reference(count * num_bytes, 3);
  RunList runs;
  for (int64_t index = 0; index < count; ++index) {
    runs.start_pair();
    runs.append_bytes(address(tensors[index]), address(flat) + index * num_bytes, num_bytes);
  }
  report(separator, "flatten " + std::to_string(count) + " x " + std::to_string(num_bytes) + " B", runs, flat,
         reference, repeats);
}

// A column shard of a tensor four times as wide.
void pack_columns(const char* separator, int64_t run_bytes, int64_t num_bytes, int repeats) {
  const Bytes full(4 * num_bytes, 1), reference(num_bytes, 3);
  Bytes out(num_bytes, 2);
  const std::vector<int64_t> sizes{num_bytes / run_bytes, run_bytes}, wide{4 * run_bytes, 1}, narrow{run_bytes, 1};
  RunList runs;
  runs.append_box(sizes, {address(full) + run_bytes, wide}, {address(out), narrow}, 1);
  report(separator, "pack columns, runs of " + std::to_string(run_bytes) + " B", runs, out, reference, repeats);
}

}  // namespace

int main() {
  std::printf("{");
  flatten("", 5000, 1024, 2000);
  flatten(", ", 5000, 26844, 40);
  flatten(", ", 300, 447392, 40);
  for (const int64_t run_bytes : {256, 1024, 4096, 16384}) pack_columns(", ", run_bytes, int64_t{128} << 20, 40);
  std::printf("}\n");
}
