// broadcast_coalesced_ over c10d. No stable form of process groups exists, so this file uses the full C++ API of torch
// and is built per minor version of it. Contract: torchtitan_ext/ops.py.
//
// A flight is packed while up to kFlights - 1 others move. On every rank the same messages go in the same order: what
// depends on one rank alone (is a tensor contiguous?) decides only between the tensor's own memory and a bucket.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "core/memory.h"
#include "dist/broadcast_check.h"
#include "ops/copy_runs.h"
#include "ops/python_lock.h"

namespace torchtitan_ext::dist {
namespace {

using core::Flight;
using core::Message;
using core::RunList;
using core::Schedule;
using core::Segment;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

constexpr const char* kOp = "broadcast_coalesced_";
// One is packed or unpacked, one moves, one waits so that the wire is never idle. It is also the bound on extra memory.
constexpr size_t kFlights = 3;
// Below this the two copies through a bucket cost less than a message of its own: 300 tensors of at most 2.4 MB
// take 1.8 times the limit in messages of their own and 1.4 packed (2 gloo processes, buckets of 32 MiB; thresholds of
// 1 to 8 MiB compared on the workloads of benchmarks/bench_sync.py).
constexpr int64_t kDirectBytes = int64_t{8} << 20;
constexpr int64_t kMaxBucketBytes = int64_t{1} << 40;

int64_t address_of(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

core::Memory memory_of(const at::Tensor& tensor) {
  return {static_cast<uintptr_t>(address_of(tensor)), tensor.sizes(), tensor.strides(), tensor.element_size()};
}

void check_tensors(at::TensorList tensors) {
  const Fault fault = find_fault(tensors);
  if (fault.positions.empty()) return;
  std::string who = c10::str("tensors[", fault.positions[0], "]");
  if (fault.positions.size() == 2) who += c10::str(" and tensors[", fault.positions[1], "]");
  TORCH_CHECK_VALUE(false, kOp, ": ", who, " ", fault.reason);
}

// What a group cannot do with one call it does with many. One that Python made has no backends to be asked.
bool supports_coalescing(c10d::ProcessGroup& group, c10::DeviceType device) {
  try {
    return group.getBackend(device)->supportsCoalescing();
  } catch (const c10::Error&) {
    return false;
  }
}

// Bytes [first, first + count) of a tensor's memory as 1-d uint8. It keeps the storage alive, and tells c10d its
// device.
at::Tensor bytes_of(const at::Tensor& tensor, int64_t first, int64_t count) {
  at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  return bytes.set_(tensor.storage(), tensor.storage_offset() * tensor.element_size() + first, {count}, {1});
}

// The copies of a bucket are short, and the other cores are busy moving what is in flight.
void on_this_thread(int64_t begin, int64_t end, int64_t, ops::RangeBody body, void* context) {
  body(begin, end, context);
}

// Buckets in CPU memory outlive a call: the first touch of new pages costs more than the copies. CUDA memory is kept by
// PyTorch's allocator. At most kFlights buckets are kept, none larger than ops.DEFAULT_BUCKET_BYTES: who asks for more
// once need not miss it for ever. They are never taken down: at exit other statics may be gone.
constexpr int64_t kMaxKeptBytes = int64_t{32} << 20;

class KeptBuckets {
 public:
  static KeptBuckets& instance() {
    static auto* const kept = new KeptBuckets;
    return *kept;
  }

  at::Tensor take(int64_t num_bytes, const at::TensorOptions& options) {
    if (options.device().is_cpu()) {
      const std::scoped_lock lock(mutex_);
      for (at::Tensor& free : free_) {
        if (!free.defined() || free.numel() < num_bytes) continue;
        return std::exchange(free, at::Tensor());
      }
    }
    return at::empty({num_bytes}, options);
  }

  void give_back(at::Tensor bucket) {
    if (!bucket.is_cpu() || bucket.numel() > kMaxKeptBytes) return;
    const std::scoped_lock lock(mutex_);
    at::Tensor& smallest = *std::min_element(std::begin(free_), std::end(free_), is_smaller);
    if (!smallest.defined() || smallest.numel() < bucket.numel()) smallest = std::move(bucket);
  }

 private:
  static bool is_smaller(const at::Tensor& left, const at::Tensor& right) {
    return right.defined() && (!left.defined() || left.numel() < right.numel());
  }

  std::mutex mutex_;
  at::Tensor free_[kFlights];
};

// What a transfer raises, as torch names it (gloo: a plain runtime_error): a bucket that gets no memory is no lost rank.
// To be called in a handler.
[[noreturn]] void raise_transfer_failure() {
  std::string reason;
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  C10_THROW_ERROR(DistBackendError, reason);
}

class Broadcast {
 public:
  Broadcast(at::TensorList tensors, c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t src, Schedule schedule)
      : tensors_(tensors), group_(std::move(group)), src_(src), schedule_(std::move(schedule)) {
    options_.rootRank = src;
    options_.asyncOp = true;
    coalesces_ = supports_coalescing(*group_, tensors[0].device().type());
  }

  void run() {
    for (size_t index = 0; index < schedule_.flights.size(); ++index) {
      if (in_flight_.size() == kFlights) finish_oldest();
      start(index);
    }
    while (!in_flight_.empty()) finish_oldest();
    // Not where a transfer failed: it may still write.
    for (at::Tensor& bucket : buckets_) {
      if (bucket.defined()) KeptBuckets::instance().give_back(std::move(bucket));
    }
  }

 private:
  struct Started {
    size_t flight;
    Works works;
  };

  bool is_source() const { return group_->getRank() == src_; }
  at::Tensor& bucket_of(size_t flight) { return buckets_[flight % kFlights]; }

  std::span<const Segment> segments_of(const Message& message) const {
    return std::span<const Segment>(schedule_.segments).subspan(message.first_segment, message.num_segments);
  }

  std::span<const Message> messages_of(size_t flight) const {
    const Flight& messages = schedule_.flights[flight];
    return std::span<const Message>(schedule_.messages).subspan(messages.first_message, messages.num_messages);
  }

  // Whether the message is a part of one tensor that can be sent from and received into where it lies.
  bool is_direct(const Message& message) const {
    return message.num_segments == 1 && tensors_[segments_of(message)[0].tensor].is_contiguous();
  }

  void start(size_t flight) {
    std::vector<at::Tensor> buffers;
    RunList packing;
    for (const Message& message : messages_of(flight)) {
      const Segment& first = segments_of(message)[0];
      if (is_direct(message)) {
        buffers.push_back(bytes_of(tensors_[first.tensor], first.first_byte, first.num_bytes));
        continue;
      }
      make_bucket(flight);
      if (is_source()) append_copies(packing, flight, message, true);
      buffers.push_back(bytes_of(bucket_of(flight), message.flight_bytes, message.num_bytes));
    }
    copy(packing);
    in_flight_.push_back({flight, send(buffers)});
  }

  Works send(std::vector<at::Tensor>& buffers) {
    const c10::DeviceType device = tensors_[0].device().type();
    Works works;
    if (coalesces_) group_->startCoalescing(device);
    try {
      for (at::Tensor& buffer : buffers) {
        std::vector<at::Tensor> one = {buffer};
        works.push_back(group_->broadcast(one, options_));
      }
    } catch (...) {
      if (coalesces_) leave_coalescing(device);
      raise_transfer_failure();
    }
    // The works inside a coalesced block are not waited for: the one of the block stands for them.
    if (coalesces_) works = {group_->endCoalescing(device)};
    return works;
  }

  // A block that stays open would hold back what this thread sends next, through any group, without a word.
  void leave_coalescing(c10::DeviceType device) {
    try {
      group_->endCoalescing(device);
    } catch (const std::exception&) {  // the first failure is the one to tell
    }
  }

  void finish_oldest() {
    const Started oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    try {
      for (const auto& work : oldest.works) {
        if (work) work->wait();
      }
    } catch (...) {
      raise_transfer_failure();
    }
    if (is_source()) return;
    RunList unpacking;
    for (const Message& message : messages_of(oldest.flight)) {
      if (!is_direct(message)) append_copies(unpacking, oldest.flight, message, false);
    }
    copy(unpacking);
  }

  // Buckets are as large as the largest flight, so each is allocated once.
  void make_bucket(size_t flight) {
    if (bucket_of(flight).defined()) return;
    int64_t num_bytes = 0;
    for (const Flight& any : schedule_.flights) num_bytes = std::max(num_bytes, any.num_bytes);
    bucket_of(flight) = KeptBuckets::instance().take(num_bytes, tensors_[0].options().dtype(at::kByte));
  }

  void append_copies(RunList& runs, size_t flight, const Message& message, bool to_bucket) {
    const int64_t base = address_of(bucket_of(flight)) + message.flight_bytes;
    runs.reserve(runs.nests().size() + message.num_segments);
    for (const Segment& segment : segments_of(message)) {
      const at::Tensor& tensor = tensors_[segment.tensor];
      const int64_t in_bucket = base + segment.message_bytes;
      runs.start_pair();
      if (tensor.is_contiguous()) {
        const int64_t in_tensor = address_of(tensor) + segment.first_byte;
        runs.append_bytes(to_bucket ? in_tensor : in_bucket, to_bucket ? in_bucket : in_tensor, segment.num_bytes);
      } else {
        const int64_t item_bytes = tensor.element_size();
        const int64_t first = segment.first_byte / item_bytes, last = first + segment.num_bytes / item_bytes;
        core::append_range(runs, memory_of(tensor), in_bucket, first, last, to_bucket);
      }
    }
  }

  void copy(const RunList& runs) const {
    if (runs.nests().empty()) return;
    if (tensors_[0].is_cuda()) {
      ops::copy_runs_cuda(runs, 0, 0, tensors_[0].device().index());
    } else {
      ops::copy_runs_cpu(runs, 0, 0, on_this_thread);
    }
  }

  at::TensorList tensors_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t src_;
  Schedule schedule_;
  c10d::BroadcastOptions options_;
  bool coalesces_ = false;
  at::Tensor buckets_[kFlights];
  std::deque<Started> in_flight_;
};

void broadcast_coalesced_(at::TensorList tensors, const std::string& group_name, int64_t src, int64_t bucket_bytes) {
  const auto group = c10d::resolve_process_group(group_name);
  TORCH_CHECK_VALUE(src >= 0 && src < group->getSize(), kOp, ": got src ", src, ", expected a rank of the group, 0 to ",
                    group->getSize() - 1);
  TORCH_CHECK_VALUE(bucket_bytes > 0, kOp, ": got bucket_bytes ", bucket_bytes, ", expected a positive number");
  if (tensors.empty()) return;
  check_tensors(tensors);
  if (group->getSize() == 1) return;
  // Groups allocate and wait on the current device; without this every rank would open a context on GPU 0.
  const c10::DeviceGuard guard(tensors[0].device());
  std::vector<int64_t> tensor_bytes;
  tensor_bytes.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) tensor_bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
  // The bound leaves room for sums of sizes and is more than any backend sends at once.
  const int64_t num_pieces = (std::min(bucket_bytes, kMaxBucketBytes) - 1) / core::kPieceBytes + 1;
  Schedule schedule = core::schedule_messages(tensor_bytes, num_pieces * core::kPieceBytes, kDirectBytes);
  try {
    Broadcast(tensors, group, src, std::move(schedule)).run();
  } catch (...) {
    // Some are part-written. After a call that returns, csrc/autograd does this.
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
    throw;
  }
}

// The arguments of a call, taken off the dispatcher's stack so that they can be given back under Python's lock.
class Arguments {
 public:
  Arguments(torch::jit::Stack& stack, size_t count) : values_(torch::jit::pop(stack, count)) {}
  ~Arguments() {
    const ops::PythonLock lock;
    values_.clear();
  }

  const c10::IValue& operator[](size_t index) const { return values_[index]; }

 private:
  torch::jit::Stack values_;
};

void broadcast_coalesced_boxed(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(*stack, 4);
  broadcast_coalesced_(arguments[0].toTensorVector(), arguments[1].toStringRef(), arguments[2].toInt(),
                       arguments[3].toInt());
}

void check_broadcast_boxed(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(*stack, 1);
  const std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  Fault fault = find_fault(tensors);
  stack->emplace_back(fault.positions.empty() ? digest_of(tensors) : std::vector<int64_t>());
  stack->emplace_back(std::move(fault.positions));
  stack->emplace_back(std::move(fault.reason));
}

void register_kernels(torch::Library& library) {
  library.impl("broadcast_coalesced_", torch::CppFunction::makeFromBoxedFunction<&broadcast_coalesced_boxed>());
  library.impl("check_broadcast", torch::CppFunction::makeFromBoxedFunction<&check_broadcast_boxed>());
}

// Of other layouts too, to refuse them in one sentence.
TORCH_LIBRARY_IMPL(torchtitan_ext, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, MkldnnCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCUDA, library) { register_kernels(library); }

// The check sees lazy views as they are. What the dispatcher does by default is to resolve them on the way in.
void see_lazy_views(torch::Library& library) { library.impl("check_broadcast", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(torchtitan_ext, Conjugate, library) { see_lazy_views(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, Negative, library) { see_lazy_views(library); }

}  // namespace
}  // namespace torchtitan_ext::dist
