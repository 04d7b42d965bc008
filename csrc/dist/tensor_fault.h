// Why a tensor cannot be sent or received into.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace torchtitan_ext::dist {

enum class Access { kRead, kWrite };

// What is wrong with a tensor on its own, or beside `first`, the first of the call, in words that follow its name;
// nothing if all is well.
std::string fault_of(const at::Tensor& tensor, const at::Tensor& first, Access access);

}  // namespace torchtitan_ext::dist
