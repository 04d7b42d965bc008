// Weighted sums of what places of memory hold one after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "storage/casts.h"

namespace torchtitan_ext::storage {

// Memory of elements of one dtype, one behind the other.
struct SumPlace {
  uintptr_t address = 0;
  int64_t num_bytes = 0;
  std::string dtype;
};

// begin, then for each summand: the caller fills the places, and add; then round. The memory of the sums is kept.
class WeightedSums {
 public:
  explicit WeightedSums(bool in_float64) : in_float64_(in_float64) {}

  // Throws std::invalid_argument for a dtype that find_weighted_sum does not know.
  void begin(std::span<const SumPlace> places);
  void add(double weight);
  // Writes the sums into the places. Returns, by the numbers of places, a finite sum that became infinite in each.
  std::vector<std::pair<int64_t, double>> round();

 private:
  struct Item {
    char* place;
    int64_t count;
    const WeightedSum* sum;
    int64_t begin;  // of its sums, in bytes
  };

  bool in_float64_;
  bool is_first_ = true;
  std::vector<Item> items_;
  std::unique_ptr<char[]> sums_;
  int64_t sums_bytes_ = 0;
};

}  // namespace torchtitan_ext::storage
