// exchange_runs_ over c10d: boxes of tensors from every rank to every other, point to point. Contract:
// torchtitan_ext/ops/exchange.py; the order of things: core/exchange_schedule.h.
//
// A step's messages are packed and sent while those of the steps before it move. Whether a message is sent from (received
// into) the tensor's own memory or a bucket is each rank's own business.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "core/exchange_schedule.h"
#include "dist/arguments.h"
#include "dist/exchange_agreement.h"
#include "dist/exchange_boxes.h"
#include "dist/kept_buckets.h"
#include "dist/kernels.h"
#include "dist/planned_exchange.h"
#include "dist/transfers.h"

namespace torchtitan_ext::dist {
namespace {

using core::ExchangeStep;
using core::Message;
using core::PairFlight;
using core::PairSchedule;
using core::RunList;
using core::Segment;

constexpr int64_t kRefusal = -1;  // as a digest
constexpr int kTag = 0x747465;    // "tte": point-to-point messages of others pass by
// From here on a message of its own costs less than the copies through a bucket, of which each end saves its own.
constexpr int64_t kDirectBytes = int64_t{64} << 10;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Without a group this process is the only rank.
int64_t rank_in(const Group& group) { return group ? group->getRank() : 0; }
int64_t size_of(const Group& group) { return group ? group->getSize() : 1; }

// What a call needs, checked on this rank alone.
struct Plan {
  ExchangeBoxes sources;
  ExchangeBoxes targets;
  core::ExchangeSchedule schedule;
  at::Device device;
  Wire wire;
  int64_t bucket_bytes;
  std::vector<uint64_t> sent_hashes;
  std::vector<uint64_t> received_hashes;
};

// A part of a box, which begins `offset` elements behind the box's first one, as a view of the tensor.
at::Tensor box_view(const TensorBox& box, std::span<const int64_t> sizes, std::span<const int64_t> strides,
                    int64_t offset) {
  const int64_t first = (static_cast<int64_t>(box.memory.address) - address_of(*box.tensor)) / box.memory.item_bytes;
  return box.tensor->as_strided(at::IntArrayRef(sizes.data(), sizes.size()),
                                at::IntArrayRef(strides.data(), strides.size()),
                                box.tensor->storage_offset() + first + offset);
}

// Converts elements of a box, from `first` on, into 1-d contiguous memory of the wire's dtype.
void cast_range(const TensorBox& box, int64_t first, const at::Tensor& wire) {
  int64_t done = 0;
  std::vector<int64_t> sizes;
  for (const core::RangeBox& part :
       core::boxes_of_range(box.memory.sizes, box.memory.strides, first, first + wire.numel())) {
    sizes.assign(box.memory.sizes.begin() + part.dim, box.memory.sizes.end());
    if (!sizes.empty()) sizes[0] = part.num_rows;
    const at::Tensor from = box_view(box, sizes, box.memory.strides.subspan(part.dim), part.offset);
    wire.narrow(0, done, part.num_elements).view(sizes).copy_(from);
    done += part.num_elements;
  }
}

class Exchange {
 public:
  Exchange(const Plan& plan, Group group, std::chrono::milliseconds timeout)
      : plan_(plan), group_(std::move(group)), timeout_(timeout) {
    sends_ = {&plan.sources, &plan.schedule.sends, 0};
    sends_.bucket_bytes = packed_bytes(sends_);
    receives_ = {&plan.targets, &plan.schedule.receives, 0};
    receives_.bucket_bytes = packed_bytes(receives_);
    const size_t num_buckets = std::min(kNumBuckets, plan.schedule.steps.size());
    for (size_t bucket = 0; bucket < num_buckets; ++bucket) buckets_[bucket] = make_bucket();
  }

  void run() {
    KeptBuckets::instance().lend(buckets_, [this] { move_all(); });
  }

 private:
  void move_all() {
    for (size_t index = 0; index < plan_.schedule.steps.size(); ++index) {
      if (in_flight_.size() == kNumBuckets) finish_oldest();
      start(index);
    }
    copy_own();
    while (!in_flight_.empty()) finish_oldest();
  }

  // One of both directions. Of each bucket the first bytes are for what is sent, the others for what is received.
  struct Direction {
    const ExchangeBoxes* boxes = nullptr;
    const std::vector<PairSchedule>* pairs = nullptr;
    int64_t bucket_bytes = 0;

    const PairSchedule& pair(PairFlight place) const { return (*pairs)[place.pair]; }
    std::span<const Message> messages(PairFlight place) const {
      const core::Schedule& schedule = pair(place).schedule;
      const core::Flight& flight = schedule.flights[place.flight];
      return std::span(schedule.messages).subspan(flight.first_message, flight.num_messages);
    }
    std::span<const Segment> segments(PairFlight place, const Message& message) const {
      return std::span(pair(place).schedule.segments).subspan(message.first_segment, message.num_segments);
    }
  };

  struct Started {
    size_t step;
    Works sends;
    Works receives;
  };

  // Whether a message is a part of one box that can be sent from and received into where it lies.
  bool is_direct(const Direction& direction, std::span<const Segment> segments) const {
    const TensorBox& box = (*direction.boxes)[segments[0].tensor];
    return segments.size() == 1 && box.is_contiguous && !box.is_cast && !is_staged();
  }

  // Through the host's memory although the tensors are not there.
  bool is_staged() const { return plan_.wire == Wire::kHost && !plan_.device.is_cpu(); }

  // Of the largest flight that has something to be packed.
  int64_t packed_bytes(const Direction& direction) const {
    int64_t num_bytes = 0;
    for (size_t pair = 0; pair < direction.pairs->size(); ++pair) {
      const core::Schedule& schedule = (*direction.pairs)[pair].schedule;
      for (size_t flight = 0; flight < schedule.flights.size(); ++flight) {
        const PairFlight place{pair, flight};
        for (const Message& message : direction.messages(place)) {
          if (is_direct(direction, direction.segments(place, message))) continue;
          num_bytes = std::max(num_bytes, message.flight_bytes + message.num_bytes);
        }
      }
    }
    return (num_bytes + core::kPieceBytes - 1) / core::kPieceBytes * core::kPieceBytes;
  }

  at::Tensor make_bucket() const {
    const int64_t num_bytes = sends_.bucket_bytes + receives_.bucket_bytes;
    if (num_bytes == 0) return {};
    const at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
    if (is_staged()) return KeptBuckets::instance().take(num_bytes, options.pinned_memory(true));
    return KeptBuckets::instance().take(num_bytes, options.device(plan_.device));
  }

  // Where in its bucket a message lies.
  int64_t place_in_bucket(const Direction& direction, const Message& message) const {
    return message.flight_bytes + (&direction == &receives_ ? sends_.bucket_bytes : 0);
  }

  // The memory that the messages of a flight are sent from or received into.
  std::vector<at::Tensor> buffers_of(const Direction& direction, PairFlight place, const at::Tensor& bucket) const {
    std::vector<at::Tensor> buffers;
    for (const Message& message : direction.messages(place)) {
      const std::span<const Segment> segments = direction.segments(place, message);
      if (is_direct(direction, segments)) {
        const TensorBox& box = (*direction.boxes)[segments[0].tensor];
        const int64_t first = static_cast<int64_t>(box.memory.address) - address_of(*box.tensor);
        buffers.push_back(bytes_of(*box.tensor, first + segments[0].first_byte, message.num_bytes));
      } else {
        buffers.push_back(bytes_of(bucket, place_in_bucket(direction, message), message.num_bytes));
      }
    }
    return buffers;
  }

  void start(size_t index) {
    const ExchangeStep& step = plan_.schedule.steps[index];
    const at::Tensor& bucket = buckets_[index % kNumBuckets];
    const auto start_receives = [&](Works& works) {
      if (!step.receive) return;
      const int peer = static_cast<int>(receives_.pair(*step.receive).peer);
      for (at::Tensor& buffer : buffers_of(receives_, *step.receive, bucket)) {
        std::vector<at::Tensor> one = {buffer};
        works.push_back(group_->recv(one, peer, kTag));
      }
    };
    const auto start_sends = [&](Works& works) {
      if (!step.send) return;
      const int peer = static_cast<int>(sends_.pair(*step.send).peer);
      for (at::Tensor& buffer : buffers_of(sends_, *step.send, bucket)) {
        std::vector<at::Tensor> one = {buffer};
        works.push_back(group_->send(one, peer, kTag));
      }
    };
    Started started{index, {}, {}};
    try {
      if (plan_.wire == Wire::kDevice) {
        if (step.send) copy_packed(sends_, *step.send, bucket);
        started.receives = start_coalesced(*group_, plan_.device.type(), true, [&](Works& works) {
          start_receives(works);
          start_sends(works);
        });
      } else {
        // Peers begin to send while this rank packs.
        start_receives(started.receives);
        if (step.send) copy_packed(sends_, *step.send, bucket);
        start_sends(started.sends);
      }
    } catch (...) {
      raise();
    }
    in_flight_.push_back(std::move(started));
  }

  void finish_oldest() {
    copy_own();
    const Started oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    // On a device the work of a block is not waited for by this thread but by the stream.
    const std::chrono::milliseconds timeout = plan_.wire == Wire::kDevice ? kNoTimeout : timeout_;
    const std::optional<PairFlight>& received = plan_.schedule.steps[oldest.step].receive;
    try {
      wait_for(oldest.receives, timeout);
      if (received) copy_packed(receives_, *received, buckets_[oldest.step % kNumBuckets]);
      wait_for(oldest.sends, timeout);
    } catch (...) {
      raise();
    }
  }

  [[noreturn]] static void raise() {
    raise_transfer_failure("exchange_runs_: while boxes moved; targets may be part-written: ");
  }

  // Between the tensors and the bucket.
  void copy_packed(const Direction& direction, PairFlight place, const at::Tensor& bucket) const {
    RunList runs;
    for (const Message& message : direction.messages(place)) {
      const std::span<const Segment> segments = direction.segments(place, message);
      if (is_direct(direction, segments)) continue;
      runs.reserve(runs.nests().size() + segments.size());
      for (const Segment& segment : segments) {
        append_copy(runs, direction, segment, bucket, place_in_bucket(direction, message) + segment.message_bytes);
      }
    }
    copy_on(plan_.device, runs);
    if (is_staged()) c10::impl::VirtualGuardImpl(plan_.device.type()).synchronizeDevice(plan_.device.index());
  }

  void append_copy(RunList& runs, const Direction& direction, const Segment& segment, const at::Tensor& bucket,
                   int64_t in_bucket) const {
    const TensorBox& box = (*direction.boxes)[segment.tensor];
    const bool to_bucket = &direction == &sends_;
    const int64_t address = address_of(bucket) + in_bucket;
    if (box.is_cast) {
      const int64_t item_bytes = static_cast<int64_t>(c10::elementSize(box.dtype));
      cast_range(box, segment.first_byte / item_bytes, bytes_of(bucket, in_bucket, segment.num_bytes).view(box.dtype));
      return;
    }
    runs.start_pair();
    if (box.is_contiguous) {
      const int64_t in_box = static_cast<int64_t>(box.memory.address) + segment.first_byte;
      runs.append_bytes(to_bucket ? in_box : address, to_bucket ? address : in_box, segment.num_bytes);
    } else {
      const int64_t first = segment.first_byte / box.memory.item_bytes;
      core::append_range(runs, box.memory, address, first, first + segment.num_bytes / box.memory.item_bytes,
                         to_bucket);
    }
  }

  // What this rank has and wants itself, while the first messages move.
  void copy_own() {
    if (std::exchange(has_copied_own_, true)) return;
    const auto [first_source, last_source] = plan_.sources.range_of(rank_in(group_));
    const size_t first_target = plan_.targets.range_of(rank_in(group_)).first;
    RunList runs;
    for (size_t index = 0; first_source + index < last_source; ++index) {
      const TensorBox& source = plan_.sources[first_source + index];
      const TensorBox& target = plan_.targets[first_target + index];
      if (source.num_bytes == 0) continue;
      if (source.is_cast) {
        const at::Tensor to = box_view(target, target.memory.sizes, target.memory.strides, 0);
        to.view(source.dtype).copy_(box_view(source, source.memory.sizes, source.memory.strides, 0));
        continue;
      }
      runs.start_pair();
      if (source.is_contiguous && target.is_contiguous) {
        runs.append_bytes(source.memory.address, target.memory.address, source.num_bytes);
        continue;
      }
      runs.append_box(source.memory.sizes, {static_cast<int64_t>(source.memory.address), source.memory.strides},
                      {static_cast<int64_t>(target.memory.address), target.memory.strides}, source.memory.item_bytes);
    }
    copy_on(plan_.device, runs);
  }

  const Plan& plan_;
  Group group_;
  std::chrono::milliseconds timeout_;
  Direction sends_, receives_;
  bool has_copied_own_ = false;
  at::Tensor buckets_[kNumBuckets];
  // Gone before the buckets: gloo writes into no memory whose work is gone.
  std::deque<Started> in_flight_;
};

// The i-th own box that is sent goes to the i-th own box that is received.
void check_own(const Plan& plan, int64_t rank) {
  const auto [first_source, last_source] = plan.sources.range_of(rank);
  const auto [first_target, last_target] = plan.targets.range_of(rank);
  TORCH_CHECK_VALUE(last_source - first_source == last_target - first_target, kExchange, ": this rank sends itself ",
                    last_source - first_source, " boxes and expects ", last_target - first_target);
  for (size_t index = 0; first_source + index < last_source; ++index) {
    const TensorBox& source = plan.sources[first_source + index];
    const TensorBox& target = plan.targets[first_target + index];
    TORCH_CHECK_VALUE(
        std::ranges::equal(source.memory.sizes, target.memory.sizes) && source.num_bytes == target.num_bytes, kExchange,
        ": box ", index,
        " that this rank sends itself has another shape or another size of "
        "elements than the one that it expects");
  }
}

Plan plan_exchange(at::TensorList sources, at::TensorList targets, const at::Tensor& sends, const at::Tensor& receives,
                   const Group& group, int64_t bucket_bytes) {
  TORCH_CHECK_VALUE(bucket_bytes > 0, kExchange, ": got bucket_bytes ", bucket_bytes, ", expected a positive number");
  const int64_t num_ranks = size_of(group);
  const at::Tensor& first = !sources.empty() ? sources[0] : !targets.empty() ? targets[0] : sends;
  const at::Device device = first.device();
  const bool is_device_wire = !device.is_cpu() && group && supports_coalescing(*group, device.type());
  Plan plan{ExchangeBoxes(sources, sends, first, num_ranks, Access::kRead),
            ExchangeBoxes(targets, receives, first, num_ranks, Access::kWrite),
            {},
            device,
            is_device_wire ? Wire::kDevice : Wire::kHost,
            bucket_bytes,
            {},
            {}};
  check_separate(plan.sources, plan.targets);
  check_own(plan, rank_in(group));
  // Of 1 to 16 MiB, 16 were fastest on a quiet machine (benchmarks/bench_reshard.py, 4 gloo processes on 2 cores).
  const int64_t flight_bytes = std::min(bucket_bytes, kMaxBucketBytes) / 2;
  const int64_t num_pieces = (flight_bytes - 1) / core::kPieceBytes + 1;
  plan.schedule =
      core::schedule_exchange(rank_in(group), num_ranks, plan.sources.peer_bytes(), plan.targets.peer_bytes(),
                              std::max<int64_t>(num_pieces, 1) * core::kPieceBytes, kDirectBytes);
  if (plan.schedule.steps.empty()) plan.wire = Wire::kNone;
  plan.sent_hashes = core::hash_pairs(rank_in(group), num_ranks, plan.sources.peer_bytes(), true);
  plan.received_hashes = core::hash_pairs(rank_in(group), num_ranks, plan.targets.peer_bytes(), false);
  return plan;
}

std::chrono::milliseconds timeout_of(double seconds) {
  constexpr double kMostSeconds = 1e9;
  if (!(seconds > 0)) return kNoTimeout;
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(std::min(seconds, kMostSeconds) * 1e3)));
}

Group group_named(const std::string& name) { return name.empty() ? Group() : c10d::resolve_process_group(name); }

}  // namespace

struct PlannedExchange::State {
  std::vector<at::Tensor> sources, targets;
  at::Tensor sends, receives;
  std::string group_name;
  std::optional<Plan> plan;
  std::exception_ptr refusal;  // why there is no plan
};

PlannedExchange::PlannedExchange(std::vector<at::Tensor> sources, std::vector<at::Tensor> targets, at::Tensor sends,
                                 at::Tensor receives, std::string group_name, int64_t bucket_bytes)
    : state_(std::make_unique<State>(State{std::move(sources), std::move(targets), std::move(sends),
                                           std::move(receives), std::move(group_name), std::nullopt, nullptr})) {
  const Group group = group_named(state_->group_name);
  try {
    state_->plan.emplace(
        plan_exchange(state_->sources, state_->targets, state_->sends, state_->receives, group, bucket_bytes));
  } catch (...) {
    state_->refusal = std::current_exception();
  }
}

// Tensors of Python's are given back under its lock.
PlannedExchange::~PlannedExchange() { ops::give_back(std::move(state_)); }

void PlannedExchange::run_below_autograd(int64_t digest, double timeout_seconds) {
  const Group group = group_named(state_->group_name);
  const std::chrono::milliseconds timeout = timeout_of(timeout_seconds);
  const std::optional<Plan>& plan = state_->plan;
  std::optional<Exchange> transfer;
  std::exception_ptr refusal = state_->refusal;
  ExchangeStatement statement;
  try {
    TORCH_CHECK_VALUE(digest != kRefusal, kExchange, ": refused by this rank's caller");
    if (plan) {
      statement = {
          false, digest, plan->bucket_bytes, plan->wire, std::nullopt, plan->sent_hashes, plan->received_hashes};
      if (group) statement.device = sending_device(*group, plan->device);
      transfer.emplace(*plan, group, timeout);
    }
  } catch (...) {
    refusal = std::current_exception();
  }
  statement.is_refused = refusal != nullptr;
  const at::Device device = plan ? plan->device : at::Device(at::kCPU);
  // Groups allocate and wait on the current device; without this every rank would open a context on GPU 0.
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
  if (size_of(group) > 1) agree(group, statement, device, timeout);
  if (refusal) std::rethrow_exception(refusal);
  try {
    transfer->run();
  } catch (...) {
    bump_versions(state_->targets);
    throw;
  }
}

void PlannedExchange::refuse_gradients() const {
  if (!at::GradMode::is_enabled()) return;
  for (const std::vector<at::Tensor>* tensors : {&state_->sources, &state_->targets}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(!tensor.requires_grad(), kExchange,
                  " is not differentiable: an argument requires grad; call it under torch.no_grad()");
    }
  }
}

void PlannedExchange::run(int64_t digest, double timeout_seconds) {
  try {
    refuse_gradients();
  } catch (...) {  // the other ranks, which would wait for this one, are told
    try {
      run_below_autograd(kRefusal, timeout_seconds);
    } catch (const std::exception&) {
    }
    throw;
  }
  run_below_autograd(digest, timeout_seconds);
  bump_versions(state_->targets);
}

void exchange_runs_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(*stack, 8);
  PlannedExchange exchange(arguments[0].toTensorVector(), arguments[1].toTensorVector(), arguments[2].toTensor(),
                           arguments[3].toTensor(), arguments[4].toStringRef(), arguments[6].toInt());
  exchange.run_below_autograd(arguments[5].toInt(), arguments[7].toDouble());
}

}  // namespace torchtitan_ext::dist
