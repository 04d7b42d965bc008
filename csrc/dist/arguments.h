// The arguments of a call, taken off the dispatcher's stack so that they can be given back under Python's lock.
#pragma once

#include <ATen/core/stack.h>

#include "ops/python_lock.h"

namespace torchtitan_ext::dist {

class Arguments {
 public:
  Arguments(torch::jit::Stack& stack, size_t count) : values_(torch::jit::pop(stack, count)) {}
  ~Arguments() { ops::give_back(std::move(values_)); }

  const c10::IValue& operator[](size_t index) const { return values_[index]; }

 private:
  torch::jit::Stack values_;
};

}  // namespace torchtitan_ext::dist
