// What of a list of tensors travels together when it is sent through buckets: the schedule of a coalesced broadcast.
//
// A message is one transfer. A tensor of at least `direct_bytes` has messages of its own, cut into equal pieces of at
// most `bucket_bytes`; smaller ones share a message, one behind the other, in the order of the list. A flight is
// messages of at most `bucket_bytes` together, so one bucket can hold any part of a flight that has to be copied.
//
// Example: tensors of 10, 300, 20 and 500 bytes, buckets of 256, direct from 128 on. Messages: 192 and 108 bytes of the
// second tensor, 256 and 244 of the fourth, and, when the list ends, the first and third together (10, a gap of 6, 20).
// Nothing but the sizes counts: whether a tensor is contiguous is known to one rank only, and every rank must make the
// same messages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace torchtitan_ext::core {

// Bytes [first_byte, first_byte + num_bytes) of a tensor, in row-major order, which lie at `message_bytes` in the
// message. `first_byte` is a multiple of kPieceBytes.
struct Segment {
  int64_t tensor = 0;
  int64_t first_byte = 0;
  int64_t num_bytes = 0;
  int64_t message_bytes = 0;

  bool operator==(const Segment&) const = default;
};

// `segments[first_segment, first_segment + num_segments)` of the schedule. `flight_bytes` is where it begins in its
// flight.
struct Message {
  int64_t first_segment = 0;
  int64_t num_segments = 0;
  int64_t num_bytes = 0;
  int64_t flight_bytes = 0;

  bool operator==(const Message&) const = default;
};

struct Flight {
  int64_t first_message = 0;
  int64_t num_messages = 0;
  int64_t num_bytes = 0;

  bool operator==(const Flight&) const = default;
};

struct Schedule {
  std::vector<Segment> segments;
  std::vector<Message> messages;
  std::vector<Flight> flights;
};

// Pieces of tensors are multiples of it and messages of a flight begin at multiples of it: no element is cut, no cache
// line is shared.
constexpr int64_t kPieceBytes = 64;
// Within a message: what the widest load of a GPU thread wants.
constexpr int64_t kSegmentAlignment = 16;

// The schedule for tensors of these sizes, of which those without bytes are left out. `bucket_bytes` is a positive
// multiple of kPieceBytes.
Schedule schedule_messages(std::span<const int64_t> tensor_bytes, int64_t bucket_bytes, int64_t direct_bytes);

}  // namespace torchtitan_ext::core
