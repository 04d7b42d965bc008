#include "storage/weighted_sums.h"

#include "core/check.h"

namespace torchtitan_ext::storage {

void WeightedSums::begin(std::span<const SumPlace> places) {
  items_.clear();
  is_first_ = true;
  int64_t end = 0;
  for (const SumPlace& place : places) {
    const WeightedSum* const sum = find_weighted_sum(place.dtype, in_float64_);
    TTE_CHECK(sum != nullptr, "weighted sums", "of ", place.dtype, " are not known");
    const int64_t count = place.num_bytes / sum->item_bytes;
    items_.push_back({reinterpret_cast<char*>(place.address), count, sum, end});
    end += count * sum->sum_bytes;
  }
  if (end <= sums_bytes_) return;
  sums_.reset();  // before the new memory is there
  sums_ = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(end));
  sums_bytes_ = end;
}

void WeightedSums::add(double weight) {
  for (const Item& item : items_) {
    item.sum->add(sums_.get() + item.begin, item.place, item.count, weight, is_first_);
  }
  is_first_ = false;
}

std::vector<std::pair<int64_t, double>> WeightedSums::round() {
  std::vector<std::pair<int64_t, double>> lost;
  for (size_t number = 0; number < items_.size(); ++number) {
    const Item& item = items_[number];
    const char* const sum = item.sum->round(item.place, sums_.get() + item.begin, item.count);
    if (sum != nullptr) lost.emplace_back(number, item.sum->number(sum));
  }
  return lost;
}

}  // namespace torchtitan_ext::storage
