// broadcast_coalesced_ over c10d. No stable form of process groups exists, so this file uses the full C++ API of torch
// and is built per minor version of it. Contract: torchtitan_ext/ops.py.
//
// A flight is packed while up to kNumBuckets - 1 others move. On every rank the same messages go in the same order: what
// depends on one rank alone (is a tensor contiguous?) decides only between the tensor's own memory and a bucket.
#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "core/memory.h"
#include "dist/arguments.h"
#include "dist/broadcast_check.h"
#include "dist/kept_buckets.h"
#include "dist/kernels.h"
#include "dist/transfers.h"

namespace torchtitan_ext::dist {
namespace {

using core::Flight;
using core::Message;
using core::RunList;
using core::Schedule;
using core::Segment;

constexpr const char* kOp = "broadcast_coalesced_";
// Below this the two copies through a bucket cost less than a message of its own: 300 tensors of at most 2.4 MB
// take 1.8 times the limit in messages of their own and 1.4 packed (2 gloo processes, buckets of 32 MiB; thresholds of
// 1 to 8 MiB compared on the workloads of benchmarks/bench_sync.py).
constexpr int64_t kDirectBytes = int64_t{8} << 20;

void check_tensors(at::TensorList tensors) {
  const Fault fault = find_fault(tensors);
  if (fault.positions.empty()) return;
  std::string who = c10::str("tensors[", fault.positions[0], "]");
  if (fault.positions.size() == 2) who += c10::str(" and tensors[", fault.positions[1], "]");
  TORCH_CHECK_VALUE(false, kOp, ": ", who, " ", fault.reason);
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
    KeptBuckets::instance().lend(buckets_, [this] { move_all(); });
  }

 private:
  struct Started {
    size_t flight;
    Works works;
  };

  void move_all() {
    for (size_t index = 0; index < schedule_.flights.size(); ++index) {
      if (in_flight_.size() == kNumBuckets) finish_oldest();
      start(index);
    }
    while (!in_flight_.empty()) finish_oldest();
  }

  bool is_source() const { return group_->getRank() == src_; }
  at::Tensor& bucket_of(size_t flight) { return buckets_[flight % kNumBuckets]; }

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
    copy_on(tensors_[0].device(), packing);
    in_flight_.push_back({flight, send(buffers)});
  }

  Works send(std::vector<at::Tensor>& buffers) {
    try {
      return start_coalesced(*group_, tensors_[0].device().type(), coalesces_, [&](Works& works) {
        for (at::Tensor& buffer : buffers) {
          std::vector<at::Tensor> one = {buffer};
          works.push_back(group_->broadcast(one, options_));
        }
      });
    } catch (...) {
      raise_transfer_failure();
    }
  }

  void finish_oldest() {
    const Started oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    try {
      wait_for(oldest.works, kNoTimeout);
    } catch (...) {
      raise_transfer_failure();
    }
    if (is_source()) return;
    RunList unpacking;
    for (const Message& message : messages_of(oldest.flight)) {
      if (!is_direct(message)) append_copies(unpacking, oldest.flight, message, false);
    }
    copy_on(tensors_[0].device(), unpacking);
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

  at::TensorList tensors_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t src_;
  Schedule schedule_;
  c10d::BroadcastOptions options_;
  bool coalesces_ = false;
  at::Tensor buckets_[kNumBuckets];
  std::deque<Started> in_flight_;
};

void broadcast(at::TensorList tensors, const std::string& group_name, int64_t src, int64_t bucket_bytes) {
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
  const int64_t num_pieces = (std::min(bucket_bytes, kMaxBucketBytes) - 1) / core::kPieceBytes + 1;
  Schedule schedule = core::schedule_messages(tensor_bytes, num_pieces * core::kPieceBytes, kDirectBytes);
  try {
    Broadcast(tensors, group, src, std::move(schedule)).run();
  } catch (...) {
    bump_versions(tensors);
    throw;
  }
}

}  // namespace

void broadcast_coalesced_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(*stack, 4);
  broadcast(arguments[0].toTensorVector(), arguments[1].toStringRef(), arguments[2].toInt(), arguments[3].toInt());
}

void check_broadcast(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(*stack, 1);
  const std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  Fault fault = find_fault(tensors);
  stack->emplace_back(fault.positions.empty() ? digest_of(tensors) : std::vector<int64_t>());
  stack->emplace_back(std::move(fault.positions));
  stack->emplace_back(std::move(fault.reason));
}

}  // namespace torchtitan_ext::dist
