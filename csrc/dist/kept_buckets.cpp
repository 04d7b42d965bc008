#include "dist/kept_buckets.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torchtitan_ext::dist {
namespace {

constexpr int64_t kMaxKeptBytes = int64_t{32} << 20;

bool is_smaller(const at::Tensor& left, const at::Tensor& right) {
  return right.defined() && (!left.defined() || left.numel() < right.numel());
}

}  // namespace

KeptBuckets& KeptBuckets::instance() {
  static auto* const kept = new KeptBuckets;
  return *kept;
}

at::Tensor KeptBuckets::take(int64_t num_bytes, const at::TensorOptions& options) {
  if (options.device().is_cpu()) {
    const std::scoped_lock lock(mutex_);
    for (at::Tensor& free : free_[options.pinned_memory()]) {
      if (!free.defined() || free.numel() < num_bytes) continue;
      return std::exchange(free, at::Tensor());
    }
  }
  return at::empty({num_bytes}, options.dtype(at::kByte));
}

void KeptBuckets::lend(std::span<at::Tensor> buckets, const std::function<void()>& transfer) {
  try {
    transfer();
  } catch (...) {
    for (at::Tensor& bucket : buckets) {
      if (bucket.defined() && !bucket.is_cpu()) new at::Tensor(std::move(bucket));
    }
    throw;
  }
  for (at::Tensor& bucket : buckets) {
    if (bucket.defined()) give_back(std::move(bucket));
  }
}

void KeptBuckets::give_back(at::Tensor bucket) {
  if (!bucket.is_cpu() || bucket.numel() > kMaxKeptBytes) return;
  at::Tensor(&free)[kNumBuckets] = free_[bucket.is_pinned()];
  const std::scoped_lock lock(mutex_);
  at::Tensor& smallest = *std::min_element(std::begin(free), std::end(free), is_smaller);
  if (!smallest.defined() || smallest.numel() < bucket.numel()) smallest = std::move(bucket);
}

}  // namespace torchtitan_ext::dist
