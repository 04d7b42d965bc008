#include "dist/exchange_agreement.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>

#include "core/check.h"
#include "core/exchange_schedule.h"
#include "dist/exchange_boxes.h"
#include "dist/transfers.h"

namespace torchtitan_ext::dist {
namespace {

// The columns of the gathered table, a row for each rank.
enum Column { kRefused, kDigest, kBucketBytes, kWire, kHash, kDeviceType, kHasMet, kNumColumns };

constexpr size_t kMaxListed = 10;
// Beyond this a table with a hash for each pair of ranks is too large, even to tell an error.
constexpr int64_t kMaxNamedRanks = 1024;

std::string listed(const std::vector<std::string>& items) {
  std::string text;
  for (size_t index = 0; index < std::min(items.size(), kMaxListed); ++index) {
    text += (index == 0 ? "" : ", ") + items[index];
  }
  if (items.size() > kMaxListed) text += core::concat(" and ", items.size() - kMaxListed, " more");
  return text;
}

// A device from which the group can send: the CPU where it can.
at::Device device_of(const c10d::ProcessGroup& group, const at::Device& own) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto is_cpu = [](const c10::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::ranges::any_of(devices, is_cpu)) return at::kCPU;
  const c10::DeviceType type = devices[0].type();
  if (own.type() == type) return own;
  return group.getBoundDeviceId().value_or(c10::impl::VirtualGuardImpl(type).getDevice());
}

// Groups and the devices on which all their ranks have met (core::decide_meeting).
class Meetings {
 public:
  static Meetings& instance() {
    static auto* const meetings = new Meetings;
    return *meetings;
  }

  bool has(const GroupPointer& group, const at::Device& device) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(met_, [](const Met& met) { return met.group.expired(); });
    return std::ranges::any_of(
        met_, [&](const Met& met) { return met.device == device && met.group.lock().get() == group.get(); });
  }

  void add(const GroupPointer& group, const at::Device& device) {
    const std::scoped_lock lock(mutex_);
    met_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), device});
  }

 private:
  struct Met {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    at::Device device;
  };
  std::mutex mutex_;
  std::vector<Met> met_;
};

// Collective: on its device each rank enters one collective of the group.
void meet(c10d::ProcessGroup& group, const at::Device& device) {
  const c10::DeviceGuard guard(device);
  try {
    std::vector<at::Tensor> one = {at::zeros({1}, at::TensorOptions().device(device))};
    group.allreduce(one)->wait();
  } catch (...) {
    raise_transfer_failure("exchange_runs_: while ranks were connected; nothing was moved: ");
  }
}

// The rows of all ranks, as a CPU tensor of int64.
at::Tensor gather(c10d::ProcessGroup& group, const at::Tensor& own, const at::Device& device,
                  std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> row = {own.to(device)};
  const at::Tensor table = at::empty({group.getSize(), own.numel()}, row[0].options());
  std::vector<std::vector<at::Tensor>> rows = {table.unbind()};
  c10d::AllgatherOptions options;
  // NCCL ends the process where a collective takes longer than its own timeout: there the group's stays.
  if (timeout != kNoTimeout && device.is_cpu()) options.timeout = timeout;
  try {
    group.allgather(rows, row, options)->wait();
    return table.cpu();
  } catch (...) {
    raise_transfer_failure("exchange_runs_: while ranks compared what they exchange; nothing was moved: ");
  }
}

at::Tensor row_of(const ExchangeStatement& own, bool has_met) {
  at::Tensor row = at::zeros({kNumColumns}, at::kLong);
  int64_t* values = row.mutable_data_ptr<int64_t>();
  values[kRefused] = own.is_refused;
  if (own.is_refused) return row;
  values[kDigest] = own.digest;
  values[kBucketBytes] = own.bucket_bytes;
  values[kWire] = static_cast<int64_t>(own.wire);
  // Over all ranks the sum is 0 where both ends of every pair have the same hash.
  const uint64_t sent = std::accumulate(own.sent_hashes.begin(), own.sent_hashes.end(), uint64_t{0});
  const uint64_t received = std::accumulate(own.received_hashes.begin(), own.received_hashes.end(), uint64_t{0});
  values[kHash] = static_cast<int64_t>(sent - received);
  values[kDeviceType] = own.device ? static_cast<int64_t>(own.device->type()) : -1;
  values[kHasMet] = has_met;
  return row;
}

// What all ranks said.
class Table {
 public:
  explicit Table(const at::Tensor& rows)
      : values_(rows.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>() + rows.numel()),
        num_columns_(static_cast<size_t>(rows.size(1))) {}

  size_t num_ranks() const { return values_.size() / num_columns_; }
  int64_t operator()(size_t rank, size_t column) const { return values_[rank * num_columns_ + column]; }

  std::vector<core::RankWire> wires() const {
    std::vector<core::RankWire> ranks;
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      const bool is_device = (*this)(rank, kWire) == static_cast<int64_t>(Wire::kDevice);
      ranks.push_back({is_device, (*this)(rank, kDeviceType), (*this)(rank, kHasMet) != 0});
    }
    return ranks;
  }

  bool any(Column column, int64_t value) const { return !ranks_where(column, std::equal_to<>(), value).empty(); }
  std::vector<std::string> ranks_with(Column column, int64_t value) const {
    return ranks_where(column, std::equal_to<>(), value);
  }
  // The ranks whose value is not the one that most of them have.
  std::vector<std::string> deviating(Column column) const {
    std::map<int64_t, size_t> counts;
    for (size_t rank = 0; rank < num_ranks(); ++rank) ++counts[(*this)(rank, column)];
    const auto has_fewer = [](const auto& left, const auto& right) { return left.second < right.second; };
    return ranks_where(column, std::not_equal_to<>(), std::ranges::max_element(counts, has_fewer)->first);
  }

 private:
  template <typename Compare>
  std::vector<std::string> ranks_where(Column column, Compare compare, int64_t value) const {
    std::vector<std::string> ranks;
    for (size_t rank = 0; rank < num_ranks(); ++rank) {
      if (compare((*this)(rank, column), value)) ranks.push_back(std::to_string(rank));
    }
    return ranks;
  }

  std::vector<int64_t> values_;
  size_t num_columns_;
};

// Collective: the pairs of ranks of which both ends have other hashes.
std::string unequal_pairs(c10d::ProcessGroup& group, const ExchangeStatement& own, const at::Device& device,
                          std::chrono::milliseconds timeout) {
  const int64_t num_ranks = group.getSize();
  if (num_ranks > kMaxNamedRanks) return "some ranks";
  at::Tensor row = at::empty({2 * num_ranks}, at::kLong);
  int64_t* values = row.mutable_data_ptr<int64_t>();
  std::ranges::copy(own.sent_hashes, values);
  std::ranges::copy(own.received_hashes, values + num_ranks);
  const Table table(gather(group, row, device, timeout));
  std::vector<std::string> pairs;
  for (int64_t from = 0; from < num_ranks; ++from) {
    for (int64_t to = 0; to < num_ranks; ++to) {
      if (table(from, to) != table(to, num_ranks + from)) pairs.push_back(c10::str("rank ", from, " to rank ", to));
    }
  }
  return listed(pairs);
}

}  // namespace

std::optional<at::Device> sending_device(c10d::ProcessGroup& group, const at::Device& own) {
  if (!own.is_cpu() && supports_coalescing(group, own.type())) return own;
  for (const c10::Device& device : group.getDeviceTypes()) {
    const c10::DeviceType type = device.type();
    if (type == at::kCPU || !c10::impl::hasDeviceGuardImpl(type) || !supports_coalescing(group, type)) continue;
    const c10::impl::VirtualGuardImpl guard(type);
    if (guard.deviceCount() > 0) return group.getBoundDeviceId().value_or(guard.getDevice());
  }
  return std::nullopt;
}

bool agree(const GroupPointer& group_pointer, const ExchangeStatement& own, const at::Device& device,
           std::chrono::milliseconds timeout) {
  c10d::ProcessGroup& group = *group_pointer;
  const at::Device gathers_on = device_of(group, device);
  const bool has_met = own.device && Meetings::instance().has(group_pointer, *own.device);
  const Table table(gather(group, row_of(own, has_met), gathers_on, timeout));
  if (own.is_refused) return false;
  const std::vector<std::string> refusers = table.ranks_with(kRefused, 1);
  TORCH_CHECK_VALUE(refusers.empty(), kExchange, ": refused by rank(s) ", listed(refusers),
                    ", where an error says why; nothing was moved");
  const std::vector<std::string> other_digests = table.deviating(kDigest);
  TORCH_CHECK_VALUE(other_digests.empty(), kExchange, ": rank(s) ", listed(other_digests),
                    " have another digest than most ranks: they mean another exchange; nothing was moved");
  const std::vector<std::string> other_buckets = table.deviating(kBucketBytes);
  TORCH_CHECK_VALUE(other_buckets.empty(), kExchange, ": rank(s) ", listed(other_buckets),
                    " have other bucket_bytes than most ranks; nothing was moved");
  const auto uses = [&](Wire wire) { return table.any(kWire, static_cast<int64_t>(wire)); };
  TORCH_CHECK_VALUE(!uses(Wire::kHost) || !uses(Wire::kDevice), kExchange,
                    ": some ranks have tensors on the CPU, others on a device from which the group sends without the "
                    "CPU; nothing was moved");
  uint64_t sum = 0;
  for (size_t rank = 0; rank < table.num_ranks(); ++rank) sum += static_cast<uint64_t>(table(rank, kHash));
  if (sum != 0) {
    TORCH_CHECK_VALUE(false, kExchange, ": what is sent is not what is expected, from ",
                      unequal_pairs(group, own, gathers_on, timeout), "; nothing was moved");
  }
  const core::DeviceMeeting meeting = core::decide_meeting(table.wires());
  std::vector<std::string> without;
  for (const int64_t rank : meeting.ranks_without) without.push_back(std::to_string(rank));
  TORCH_CHECK_VALUE(without.empty(), kExchange, ": rank(s) ", listed(without),
                    " have no device of the kind from which others send, and all ranks of the group must be connected; "
                    "nothing was moved");
  if (meeting.is_needed) {
    meet(group, *own.device);
    Meetings::instance().add(group_pointer, *own.device);
  }
  return true;
}

}  // namespace torchtitan_ext::dist
