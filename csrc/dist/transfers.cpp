#include "dist/transfers.h"

#include <exception>
#include <string>

#include "ops/copy_runs.h"

namespace torchtitan_ext::dist {
namespace {

void on_this_thread(int64_t begin, int64_t end, int64_t, ops::RangeBody body, void* context) {
  body(begin, end, context);
}

// A block that stays open would hold back what this thread sends next, through any group, without a word.
void leave_coalescing(c10d::ProcessGroup& group, c10::DeviceType device) {
  try {
    group.endCoalescing(device);
  } catch (const std::exception&) {  // the first failure is the one to tell
  }
}

}  // namespace

int64_t address_of(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

core::Memory memory_of(const at::Tensor& tensor) {
  return {static_cast<uintptr_t>(address_of(tensor)), tensor.sizes(), tensor.strides(), tensor.element_size()};
}

at::Tensor bytes_of(const at::Tensor& tensor, int64_t first, int64_t count) {
  at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  return bytes.set_(tensor.storage(), tensor.storage_offset() * tensor.element_size() + first, {count}, {1});
}

void copy_on(const at::Device& device, const core::RunList& runs) {
  if (runs.nests().empty()) return;
  if (device.is_cuda()) {
    ops::copy_runs_cuda(runs, 0, 0, device.index());
  } else {
    ops::copy_runs_cpu(runs, 0, 0, on_this_thread);
  }
}

bool supports_coalescing(c10d::ProcessGroup& group, c10::DeviceType device) {
  try {
    return group.getBackend(device)->supportsCoalescing();
  } catch (const c10::Error&) {
    return false;
  }
}

Works start_coalesced(c10d::ProcessGroup& group, c10::DeviceType device, bool coalesces, const StartWorks& start) {
  Works works;
  if (coalesces) group.startCoalescing(device);
  try {
    start(works);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    if (coalesces) leave_coalescing(group, device);
    std::rethrow_exception(failure);
  }
  // The works inside a coalesced block are not waited for: the one of the block stands for them.
  if (coalesces) works = {group.endCoalescing(device)};
  return works;
}

void wait_for(const Works& works, std::chrono::milliseconds timeout) {
  for (const auto& work : works) {
    if (work) work->wait(timeout);
  }
}

void raise_transfer_failure(const char* where) {
  std::string reason = where;
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    reason += error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason += error.what();
  }
  C10_THROW_ERROR(DistBackendError, reason);
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torchtitan_ext::dist
