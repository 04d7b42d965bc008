// The functions of a DigestKernel, compiled once per instruction set: everything of xxhash.h is static here.
#pragma once

#define XXH_INLINE_ALL
#include "storage/digest.h"
#include "third_party/xxhash/xxhash.h"

namespace torchtitan_ext::storage {
namespace {

static_assert(sizeof(XXH3_state_t) <= 576 && alignof(XXH3_state_t) <= 64, "Digest has room for the state");

constexpr DigestKernel kKernel{
    [](const void* data, size_t num_bytes) -> uint64_t { return XXH3_64bits(data, num_bytes); },
    [](void* state) { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state)); },
    [](void* state, const void* data, size_t num_bytes) {
      XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, num_bytes);
    },
    [](const void* state) -> uint64_t { return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state)); }};

}  // namespace
}  // namespace torchtitan_ext::storage
