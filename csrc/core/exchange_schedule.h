// Who sends which boxes to whom, in which messages and in which order: the schedule of an exchange between the ranks of
// a group. Every rank computes its own part; nothing but the sizes of boxes counts, so both ends of a pair cut them into
// the same messages.
//
// Steps. In step (k, i) rank r sends flight i of what it has for rank r + k, and receives flight i of what rank r - k has
// for it (modulo the number of ranks). All ranks go through the steps in the order of (k, i) and begin the next ones
// while some are under way. So the first step that is unfinished anywhere is under way on both ends of each of its
// flights: it will be finished, and nobody waits in a circle.
//
// Example: 3 ranks, each with two flights for each other rank. Rank 0: (1, 0) to 1 and from 2, (1, 1) the same, (2, 0)
// to 2 and from 1, (2, 1) the same.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/bucket.h"

namespace torchtitan_ext::core {

// A box of one of a rank's tensors, in elements, and the rank of the group that it goes to or comes from. `dtype` is that
// of the elements on the wire, or -1 for the tensor's own. Views into the table.
struct ExchangeBox {
  int64_t peer = 0;
  size_t tensor = 0;
  int64_t dtype = -1;
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
};

// Reads a table `peer, tensor, dtype, num_dims, offsets..., sizes...` of boxes, sorted by peer. `shapes` are those of the
// tensors. Throws std::invalid_argument, which begins with `where`, for what is no such table: a peer that is no rank, a
// box that reaches out of its tensor, ...
std::vector<ExchangeBox> read_exchange_boxes(std::span<const int64_t> table,
                                             std::span<const std::span<const int64_t>> shapes, int64_t num_ranks,
                                             std::string_view where);

// Bytes of one box, and the rank at the other end.
struct PeerBytes {
  int64_t peer = 0;
  int64_t num_bytes = 0;
};

// What goes to one rank, or comes from it. `Segment::tensor` is a position in the list of all boxes of the direction.
struct PairSchedule {
  int64_t peer = 0;
  Schedule schedule;
};

struct PairFlight {
  size_t pair = 0;
  size_t flight = 0;

  bool operator==(const PairFlight&) const = default;
};

struct ExchangeStep {
  std::optional<PairFlight> send;
  std::optional<PairFlight> receive;

  bool operator==(const ExchangeStep&) const = default;
};

struct ExchangeSchedule {
  std::vector<PairSchedule> sends;
  std::vector<PairSchedule> receives;
  std::vector<ExchangeStep> steps;
};

// Both lists are sorted by peer; boxes of `rank` itself are left out. `flight_bytes` is a positive multiple of
// kPieceBytes.
ExchangeSchedule schedule_exchange(int64_t rank, int64_t num_ranks, std::span<const PeerBytes> sends,
                                   std::span<const PeerBytes> receives, int64_t flight_bytes, int64_t direct_bytes);

// For each rank a hash of what goes from `rank` to it (`is_sender`) or comes from it to `rank`: of both ranks and of the
// sizes of the boxes in their order. 0 where nothing does. Both ends of a pair find the same value.
std::vector<uint64_t> hash_pairs(int64_t rank, int64_t num_ranks, std::span<const PeerBytes> boxes, bool is_sender);

// How the messages of a rank travel, as it tells the others before the first one moves.
struct RankWire {
  bool is_device = false;    // from device to device
  int64_t device_type = -1;  // from which the group sends without the host, and of which the rank has one; -1 for none
  bool has_met = false;      // on its device, through this group
};

// A backend for devices connects all ranks of a group in the first call that they make, which all must make: a rank that
// has nothing to send or receive would hold up the others. So where some rank's messages travel from device to device,
// all ranks meet in one collective first, once on each device.
struct DeviceMeeting {
  bool is_needed = false;
  std::vector<int64_t> ranks_without;  // a device of the kind from which others send: they cannot come
};
DeviceMeeting decide_meeting(std::span<const RankWire> ranks);

}  // namespace torchtitan_ext::core
