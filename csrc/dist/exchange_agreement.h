// What ranks compare before a byte of an exchange moves. A message that is longer than its receiver expects ends the
// receiver's process on gloo, and a shorter one leaves undefined bytes; a rank that does not come holds up all others.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace torchtitan_ext::dist {

using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

// How boxes travel: through the host's memory or from device to device.
enum class Wire : int64_t { kNone, kHost, kDevice };

// What one rank says. The hashes are those of core::hash_pairs.
struct ExchangeStatement {
  bool is_refused = false;  // by this rank; then the rest is not looked at
  int64_t digest = 0;
  int64_t bucket_bytes = 0;
  Wire wire = Wire::kNone;
  std::optional<at::Device> device;  // of this rank, from which the group sends without the host
  std::vector<uint64_t> sent_hashes;
  std::vector<uint64_t> received_hashes;
};

// The device of this rank from which the group sends without the host: `own` where it is one, else the one that is bound
// to the group or current; none where the group or this rank has no such device.
std::optional<at::Device> sending_device(c10d::ProcessGroup& group, const at::Device& own);

// Collective. Returns where all ranks take part and agree. Else throws on all of them: ValueError, or DistBackendError
// where a rank is lost. On a rank that refused it returns false: the rank says why. `timeout` is kNoTimeout or the time
// to wait for others; `device` that of the rank's tensors.
bool agree(const GroupPointer& group, const ExchangeStatement& own, const at::Device& device,
           std::chrono::milliseconds timeout);

}  // namespace torchtitan_ext::dist
