// The order of an epoch of any number of samples, in constant memory: a keyed permutation of 0 .. n - 1, of which any
// place can be asked at once.
//
// It is the generalized Feistel network of Black and Rogaway (Ciphers with Arbitrary Finite Domains, CT-RSA 2002,
// https://doi.org/10.1007/3-540-45760-7_9, there method 3), which permutes a * b numbers, and cycle walking (method 2)
// for those that are too many. As a shuffle such a network is known from Mitchell et al., Bandwidth-Optimal Random
// Shuffling for GPUs (https://doi.org/10.1145/3505287), from which the number of rounds is.
//
// Definition. a is the least even number with a * a >= n, b the least with a * b >= n. A place is split into
// left = place / b and right = place % b; 24 rounds change them in turn:
//
//     left  = (left  + f_i(right)) mod a      i = 0, 2, ..., 22        f_i(x) = high half of a hash of x under key i,
//     right = (right + f_i(left))  mod b      i = 1, 3, ..., 23                 scaled to 0 .. a - 1 or 0 .. b - 1
//
// and left * b + right is the index. If it is n or more, it is a place again. Each round can be undone, so different
// places have different numbers, and walking on from those that are too large ends at different ones. Fewer than a of
// the a * b numbers are too large, so few places walk. a is even, since rounds over odd a and b make even permutations
// only. With 24 rounds all n! orders of n = 2 to 7 samples are equally likely, as far as 2 million keys can tell.
//
// Example: n = 1,000: a = 32, b = 32; 24 of 1,024 numbers walk on.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace torchtitan_ext::core {

class IndexOrder {
 public:
  // Throws std::invalid_argument for a negative number of samples.
  IndexOrder(int64_t num_samples, uint64_t seed, uint64_t epoch);

  // The index at each place; `indices` has as many elements. Throws std::out_of_range for a place that is not in
  // 0 .. num_samples - 1.
  void indices_at(std::span<const int64_t> places, std::span<int64_t> indices) const;

 private:
  static constexpr size_t kRounds = 24;
  // Rounds wait for each other, places do not: a processor works on some of them at once.
  static constexpr size_t kLanes = 8;
  using Lanes = std::array<uint64_t, kLanes>;

  void permute(Lanes& numbers) const;

  uint64_t num_samples_;
  uint64_t num_left_;   // a
  uint64_t num_right_;  // b
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace torchtitan_ext::core
