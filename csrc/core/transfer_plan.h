// Which rank sends which boxes of which tensors to whom, when a state changes its layout in memory.
//
// The tables of the source and of the target are two worlds with the same ranks. Keys whose source keys are of one class
// and whose targets are of one class are a *pair*: what holds for one of them holds for all, so the boxes are worked out
// once per pair, as a flow (`flow.h`).
//
//   source  w1, w2: rows on ranks 0, 1          target  w1, w2: columns on ranks 2, 3        one pair, 4 boxes:
//                                                       0 -> 2, 0 -> 3, 1 -> 2, 1 -> 3, each for w1 and for w2
//
// A key of the target may be made of several keys of the source by a map (`tensor_map.h`). Such keys are a pair where the
// maps are equal, and the keys that each takes are of the same classes.
//
// A rank is told its boxes, per pair, with the positions of the pair's keys in its own table. Both ends of a transfer
// count boxes in the same order: by pair, by key, by wanted box, by held box.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/agreement.h"
#include "core/boxes.h"
#include "core/loads.h"
#include "core/tensor_map.h"

namespace torchtitan_ext::core {

// What keys of a pair are made of.
struct PairSource {
  uint32_t key_class = 0;
  // Ranks that hold keys of the class and whose copies are not taken, in increasing order.
  std::vector<int64_t> distrusted;

  auto operator<=>(const PairSource&) const = default;
};

// Keys by their numbers in the two worlds: `target_keys[i]` is filled from `source_keys[i]`, or by a map from as many keys
// as there are `sources`, `source_keys[i * sources.size()]` the first of them.
struct TransferPair {
  std::vector<PairSource> sources;
  uint32_t target_class = 0;
  int64_t cast_to = -1;  // the number of the dtype to which the sender converts, or -1
  std::vector<uint32_t> source_keys;
  std::vector<uint32_t> target_keys;
  std::shared_ptr<const TensorMap> map;  // over `sources`; none where a key is what one key of the source is
};

// A key of the target that a map makes of keys of the source, which the map has by their numbers.
struct MappedKey {
  uint32_t key = 0;
  TensorMap map;
  int64_t cast_to = -1;
};

// The pairs, in the order of the lowest target key of each. Args:
//   source_of: per key of the target the key of the source, or JointTable::kNoClass for one that is not filled, or by a map;
//   mapped: keys that are filled by maps;
//   distrusted: of keys of the source the ranks whose copies are not taken, in increasing order.
std::vector<TransferPair> pair_keys(const JointTable& source, const JointTable& target,
                                    const std::vector<uint32_t>& source_of, const std::vector<MappedKey>& mapped = {},
                                    const std::map<uint32_t, std::vector<int64_t>>& distrusted = {});

class TransferPlan {
 public:
  // After `agree` of both worlds, which found no trouble; the worlds must outlive this.
  // Args:
  //   pairs: of equal global shapes, but for those with a map;
  //   hosts: per rank the number of its host.
  TransferPlan(const JointTable& source, const JointTable& target, std::vector<TransferPair> pairs,
               std::vector<uint32_t> hosts);

  // What a rank sends, and what it receives, for `expand_transfers`.
  const std::string& sends(int64_t rank) const { return sends_.at(static_cast<size_t>(rank)); }
  const std::string& receives(int64_t rank) const { return receives_.at(static_cast<size_t>(rank)); }
  // Bytes from each rank to each other rank, and to itself, where there are any.
  const std::map<std::pair<int64_t, int64_t>, int64_t>& bytes_between() const { return bytes_between_; }
  // What a rank fills itself, for `expand_fills`.
  const std::string& fills(int64_t rank) const { return fills_.at(static_cast<size_t>(rank)); }

 private:
  struct Side;
  void plan_pair(const TransferPair& pair, Side& source_side, Side& target_side, Side& filled_side);

  const JointTable& source_;
  const JointTable& target_;
  Loads sent_;  // to other ranks
  std::vector<std::string> sends_;
  std::vector<std::string> receives_;
  std::map<std::pair<int64_t, int64_t>, int64_t> bytes_between_;
  std::vector<std::string> fills_;
};

// One side of an exchange of boxes: per box peer, tensor, cast_to, number of dims, offsets, sizes; by peer. What is no box
// of a tensor is a box of a view, which counts as a tensor behind those of the rank.
struct BoxTable {
  struct View {
    int64_t tensor = 0;
    Sizes sizes;
    BoxView view;
  };
  std::vector<int64_t> entries;
  std::vector<View> views;
  std::vector<int64_t> changed;  // the numbers of boxes that a map or a cast changes, the same boxes on both sides
  std::map<int64_t, int64_t> bytes_of_peer;
};

// Writes out, key by key, what a rank was told. Throws WireError.
// Args:
//   first_tensor: per position in the rank's table its tensor, or -1 for none. A tensor that states its own boxes is one
//     tensor per box, of which this is the first;
//   num_tensors: of the rank.
BoxTable expand_transfers(std::string_view bytes, const std::vector<int64_t>& first_tensor, int64_t num_tensors);

// What a rank fills with values of the map's own, with the tensor of each. Throws WireError.
std::vector<std::pair<int64_t, MapFill>> expand_fills(std::string_view bytes, const std::vector<int64_t>& first_tensor);

}  // namespace torchtitan_ext::core
