// Buckets in CPU memory outlive a call: the first touch of new pages costs more than the copies. CUDA memory is kept by
// PyTorch's allocator.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>

namespace torchtitan_ext::dist {

// In use by a collective at a time: one is packed or unpacked, one moves, one waits so that the wire is never idle. It is
// also the bound on extra memory.
constexpr size_t kNumBuckets = 3;
// More than any backend sends at once; it leaves room for sums of sizes.
constexpr int64_t kMaxBucketBytes = int64_t{1} << 40;

// At most kNumBuckets buckets of each kind, pageable and pinned, are kept, none larger than ops.DEFAULT_BUCKET_BYTES: who asks for more once need not miss it
// for ever. They are never taken down: at exit other statics may be gone.
class KeptBuckets {
 public:
  static KeptBuckets& instance();

  // 1-d uint8 of at least so many bytes.
  at::Tensor take(int64_t num_bytes, const at::TensorOptions& options);
  // Calls `transfer`, which may take buckets, and gets them back. Where it throws nobody gets them: what failed may still
  // read and write them. The allocator of a device would give its memory to others at once, so these stay for ever.
  void lend(std::span<at::Tensor> buckets, const std::function<void()>& transfer);

 private:
  void give_back(at::Tensor bucket);

  std::mutex mutex_;
  at::Tensor free_[2][kNumBuckets];  // of pageable memory, and of pinned memory
};

}  // namespace torchtitan_ext::dist
