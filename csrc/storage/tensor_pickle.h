// The pickle of one plain tensor in a torch.save archive: written, and read by a matcher that runs nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "storage/tensor_record.h"

namespace torchtitan_ext::storage {

// Of a contiguous tensor without gradient, with its bytes in storage "0" on the CPU.
std::string pickle_tensor(const ElementType& type, std::span<const int64_t> sizes);

// What a pickle says of its tensor, and the name of its storage; nothing where it is not of that one form, whatever it
// is. Reads no further than `bytes`.
struct PickledTensor {
  StoredTensor tensor;
  std::string storage_key;
};
std::optional<PickledTensor> match_tensor_pickle(std::string_view bytes);

}  // namespace torchtitan_ext::storage
