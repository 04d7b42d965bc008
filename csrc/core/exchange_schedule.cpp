#include "core/exchange_schedule.h"

#include <algorithm>
#include <map>

#include "core/check.h"
#include "core/element_hash.h"

namespace torchtitan_ext::core {
namespace {

constexpr size_t kHeadSize = 4;  // peer, tensor, dtype, num_dims

// The schedules of all pairs but that of `rank` with itself.
std::vector<PairSchedule> schedule_pairs(int64_t rank, std::span<const PeerBytes> boxes, int64_t flight_bytes,
                                         int64_t direct_bytes) {
  std::vector<PairSchedule> pairs;
  std::vector<int64_t> sizes;
  for (size_t first = 0; first < boxes.size();) {
    const int64_t peer = boxes[first].peer;
    sizes.clear();
    for (size_t box = first; box < boxes.size() && boxes[box].peer == peer; ++box) {
      sizes.push_back(boxes[box].num_bytes);
    }
    if (peer != rank) {
      Schedule schedule = schedule_messages(sizes, flight_bytes, direct_bytes);
      for (Segment& segment : schedule.segments) segment.tensor += static_cast<int64_t>(first);
      pairs.push_back({peer, std::move(schedule)});
    }
    first += sizes.size();
  }
  return pairs;
}

}  // namespace

std::vector<ExchangeBox> read_exchange_boxes(std::span<const int64_t> table,
                                             std::span<const std::span<const int64_t>> shapes, int64_t num_ranks,
                                             std::string_view where) {
  std::vector<ExchangeBox> boxes;
  while (!table.empty()) {
    TTE_CHECK(table.size() >= kHeadSize, where, "the table ends within box ", boxes.size());
    const int64_t peer = table[0], tensor = table[1], dtype = table[2], num_dims = table[3];
    table = table.subspan(kHeadSize);
    TTE_CHECK(peer >= 0 && peer < num_ranks, where, "box ", boxes.size(), " has peer ", peer,
              ", expected a rank of the group, 0 to ", num_ranks - 1);
    TTE_CHECK(boxes.empty() || boxes.back().peer <= peer, where, "box ", boxes.size(), " has peer ", peer,
              ", the one before it ", boxes.back().peer, "; sort them by peer");
    TTE_CHECK(tensor >= 0 && tensor < static_cast<int64_t>(shapes.size()), where, "box ", boxes.size(),
              " is of tensor ", tensor, ", expected a position in a list of ", shapes.size());
    const std::span<const int64_t> shape = shapes[tensor];
    TTE_CHECK(num_dims == static_cast<int64_t>(shape.size()), where, "box ", boxes.size(), " has ", num_dims,
              " dims, its tensor has ", shape.size());
    TTE_CHECK(table.size() >= 2 * shape.size(), where, "the table ends within box ", boxes.size());
    const std::span<const int64_t> offsets = table.first(shape.size());
    const std::span<const int64_t> sizes = table.subspan(shape.size(), shape.size());
    table = table.subspan(2 * shape.size());
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      TTE_CHECK(
          offsets[dim] >= 0 && sizes[dim] >= 0 && sizes[dim] <= shape[dim] && offsets[dim] <= shape[dim] - sizes[dim],
          where, "box ", boxes.size(), " begins at ", offsets[dim], " and has ", sizes[dim], " of the ", shape[dim],
          " elements of dim ", dim);
    }
    boxes.push_back({peer, static_cast<size_t>(tensor), dtype, offsets, sizes});
  }
  return boxes;
}

ExchangeSchedule schedule_exchange(int64_t rank, int64_t num_ranks, std::span<const PeerBytes> sends,
                                   std::span<const PeerBytes> receives, int64_t flight_bytes, int64_t direct_bytes) {
  ExchangeSchedule exchange;
  exchange.sends = schedule_pairs(rank, sends, flight_bytes, direct_bytes);
  exchange.receives = schedule_pairs(rank, receives, flight_bytes, direct_bytes);
  std::map<std::pair<int64_t, size_t>, ExchangeStep> steps;
  for (size_t pair = 0; pair < exchange.sends.size(); ++pair) {
    const int64_t distance = (exchange.sends[pair].peer - rank + num_ranks) % num_ranks;
    const size_t num_flights = exchange.sends[pair].schedule.flights.size();
    for (size_t flight = 0; flight < num_flights; ++flight) steps[{distance, flight}].send = PairFlight{pair, flight};
  }
  for (size_t pair = 0; pair < exchange.receives.size(); ++pair) {
    const int64_t distance = (rank - exchange.receives[pair].peer + num_ranks) % num_ranks;
    const size_t num_flights = exchange.receives[pair].schedule.flights.size();
    for (size_t flight = 0; flight < num_flights; ++flight) {
      steps[{distance, flight}].receive = PairFlight{pair, flight};
    }
  }
  exchange.steps.reserve(steps.size());
  for (const auto& [place, step] : steps) exchange.steps.push_back(step);
  return exchange;
}

std::vector<uint64_t> hash_pairs(int64_t rank, int64_t num_ranks, std::span<const PeerBytes> boxes, bool is_sender) {
  std::vector<uint64_t> hashes(static_cast<size_t>(num_ranks), 0);
  for (const PeerBytes& box : boxes) {
    uint64_t& hash = hashes[static_cast<size_t>(box.peer)];
    if (hash == 0) {
      hash = extended_hash(extended_hash(1, is_sender ? rank : box.peer), is_sender ? box.peer : rank);
    }
    hash = extended_hash(hash, box.num_bytes);
  }
  return hashes;
}

DeviceMeeting decide_meeting(std::span<const RankWire> ranks) {
  DeviceMeeting meeting;
  const auto sender = std::ranges::find_if(ranks, &RankWire::is_device);
  if (sender == ranks.end()) return meeting;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].device_type != sender->device_type) meeting.ranks_without.push_back(static_cast<int64_t>(rank));
    meeting.is_needed |= !ranks[rank].has_met;
  }
  return meeting;
}

}  // namespace torchtitan_ext::core
