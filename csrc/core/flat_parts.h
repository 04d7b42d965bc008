// The parts of a flat buffer, as a manifest that came from elsewhere says: which of them can be.
#pragma once

#include <cstdint>
#include <string>

#include "core/chunk.h"

namespace torchtitan_ext::core {

// Elements of `item_bytes` bytes each, in row-major order.
struct FlatPart {
  int64_t offset = 0;  // of the first byte in the buffer
  int64_t num_bytes = 0;
  int64_t item_bytes = 1;
  Sizes sizes;
};

// Why a buffer of so many bytes has no such part; empty if it has.
std::string why_no_part(const FlatPart& part, int64_t buffer_bytes);

}  // namespace torchtitan_ext::core
