#include "storage/digest.h"

#include "storage/digest_kernel.h"

namespace torchtitan_ext::storage {

extern const DigestKernel kBaselineDigest = kKernel;

namespace {

const DigestKernel& kernel() {
#ifdef TTE_HAVE_AVX2_DIGEST
  static const DigestKernel& chosen = __builtin_cpu_supports("avx2") ? kAvx2Digest : kBaselineDigest;
  return chosen;
#else
  return kBaselineDigest;
#endif
}

}  // namespace

uint64_t digest_of(std::string_view bytes) { return kernel().of(bytes.data(), bytes.size()); }

Digest::Digest() { kernel().reset(state_); }

void Digest::add(const void* data, size_t num_bytes) { kernel().add(state_, data, num_bytes); }

uint64_t Digest::value() const { return kernel().value(state_); }

}  // namespace torchtitan_ext::storage
