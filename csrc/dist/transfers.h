// What transfers of tensors through a process group have in common.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "core/memory.h"

namespace torchtitan_ext::dist {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

int64_t address_of(const at::Tensor& tensor);
core::Memory memory_of(const at::Tensor& tensor);

// Bytes [first, first + count) of a tensor's memory as 1-d uint8. It keeps the storage alive, and tells c10d its
// device.
at::Tensor bytes_of(const at::Tensor& tensor, int64_t first, int64_t count);

// Copies on `device`. The runs are addresses. On the CPU in this thread alone: the copies of a bucket are short, and the
// other cores are busy moving what is in flight.
void copy_on(const at::Device& device, const core::RunList& runs);

// Whether a group can do several calls as one. One that Python made has no backends to be asked.
bool supports_coalescing(c10d::ProcessGroup& group, c10::DeviceType device);

// Adds what `start` starts to the works to be waited for: as one block where the group can.
using StartWorks = std::function<void(Works&)>;
Works start_coalesced(c10d::ProcessGroup& group, c10::DeviceType device, bool coalesces, const StartWorks& start);

// Waits for each, at most so long (kNoTimeout: as long as the group waits).
void wait_for(const Works& works, std::chrono::milliseconds timeout);

// What a transfer raises, as torch names it (gloo: a plain runtime_error): a bucket that gets no memory is no lost rank.
// To be called in a handler. The text of other errors follows `where`.
[[noreturn]] void raise_transfer_failure(const char* where = "");

// After a failed transfer: some are part-written. After a call that returns, csrc/autograd does this.
void bump_versions(at::TensorList tensors);

}  // namespace torchtitan_ext::dist
