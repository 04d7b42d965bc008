// Which rank writes which shard of which key, and what each rank is told of it.
//
// One replica of each tensor is written: of a tensor on several meshes that of the mesh with the lowest rank, by ranks of
// all meshes where all are known to hold the same. Shards with one holder are settled; the others go, largest first, to the
// best of their holders by `Loads`.
// So ranks are balanced within the largest shard, and what little there is goes to as many hosts as can be. A shard that
// leaves its holders unequal all the same, such as an embedding that tensor parallel ranks all have, is then divided among
// them by rows, each piece a chunk of the metadata. Objects are written by the lowest rank that has them.
//
//   holders 0 and 1 have 6 kB each of their own, and a shard of 32 kB:    whole 38 + 6,    divided 22 + 22
//
// A rank is told, for each of its classes, the sharding order, where its chunks begin in the metadata's list, and
// whether it writes all keys of the class, none, or which of them; or which piece. It works out other boxes itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/agreement.h"
#include "core/loads.h"

namespace torchtitan_ext::core {

class WritePlan {
 public:
  // After `joint.agree`, which found no trouble; the table must outlive this.
  // Args:
  //   lowest_only: every shard goes to its lowest holder;
  //   lowest_keys: so do these keys, in increasing order;
  //   hosts: per rank the number of its host; none where each rank has one for itself;
  //   equal_keys: keys of tensors that are equal on several meshes, in increasing order (`ReplicaDigests`);
  //   may_divide: whether shards may be written in pieces.
  WritePlan(const JointTable& joint, bool lowest_only, const std::vector<uint32_t>& lowest_keys,
            std::vector<uint32_t> hosts = {}, const std::vector<uint32_t>& equal_keys = {}, bool may_divide = true);

  // What `rank` is told.
  std::string decision(int64_t rank) const;
  // The shards of each key of a class, which are written.
  static const std::vector<HeldShard>& written_shards(const KeyClass& of_keys);
  // The chunks of each key of a class in the metadata: the boxes of one shard after the other, or its pieces.
  std::vector<Chunk> written_boxes(uint32_t of_class) const;
  // Keys of which some rank writes more than one box.
  std::vector<uint32_t> keys_of_several_boxes() const;
  // Bytes that each rank writes.
  const std::vector<int64_t>& load_bytes() const { return loads_.rank_bytes(); }

 private:
  // Keys of one class, as positions in it, whose shard, or a piece of it, one rank writes; all where `keys` is empty.
  struct Batch {
    uint32_t of_class = 0;
    size_t shard = 0;
    std::vector<uint32_t> keys;
    std::optional<size_t> piece;
  };
  // Keys of one class whose shard has several holders.
  struct Choice {
    int64_t num_bytes;  // of one of the keys
    uint32_t of_class;
    size_t shard;
    const std::vector<uint32_t>* keys;
    const std::vector<int64_t>* ranks;
  };
  // How the keys of a section fall into classes, equal for all ranks of a group.
  struct SectionPlan {
    std::vector<uint32_t> classes;
    std::string bytes;
    std::vector<std::vector<uint32_t>> local_positions;  // per class: of its keys, where they stand among them here
  };

  void assign(uint32_t of_class, size_t shard, std::vector<uint32_t> keys, const std::vector<int64_t>& ranks,
              int64_t num_bytes);
  void divide_uneven(const std::vector<Choice>& choices);
  void divide(const Choice& choice, std::vector<std::pair<int64_t, int64_t>> holders, int64_t mean_bytes);
  void number_chunks();
  SectionPlan plan_section(const Section& section) const;

  const JointTable& joint_;
  Loads loads_;
  std::vector<std::vector<Batch>> batches_;                           // per rank
  std::map<std::pair<uint32_t, size_t>, std::vector<Chunk>> pieces_;  // of a class and shard that is divided
  std::vector<std::vector<size_t>> first_chunks_;                     // per class and shard
  std::vector<uint32_t> position_in_class_;                           // per key
  std::vector<SectionPlan> section_plans_;
};

// What one rank writes of the keys of one class.
struct ClassWrites {
  size_t section = 0;
  std::vector<ShardStep> steps;
  size_t first_chunk = 0;
  std::vector<uint32_t> keys;  // positions in the section
  // Of a tensor that states its own boxes, and of a divided shard: those that are written, and where they stand in the
  // metadata.
  std::vector<std::pair<size_t, Chunk>> boxes;
};

// Reads a decision on the rank, which knows the kind of each of its keys per section. Throws WireError.
std::vector<ClassWrites> read_decision(std::string_view bytes, const std::vector<std::vector<uint32_t>>& kind_of);

}  // namespace torchtitan_ext::core
