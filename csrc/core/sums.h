// Sums over the elements of tensors: what fingerprints consist of, and what proves loads and copies.
//
// The sum of a box is that of the hashes of its elements (element_hash.h), modulo 2^64. A rank has one sum of its shard
// of a tensor, or one per box where the tensor states its own boxes. What the ranks of a replica hold adds up, and a box
// that several of them hold counts once:
//
//   rank  replica  box  sum
//   0     "a"      -    3      replica "a" is 7: each rank has a part of it
//   1     "a"      -    4
//   2     ""       -    7      rank 2 has all of it alone
//   3     "b"      x    5      on rank 3 "b" is 7, with box y of rank 4;
//   4     "b"      x    6      on rank 4 it is 8: the two do not hold the same in box x
//   4     "b"      y    2
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

class SumTable {
 public:
  using Box = std::optional<std::pair<Sizes, Sizes>>;  // offsets and sizes; none for the whole of a shard
  // What one rank holds of a tensor.
  struct Part {
    std::string dtype;
    Sizes shape;  // of the global tensor
    std::string replica;
    std::map<Box, uint64_t> sums;  // none where the rank holds empty boxes only
  };

  // What a rank holds of a key; a table of one rank has it once.
  void add_key(const std::string& key, Part part);
  // The last part of a key. Throws std::out_of_range, as all that follow do where a key is not there.
  const Part& part(const std::string& key) const { return parts_[number_of_.at(key)].back(); }
  Part& part(const std::string& key) { return parts_[number_of_.at(key)].back(); }
  bool has(const std::string& key) const { return number_of_.contains(key); }
  const std::vector<std::string>& keys() const { return keys_; }  // in the order in which they came

  // Of the tables of ranks, in their order.
  static SumTable merge(const std::vector<const SumTable*>& of_ranks);
  // Each replica of a key as one part with all of it, in the order of their first ranks.
  std::vector<Part> replicas(const std::string& key) const;
  // Keys of which some replica has another sum; those that are not expected are passed over.
  std::vector<std::string> differing(const std::unordered_map<std::string, uint64_t>& expected) const;

  // Of one rank. `decode` throws WireError.
  std::string encode() const;
  static SumTable decode(std::string_view bytes);

 private:
  std::vector<std::string> keys_;
  std::vector<std::vector<Part>> parts_;  // per key
  std::unordered_map<std::string, size_t> number_of_;
};

}  // namespace torchtitan_ext::core
