#include "core/bucket.h"

#include <algorithm>

namespace torchtitan_ext::core {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void add_message(Schedule& schedule, std::span<const Segment> segments, int64_t bucket_bytes) {
  Message message;
  message.first_segment = static_cast<int64_t>(schedule.segments.size());
  message.num_segments = static_cast<int64_t>(segments.size());
  message.num_bytes = segments.back().message_bytes + segments.back().num_bytes;
  schedule.segments.insert(schedule.segments.end(), segments.begin(), segments.end());

  std::vector<Flight>& flights = schedule.flights;
  const int64_t begin = flights.empty() ? 0 : round_up(flights.back().num_bytes, kPieceBytes);
  if (flights.empty() || begin + message.num_bytes > bucket_bytes) {
    flights.push_back({static_cast<int64_t>(schedule.messages.size()), 1, message.num_bytes});
  } else {
    message.flight_bytes = begin;
    flights.back().num_messages += 1;
    flights.back().num_bytes = begin + message.num_bytes;
  }
  schedule.messages.push_back(message);
}

}  // namespace

Schedule schedule_messages(std::span<const int64_t> tensor_bytes, int64_t bucket_bytes, int64_t direct_bytes) {
  Schedule schedule;
  schedule.segments.reserve(tensor_bytes.size());
  std::vector<Segment> shared;
  int64_t shared_bytes = 0;
  for (size_t index = 0; index < tensor_bytes.size(); ++index) {
    const int64_t tensor = static_cast<int64_t>(index), num_bytes = tensor_bytes[index];
    if (num_bytes == 0) continue;
    if (num_bytes >= direct_bytes || num_bytes > bucket_bytes) {
      const int64_t num_pieces = (num_bytes + bucket_bytes - 1) / bucket_bytes;
      const int64_t piece_bytes = round_up((num_bytes + num_pieces - 1) / num_pieces, kPieceBytes);
      for (int64_t begin = 0; begin < num_bytes; begin += piece_bytes) {
        const Segment piece{tensor, begin, std::min(piece_bytes, num_bytes - begin), 0};
        add_message(schedule, {&piece, 1}, bucket_bytes);
      }
      continue;
    }
    int64_t begin = round_up(shared_bytes, kSegmentAlignment);
    if (begin + num_bytes > bucket_bytes) {
      add_message(schedule, shared, bucket_bytes);
      shared.clear();
      begin = 0;
    }
    shared.push_back({tensor, 0, num_bytes, begin});
    shared_bytes = begin + num_bytes;
  }
  if (!shared.empty()) add_message(schedule, shared, bucket_bytes);
  return schedule;
}

}  // namespace torchtitan_ext::core
