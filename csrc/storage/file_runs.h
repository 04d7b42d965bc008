// The runs between memory and one file, found window by window, also where those of several tensors lie between each
// other.
#pragma once

#include <cstdint>
#include <vector>

#include "core/runs.h"
#include "storage/run_window.h"

namespace torchtitan_ext::storage {

class FileRuns {
 public:
  core::RunList& list() { return runs_; }  // destination: bytes of the file; source: addresses
  const core::RunList& list() const { return runs_; }
  // The nest that was added last leads to such memory, which outlives the runs.
  void cast_last(const CastMemory& memory);

  // The windows of `window_bytes`, cut at the end of the file, in which a nest begins, ends, or that one passes through.
  // Every nest is in file order. What is found below is what was added before this call.
  std::vector<core::Interval> windows(int64_t window_bytes, int64_t file_bytes);
  // Appends what lies in bytes [begin, end) of the file, in no particular order.
  void find(int64_t begin, int64_t end, std::vector<Stretch>& found) const;
  void clear();

 private:
  core::RunList runs_;
  std::vector<const CastMemory*> cast_memory_;  // of each nest up to the last one that has any
  std::vector<int64_t> ends_;                   // of each nest, in the file
  std::vector<size_t> order_;                   // of the nests, by where they begin
  std::vector<int64_t> max_ends_;               // over order_[0 .. i]
};

}  // namespace torchtitan_ext::storage
