// Stands in for copy_runs_cuda.cu and hash_runs_cuda.cu in a build without nvcc.
#include <stdexcept>

#include "ops/copy_runs.h"
#include "ops/hash_runs.h"

namespace torchtitan_ext::ops {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "torchtitan_ext: a CUDA tensor was given, but this build has no CUDA kernels; install it again with nvcc on "
      "PATH");
}

}  // namespace

void copy_runs_cuda(const core::RunList&, uintptr_t, uintptr_t, int32_t) { refuse(); }

void hash_runs_cuda(std::span<const HashedRuns>, uint64_t*, int32_t) { refuse(); }

}  // namespace torchtitan_ext::ops
