// What is looked at before tensors are broadcast: can this rank take part, and do ranks mean the same tensors?
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchtitan_ext::dist {

// Why tensors cannot be received into: the positions of one of them or two, and what is wrong with these, in words that
// follow their names. Empty where all is well.
struct Fault {
  std::vector<int64_t> positions;
  std::string reason;
};

// The first one. The same on the source, which only sends: a call must fail on every rank. Tensors that share storage by
// copy-on-write get memory of their own.
Fault find_fault(at::TensorList tensors);

// Of what ranks must agree on, dtypes and shapes: two words.
std::vector<int64_t> digest_of(at::TensorList tensors);

}  // namespace torchtitan_ext::dist
