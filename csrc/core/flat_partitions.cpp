#include "core/flat_partitions.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr std::string_view kWhere = "flat partitions";

void check_sizes(std::span<const Sizes> shapes) {
  for (const Sizes& shape : shapes) {
    for (const int64_t size : shape) TTE_CHECK(size >= 0, kWhere, "a tensor has the shape ", list_text(shape));
  }
}

// Adds the boxes of positions [begin, end), of which the first lies at `position` of a partition.
//
// The next box is as large as can be: from where it begins, whole steps of the outermost dim that begins there.
void add_boxes(const Sizes& shape, const Sizes& strides, Interval positions, size_t partition, int64_t position,
               std::vector<FlatBox>& boxes) {
  while (positions.begin < positions.end) {
    FlatBox box{Sizes(shape.size(), 0), shape, partition, position};
    int64_t rest = positions.begin;
    int64_t num_taken = 1;  // of a 0-d tensor
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      box.offsets[dim] = rest / strides[dim];
      rest %= strides[dim];
      const int64_t num_steps = positions.length() / strides[dim];
      if (rest == 0 && num_steps > 0) {
        box.sizes[dim] = std::min(num_steps, shape[dim] - box.offsets[dim]);
        num_taken = box.sizes[dim] * strides[dim];
        break;
      }
      box.sizes[dim] = 1;
    }
    boxes.push_back(std::move(box));
    positions.begin += num_taken;
    position += num_taken;
  }
}

void add_empty(const Sizes& shape, std::vector<FlatBox>& boxes) {
  if (num_elements(shape) == 0) boxes.push_back({Sizes(shape.size(), 0), shape, 0, 0});
}

}  // namespace

FlatBoxes joined_boxes(std::span<const Sizes> shapes, std::span<const int64_t> gaps, std::span<const int64_t> lengths) {
  check_sizes(shapes);
  TTE_CHECK(gaps.empty() || gaps.size() == shapes.size(), kWhere, "there are ", gaps.size(), " paddings for ",
            shapes.size(), " tensors");
  FlatBoxes found(shapes.size());
  size_t partition = 0;
  int64_t position = 0;
  const auto skip = [&](int64_t count, const auto& take) {
    while (count > 0) {
      TTE_CHECK(partition < lengths.size(), kWhere, "they have ", count, " elements too few");
      const int64_t num_here = std::min(count, lengths[partition] - position);
      take(num_here);
      count -= num_here;
      position += num_here;
      if (position == lengths[partition]) ++partition, position = 0;
    }
  };
  for (size_t tensor = 0; tensor < shapes.size(); ++tensor) {
    const Sizes strides = row_major_strides(shapes[tensor]);
    int64_t begin = 0;
    skip(num_elements(shapes[tensor]), [&](int64_t count) {
      add_boxes(shapes[tensor], strides, {begin, begin + count}, partition, position, found[tensor]);
      begin += count;
    });
    add_empty(shapes[tensor], found[tensor]);
    if (!gaps.empty()) {
      TTE_CHECK(gaps[tensor] >= 0, kWhere, "a padding has ", gaps[tensor], " elements");
      skip(gaps[tensor], [](int64_t) {});
    }
  }
  return found;
}

FlatBoxes dealt_boxes(std::span<const Sizes> shapes, std::span<const int64_t> lengths) {
  check_sizes(shapes);
  TTE_CHECK(!lengths.empty(), kWhere, "there are none");
  const int64_t num_partitions = static_cast<int64_t>(lengths.size());
  FlatBoxes found(shapes.size());
  int64_t position = 0;
  for (size_t tensor = 0; tensor < shapes.size(); ++tensor) {
    const Sizes strides = row_major_strides(shapes[tensor]);
    const int64_t count = num_elements(shapes[tensor]);
    const int64_t part = count / num_partitions + (count % num_partitions != 0);
    for (int64_t number = 0; number < num_partitions && number * part < count; ++number) {
      const Interval positions{number * part, std::min(count, number * part + part)};
      add_boxes(shapes[tensor], strides, positions, static_cast<size_t>(number), position, found[tensor]);
    }
    add_empty(shapes[tensor], found[tensor]);
    position += part;
  }
  for (size_t number = 0; number < lengths.size(); ++number) {
    TTE_CHECK(lengths[number] == position, kWhere, "that of rank ", number, " has ", lengths[number],
              " elements, expected ", position);
  }
  return found;
}

}  // namespace torchtitan_ext::core
