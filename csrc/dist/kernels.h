// The kernels of csrc/dist, which library.cpp registers. Contracts: torchtitan_ext/ops.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchtitan_ext::dist {

void broadcast_coalesced_(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void check_broadcast(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void exchange_runs_(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace torchtitan_ext::dist
