#include "storage/file_runs.h"

#include <algorithm>
#include <numeric>

namespace torchtitan_ext::storage {

void FileRuns::cast_last(const CastMemory& memory) {
  cast_memory_.resize(runs_.nests().size());
  cast_memory_.back() = &memory;
}

std::vector<core::Interval> FileRuns::windows(int64_t window_bytes, int64_t file_bytes) {
  const std::vector<core::RunNest>& nests = runs_.nests();
  ends_.clear();
  max_ends_.clear();
  order_.resize(nests.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::ranges::sort(order_, {}, [&](size_t index) { return nests[index].dst_bytes; });
  std::vector<core::Interval> windows;
  int64_t next = 0;  // the first window that is not among them
  int64_t max_end = 0;
  for (const core::RunNest& nest : nests) ends_.push_back(file_end_of(runs_, nest));
  for (const size_t index : order_) {
    max_end = std::max(max_end, ends_[index]);
    max_ends_.push_back(max_end);
    const int64_t last = (ends_[index] - 1) / window_bytes;
    for (int64_t window = std::max(next, nests[index].dst_bytes / window_bytes); window <= last; ++window) {
      windows.push_back({window * window_bytes, std::min((window + 1) * window_bytes, file_bytes)});
      next = window + 1;
    }
  }
  return windows;
}

void FileRuns::find(int64_t begin, int64_t end, std::vector<Stretch>& found) const {
  const std::vector<core::RunNest>& nests = runs_.nests();
  // The first nest, by where it begins, that may reach into the window: none before ends behind its beginning.
  const auto first = std::ranges::upper_bound(max_ends_, begin) - max_ends_.begin();
  for (size_t at = static_cast<size_t>(first); at < order_.size(); ++at) {
    const size_t index = order_[at];
    if (nests[index].dst_bytes >= end) break;
    if (ends_[index] <= begin) continue;
    const CastMemory* const cast_memory = index < cast_memory_.size() ? cast_memory_[index] : nullptr;
    visit_window(runs_, nests[index], begin, end, [&](const Stretch& stretch) {
      found.push_back(stretch);
      found.back().cast_memory = cast_memory;
    });
  }
}

void FileRuns::clear() {
  runs_ = {};
  cast_memory_.clear();
  ends_.clear();
  order_.clear();
  max_ends_.clear();
}

}  // namespace torchtitan_ext::storage
