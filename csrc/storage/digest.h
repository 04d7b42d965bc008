// XXH3, 64 bits, seed 0: the digest of blocks, footers, indexes and `.metadata`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace torchtitan_ext::storage {

uint64_t digest_of(std::string_view bytes);

// The digest of bytes that lie in pieces: equal to `digest_of` of the pieces joined.
class Digest {
 public:
  Digest();
  void add(const void* data, size_t num_bytes);
  uint64_t value() const;

 private:
  alignas(64) std::byte state_[576];
};

// One way to compute it. The widest one that the processor has is chosen when the library is loaded: XXH3 with AVX2 is
// 1.7 times as fast as with SSE2, which is all that every x86-64 has.
struct DigestKernel {
  uint64_t (*of)(const void* data, size_t num_bytes);
  void (*reset)(void* state);
  void (*add)(void* state, const void* data, size_t num_bytes);
  uint64_t (*value)(const void* state);
};
extern const DigestKernel kBaselineDigest;
extern const DigestKernel kAvx2Digest;

}  // namespace torchtitan_ext::storage
