#include "core/index_order.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "core/element_hash.h"

namespace torchtitan_ext::core {
namespace {

// The least number whose square is at least `value`.
uint64_t ceil_sqrt(uint64_t value) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(value)));
  while (root * root < value) ++root;
  while (root > 0 && (root - 1) * (root - 1) >= value) --root;
  return root;
}

// One half of a number after a round, of which the other half is `other`. `count` is below 2^32.
inline uint64_t add_round(uint64_t half, uint64_t other, uint64_t key, uint64_t count) {
  const uint64_t sum = half + (((hash_word(key, other) >> 32) * count) >> 32);
  return sum >= count ? sum - count : sum;
}

}  // namespace

IndexOrder::IndexOrder(int64_t num_samples, uint64_t seed, uint64_t epoch) {
  if (num_samples < 0) {
    throw std::invalid_argument("IndexOrder: got num_samples=" + std::to_string(num_samples) + ", expected 0 or more");
  }
  num_samples_ = static_cast<uint64_t>(num_samples);
  const uint64_t root = std::max<uint64_t>(ceil_sqrt(num_samples_), 1);
  num_left_ = root + root % 2;
  num_right_ = std::max<uint64_t>((num_samples_ + num_left_ - 1) / num_left_, 1);
  const uint64_t key = hash_word(hash_word(seed, 0), epoch);
  for (size_t round = 0; round < kRounds; ++round) keys_[round] = hash_word(key, round);
}

void IndexOrder::permute(Lanes& numbers) const {
  Lanes left;
  Lanes right;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    left[lane] = numbers[lane] / num_right_;
    right[lane] = numbers[lane] % num_right_;
  }
  for (size_t round = 0; round < kRounds; round += 2) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      left[lane] = add_round(left[lane], right[lane], keys_[round], num_left_);
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
      right[lane] = add_round(right[lane], left[lane], keys_[round + 1], num_right_);
    }
  }
  for (size_t lane = 0; lane < kLanes; ++lane) numbers[lane] = left[lane] * num_right_ + right[lane];
}

void IndexOrder::indices_at(std::span<const int64_t> places, std::span<int64_t> indices) const {
  for (const int64_t place : places) {
    if (place < 0 || static_cast<uint64_t>(place) >= num_samples_) {
      throw std::out_of_range("IndexOrder: got place " + std::to_string(place) + " of " + std::to_string(num_samples_) +
                              " samples");
    }
  }
  for (size_t first = 0; first < places.size(); first += kLanes) {
    const size_t count = std::min(kLanes, places.size() - first);
    Lanes numbers{};
    for (size_t lane = 0; lane < count; ++lane) numbers[lane] = static_cast<uint64_t>(places[first + lane]);
    permute(numbers);
    for (size_t lane = 0; lane < count; ++lane) {
      uint64_t number = numbers[lane];
      while (number >= num_samples_) {
        Lanes walking{number};
        permute(walking);
        number = walking[0];
      }
      indices[first + lane] = static_cast<int64_t>(number);
    }
  }
}

}  // namespace torchtitan_ext::core
