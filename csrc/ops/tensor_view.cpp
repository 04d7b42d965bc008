#include "ops/tensor_view.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "core/check.h"
#include "ops/chunk_table.h"

namespace torchtitan_ext::ops {
namespace {

using core::checked_add;
using core::checked_mul;

// The message is made of the subject only when the check fails.
#define TTE_CHECK_SUBJECT(condition, subject, ...) \
  TTE_CHECK(condition, (subject).op, (subject).text(), " ", __VA_ARGS__)

bool is_quantized(int32_t dtype) {
  using torch::headeronly::ScalarType;
  const ScalarType type = static_cast<ScalarType>(dtype);
  return type == ScalarType::QInt8 || type == ScalarType::QUInt8 || type == ScalarType::QInt32 ||
         type == ScalarType::QUInt4x2 || type == ScalarType::QUInt2x4;
}

std::vector<core::Memory> memories_of(std::span<const TensorView> views) {
  std::vector<core::Memory> memories;
  memories.reserve(views.size());
  for (const TensorView& view : views) memories.push_back(view.memory());
  return memories;
}

}  // namespace

std::string Subject::text() const { return position < 0 ? std::string(name) : core::concat(name, "[", position, "]"); }

TensorView view_of(AtenTensorHandle tensor, Access access, const Subject& subject) {
  TTE_CHECK_SUBJECT(read(aoti_torch_get_layout, tensor) == aoti_torch_layout_strided(), subject,
                    "is sparse; convert it with .to_dense() first");
  TensorView view;
  view.dtype = read(aoti_torch_get_dtype, tensor);
  view.device_type = read(aoti_torch_get_device_type, tensor);
  view.device_index = read(aoti_torch_get_device_index, tensor);
  TTE_CHECK_SUBJECT(!is_quantized(view.dtype), subject,
                    "is quantized: its bytes mean nothing without scale and zero point");
  TTE_CHECK_SUBJECT(
      view.device_type == aoti_torch_device_type_cpu() || view.device_type == aoti_torch_device_type_cuda(), subject,
      "is neither on a CPU nor on a CUDA device");

  int64_t* sizes = nullptr;  // torch's own page about it goes to stderr
  TTE_CHECK_SUBJECT(aoti_torch_get_sizes(tensor, &sizes) == AOTI_TORCH_SUCCESS, subject,
                    "is nested; pass the tensor of its values");
  const size_t num_dims = static_cast<size_t>(read(aoti_torch_get_dim, tensor));
  view.sizes = {sizes, num_dims};
  view.strides = {read(aoti_torch_get_strides, tensor), num_dims};
  view.item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(view.dtype));
  view.num_elements = core::num_elements(view.sizes);
  view.contiguous = read(aoti_torch_is_contiguous, tensor);
  if (view.num_elements == 0) return view;

  const int64_t span_bytes =
      view.contiguous ? checked_mul(view.num_elements, view.item_bytes) : core::extent_of(view.memory()).length();
  const int64_t begin_bytes = checked_mul(read(aoti_torch_get_storage_offset, tensor), view.item_bytes);
  const int64_t needed_bytes = checked_add(begin_bytes, span_bytes);
  const int64_t storage_bytes = read(aoti_torch_get_storage_size, tensor);
  TTE_CHECK_SUBJECT(needed_bytes <= storage_bytes, subject, "spans ", needed_bytes, " bytes of storage, which has ",
                    storage_bytes, "; was it freed or resized?");
  // The const form leaves a copy-on-write storage shared.
  const void* data =
      access == Access::kWrite ? read(torch_get_mutable_data_ptr, tensor) : read(torch_get_const_data_ptr, tensor);
  TTE_CHECK_SUBJECT(data != nullptr, subject, "has no memory; was its storage freed?");
  view.address = reinterpret_cast<uintptr_t>(data);
  if (access == Access::kWrite && !view.contiguous) {
    TTE_CHECK_SUBJECT(!core::may_overlap_itself(view.sizes, view.strides), subject,
                      "cannot be written: several of its elements share memory; clone() it first");
  }
  return view;
}

std::vector<TensorView> views_of(const TensorList& tensors, Access access, const char* op, const char* name) {
  TTE_CHECK(!tensors.empty(), op, "got no tensors, expected at least one");
  std::vector<TensorView> views;
  views.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    const Subject subject{op, name, static_cast<int64_t>(index)};
    views.push_back(view_of(tensors[index], access, subject));
    check_same_device(views[0], views[index], {op, name, 0}, subject);
  }
  return views;
}

Tensor empty_on(const TensorView& like, std::span<const int64_t> sizes, int32_t dtype) {
  const std::vector<int64_t> strides = core::row_major_strides(sizes);
  const int64_t item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  const int64_t num_bytes = checked_mul(core::num_elements(sizes), item_bytes);
  AtenTensorHandle handle = nullptr;
  // What torch says goes to stderr, and never reaches the caller.
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                               like.device_type, like.device_index, &handle) != AOTI_TORCH_SUCCESS) {
    const bool on_cpu = like.device_type == aoti_torch_device_type_cpu();
    const std::string device = on_cpu ? "the CPU" : core::concat("CUDA device ", like.device_index);
    throw std::runtime_error(core::concat("torchtitan_ext: a tensor of ", num_bytes, " bytes could not be made on ",
                                          device, "; torch's own message is on stderr"));
  }
  return Tensor(handle);
}

void check_same_dtype(const TensorView& left, const TensorView& right, const Subject& left_is,
                      const Subject& right_is) {
  TTE_CHECK(left.dtype == right.dtype, left_is.op, left_is.text(), " and ", right_is.text(), " have different dtypes");
}

void check_same_device(const TensorView& left, const TensorView& right, const Subject& left_is,
                       const Subject& right_is) {
  TTE_CHECK(left.device_type == right.device_type && left.device_index == right.device_index, left_is.op,
            left_is.text(), " and ", right_is.text(), " are on different devices");
}

void check_separate(std::span<const TensorView> written, std::string_view op, std::string_view name) {
  if (written.size() < 2) return;
  const auto pair = core::find_shared_memory(memories_of(written));
  TTE_CHECK(!pair, op, name, "[", pair->first, "] and ", name, "[", pair->second,
            "] share memory and would both be written");
}

void check_separate(std::span<const TensorView> written, std::span<const TensorView> read, std::string_view op) {
  const std::vector<core::Memory> written_memories = memories_of(written), read_memories = memories_of(read);
  TTE_CHECK(!core::find_shared_memory(written_memories, read_memories), op,
            "source and destination share memory; clone() one of them first");
}

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer does not see how OpenMP, which is not instrumented, hands work over and waits for it. Both are told
// to it here, as operations on an atomic.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context) {
  static std::atomic<int64_t> handovers;
  struct Told {
    RangeBody body;
    void* context;
  } told{body, context};
  const RangeBody telling = [](int64_t first, int64_t last, void* context) {
    handovers.fetch_add(1);
    const Told& told = *static_cast<const Told*>(context);
    told.body(first, last, told.context);
    handovers.fetch_add(1);
  };
  handovers.fetch_add(1);
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, telling, &told));
  handovers.fetch_add(1);
}
#else
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}
#endif

void copy_runs_on(const TensorView& on, const core::RunList& runs) {
  if (runs.nests().empty()) return;
  if (on.device_type == aoti_torch_device_type_cuda()) {
    copy_runs_cuda(runs, 0, 0, on.device_index);
  } else {
    copy_runs_cpu(runs, 0, 0, parallel_for);
  }
}

}  // namespace torchtitan_ext::ops
