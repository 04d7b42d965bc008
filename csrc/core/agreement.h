// What all ranks' key tables say together: worked out per class of keys, never per key and rank.
//
// Ranks whose columns have equal bytes are a group, decoded once. Keys that the same groups hold in the same kinds,
// with the same local sizes, are a *class*: what holds for one of them holds for all. FSDP2 over TP has as many classes
// as kinds; pipeline stages and keys that a rank has for itself are groups, and so classes, of their own.
//
//   ranks 0..7   columns A:  w1 kind 0, w2 kind 0, b kind 1, step kind 2        classes:  {w1, w2}  A/0 B/0
//   rank  8      columns B:  w1 kind 0, w2 kind 0, step kind 1, rank_8 kind 1             {b}       A/1
//                                                                                        {step}    A/2 B/1   ...
//
// Ranks are positions in the order in which they were added; a mesh has global ranks of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/cover.h"
#include "core/key_columns.h"

namespace torchtitan_ext::core {

// A shard and the ranks that hold it alike, in increasing order.
struct HeldShard {
  std::vector<int64_t> ranks;
  std::vector<Chunk> boxes;
};

// One complete tensor, as the shards that make it up.
struct Replica {
  std::vector<ShardStep> steps;  // the true sharding order; none for plain tensors
  bool is_foreseen = true;       // the order is what a rank takes its placements to mean
  std::vector<int64_t> ranks;    // all of its ranks, those with an empty shard too
  std::vector<HeldShard> shards;
};

// Why a class of keys is refused; problems.h makes sentences of it.
struct Trouble {
  enum class Code {
    kType,      // ranks `first` and `second` hold other types,
    kDtype,     // dtypes
    kShape,     // or global shapes
    kNoMatch,   // no reading fits what rank `second` holds; `first` is the lowest rank of the mesh
    kInDoubt,   // two readings fit all ranks, and differ for rank `second`
    kInvalid,   // the layout makes no sense: `message`
    kAbsent,    // ranks of the mesh did not report: the first of them are in `absent`, as global ranks
    kNotExact,  // shards do not cover the tensor exactly once: `defect`, whose chunks are `chunks`, held by `owners`
  };
  Code code = Code::kInvalid;
  int64_t first = 0;  // where the code needs none, the lowest rank
  int64_t second = 0;
  Resolution resolution;
  std::string message;
  std::vector<int64_t> absent;
  CoverDefect defect;
  std::vector<Chunk> chunks;
  std::vector<int64_t> owners;
};

// Where one rank has the keys of a class: the columns, and the kind in them.
struct Member {
  int64_t rank = 0;
  uint32_t section = 0;
  uint32_t kind = 0;
};

struct KeyClass {
  std::vector<uint32_t> keys;     // in increasing order
  std::vector<Member> members;    // in increasing order of ranks
  bool is_plain = false;          // every rank holds all of the tensor: one replica stands for those of all ranks
  std::vector<Replica> replicas;  // none for objects
  std::optional<Trouble> trouble;
  // Of tensors that state their boxes: what each member stated.
  std::vector<const std::vector<Chunk>*> stated;
  // Ranks whose local sizes are not those of their kind.
  std::map<int64_t, const Sizes*> unusual;
};

// The columns of a group of ranks.
struct Section {
  KeyColumns columns;
  std::vector<uint32_t> keys;   // number of each key among those of all ranks
  std::vector<uint32_t> kinds;  // the same of each kind
  std::vector<int64_t> ranks;
};

// A kind of any rank, with numbers that are equal for equal parts.
struct NumberedKind {
  Kind kind;
  MeshForm mesh;
  uint32_t traits = 0;  // type, dtype, shape
  uint32_t layout = 0;  // mesh, placements, order
};

// The key tables of all ranks that save or load, put together.
class JointTable {
 public:
  // The number of the columns; equal bytes are worth one call. Throws WireError.
  size_t add_section(std::string_view bytes);
  // The next rank. Its part belongs to the first of its sections; the others have no mesh and no boxes.
  // Throws WireError, or std::out_of_range for an unknown section.
  void add_rank(std::vector<size_t> sections, std::string_view part);
  // Fills `classes`. With `needs_all_ranks` each rank of a mesh must be here, and shards must cover their tensors.
  void agree(bool needs_all_ranks);

  size_t num_ranks() const { return parts_.size(); }
  size_t num_keys() const { return names_.size(); }
  std::string_view name(uint32_t key) const { return names_[key]; }
  // The section and the form of a key's path on the lowest rank that has one; form 0 for none.
  std::pair<uint32_t, uint32_t> path(uint32_t key) const { return paths_[key]; }
  const std::vector<Section>& sections() const { return sections_; }
  const std::vector<size_t>& sections_of(int64_t rank) const { return sections_of_[static_cast<size_t>(rank)]; }
  const std::vector<KeyClass>& classes() const { return classes_; }
  uint32_t class_of(uint32_t key) const { return class_of_[key]; }  // kNoClass for a key that nobody holds
  // Whether some rank holds the key, and all that do agree on it.
  bool is_agreed(uint32_t key) const { return class_of(key) != kNoClass && !classes_[class_of(key)].trouble; }
  const NumberedKind& kind_of(const Member& member) const {
    return kinds_[sections_[member.section].kinds[member.kind]];
  }
  // The lowest member's: what all of a class without trouble agree on.
  const Kind& kind_of(const KeyClass& of_keys) const { return kind_of(of_keys.members.front()).kind; }
  // Of the meshes of all ranks; see axes_of.
  std::vector<std::pair<std::string, int64_t>> axes() const;
  const Standing& standing(const Member& member) const;
  const Sizes& local_sizes(const KeyClass& of_keys, const Member& member) const;

  static constexpr uint32_t kNoClass = UINT32_MAX;

 private:
  uint32_t number_of_kind(const Kind& kind, const KeyColumns& columns);
  void divide_into_classes();
  void agree_on(KeyClass& of_keys, bool needs_all_ranks) const;
  std::optional<Trouble> agree_on_boxes(KeyClass& of_keys, bool needs_all_ranks) const;
  std::optional<Trouble> agree_on_layouts(KeyClass& of_keys, bool needs_all_ranks) const;
  std::optional<Trouble> decide(const KeyClass& of_keys, const std::vector<Member>& members, bool needs_all_ranks,
                                Replica& replica) const;

  std::vector<Section> sections_;
  std::vector<RankPart> parts_;
  std::vector<std::vector<size_t>> sections_of_;
  std::deque<std::string> names_;  // a deque: views into it stay
  std::unordered_map<std::string_view, uint32_t> numbers_;
  std::vector<std::pair<uint32_t, uint32_t>> paths_;
  std::deque<NumberedKind> kinds_;
  std::unordered_map<std::string, uint32_t> kind_numbers_;
  std::unordered_map<std::string, uint32_t> traits_numbers_;
  std::unordered_map<std::string, uint32_t> layout_numbers_;
  std::vector<KeyClass> classes_;
  std::vector<uint32_t> class_of_;
};

// Name and size of each axis of meshes; where meshes share a name that of the mesh with more axes counts.
//
// With an axis "pp" for the stages of a pipeline. A stage's tensors lie on a mesh of its own, which does not know of the
// others: stages are told from the ranks, where these hold different keys in groups as large as the mesh. Groups of
// experts that hold keys of their own in the same way, and none that are everybody's, look alike.
// Args:
//   meshes: those of all stages are one;
//   held: per rank what stands for the keys that it holds on meshes, equal for equal keys; none for no stages.
//
// Example: a mesh dp 4, and 8 ranks of which the first 4 hold the same and the others the same: pp 2, dp 4.
std::vector<std::pair<std::string, int64_t>> axes_of(std::vector<MeshForm> meshes, std::span<const size_t> held);

// Shards of equal boxes, of all replicas: per set of boxes the shards that have them, in the order of replicas.
std::vector<std::vector<const HeldShard*>> equal_shards(const KeyClass& of_keys);

// The parts of a path, as a form cuts the key. Throws WireError where it does not fit.
std::vector<std::string_view> cut_path(std::string_view name, const PathForm& form);

// All ranks of a mesh in row-major order are origin + sum of stride x coordinate, or as listed.
int64_t rank_at(const MeshForm& mesh, int64_t origin, std::span<const int64_t> coordinate);

}  // namespace torchtitan_ext::core
