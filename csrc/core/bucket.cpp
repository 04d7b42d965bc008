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

// Where the inner dims of [dim, num_dims) hold `inner` elements per index of `dim`.
struct RangeCopy {
  RunList& runs;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  int64_t item_bytes;
  int64_t buffer_bytes;  // where the next element lies in the buffer
  bool to_buffer;
  std::vector<int64_t> contiguous;

  void append(size_t dim, int64_t address, int64_t first, int64_t last) {
    if (first == last) return;
    if (dim == sizes.size()) return append_box({}, {}, address, 1);
    int64_t inner = 1;
    for (size_t index = dim + 1; index < sizes.size(); ++index) inner *= sizes[index];
    const int64_t step_bytes = strides[dim] * item_bytes;
    const int64_t first_row = first / inner, last_row = last / inner;
    if (first_row == last_row) return append(dim + 1, address + first_row * step_bytes, first % inner, last % inner);
    int64_t row = first_row;
    if (first % inner != 0) {
      append(dim + 1, address + row * step_bytes, first % inner, inner);
      ++row;
    }
    if (row < last_row) {
      std::vector<int64_t> box(sizes.begin() + dim, sizes.end());
      box[0] = last_row - row;
      append_box(box, strides.subspan(dim), address + row * step_bytes, box[0] * inner);
    }
    append(dim + 1, address + last_row * step_bytes, 0, last % inner);
  }

  void append_box(std::span<const int64_t> box, std::span<const int64_t> box_strides, int64_t address, int64_t count) {
    contiguous.resize(box.size());
    int64_t stride = 1;
    for (size_t dim = box.size(); dim-- > 0;) {
      contiguous[dim] = stride;
      stride *= box[dim];
    }
    const BoxSide tensor{address, box_strides}, buffer{buffer_bytes, contiguous};
    runs.append_box(box, to_buffer ? tensor : buffer, to_buffer ? buffer : tensor, item_bytes);
    buffer_bytes += count * item_bytes;
  }
};

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

void append_range(RunList& runs, const Memory& tensor, int64_t buffer_address, int64_t first, int64_t last,
                  bool to_buffer) {
  RangeCopy copy{runs, tensor.sizes, tensor.strides, tensor.item_bytes, buffer_address, to_buffer, {}};
  copy.append(0, static_cast<int64_t>(tensor.address), first, last);
}

}  // namespace torchtitan_ext::core
