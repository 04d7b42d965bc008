#include "core/agreement.h"

#include <algorithm>
#include <tuple>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

// As many as a sentence shows, and one to see that there are more.
constexpr size_t kMaxAbsent = 9;
constexpr size_t kMaxNamedChunks = 4;

template <typename Key>
uint32_t number(std::unordered_map<Key, uint32_t>& numbers, const Key& key) {
  return numbers.try_emplace(key, static_cast<uint32_t>(numbers.size())).first->second;
}

size_t linear_index(std::span<const int64_t> coordinate, const Sizes& shape) {
  size_t index = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    index = index * static_cast<size_t>(shape[axis]) + static_cast<size_t>(coordinate[axis]);
  }
  return index;
}

Sizes coordinate_of(size_t index, const Sizes& shape) {
  Sizes coordinate(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = static_cast<int64_t>(index % static_cast<size_t>(shape[axis]));
    index /= static_cast<size_t>(shape[axis]);
  }
  return coordinate;
}

// A tensor without elements is still a key: all ranks hold its one empty box.
void hold_empty_box(const Sizes& shape, Replica& replica) {
  if (num_elements(shape) == 0) {
    replica.shards = {{replica.ranks, {{Sizes(shape.size(), 0), shape, Sizes(shape.size(), 0)}}}};
  }
}

std::optional<Trouble> find_cover_trouble(const Sizes& shape, const std::vector<HeldShard>& shards) {
  std::vector<Chunk> chunks;
  std::vector<int64_t> owners;
  for (const HeldShard& shard : shards) {
    for (const Chunk& box : shard.boxes) {
      chunks.push_back(box);
      owners.push_back(shard.ranks.front());
    }
  }
  auto defect = find_cover_defect(shape, chunks);
  if (!defect) return std::nullopt;
  Trouble trouble;
  trouble.code = Trouble::Code::kNotExact;
  for (size_t index = 0; index < std::min(defect->chunks.size(), kMaxNamedChunks); ++index) {
    trouble.chunks.push_back(chunks[defect->chunks[index]]);
    trouble.owners.push_back(owners[defect->chunks[index]]);
  }
  trouble.defect = std::move(*defect);
  return trouble;
}

// Shards of the ranks of one mesh. Ranks that differ only on axes that replicate hold the same.
std::vector<HeldShard> held_shards(const JointTable& joint, const std::vector<Member>& members,
                                   const ShardLayout& layout) {
  const Kind& kind = joint.kind_of(members.front()).kind;
  std::unordered_map<size_t, size_t> position_of;
  std::vector<HeldShard> shards;
  for (const Member& member : members) {
    const Sizes& coordinate = joint.standing(member).coordinate;
    Sizes first = coordinate;
    for (size_t axis = 0; axis < first.size(); ++axis) {
      if (kind.placements[axis].dim < 0) first[axis] = 0;
    }
    const auto [found, is_new] = position_of.try_emplace(linear_index(first, layout.mesh_shape), shards.size());
    if (is_new) shards.push_back({{}, shard_at(layout, coordinate).chunks});
    shards[found->second].ranks.push_back(member.rank);
  }
  std::erase_if(shards, [](const HeldShard& shard) { return shard.boxes.empty(); });
  return shards;
}

std::optional<Trouble> find_absent(const JointTable& joint, const std::vector<Member>& members) {
  const MeshForm& mesh = joint.kind_of(members.front()).mesh;
  std::vector<size_t> seen;
  for (const Member& member : members) seen.push_back(linear_index(joint.standing(member).coordinate, mesh.shape));
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  const auto num_ranks = static_cast<size_t>(num_elements(mesh.shape));
  if (seen.size() == num_ranks) return std::nullopt;
  Trouble trouble;
  trouble.code = Trouble::Code::kAbsent;
  trouble.first = members.front().rank;
  const int64_t origin = joint.standing(members.front()).origin;
  for (size_t index = 0, next = 0; index < num_ranks && trouble.absent.size() < kMaxAbsent; ++index) {
    if (next < seen.size() && seen[next] == index) {
      ++next;
    } else {
      trouble.absent.push_back(rank_at(mesh, origin, coordinate_of(index, mesh.shape)));
    }
  }
  return trouble;
}

std::optional<Trouble> find_disagreement(const JointTable& joint, const std::vector<Member>& members) {
  const NumberedKind& first = joint.kind_of(members.front());
  for (const Member& member : members) {
    const NumberedKind& other = joint.kind_of(member);
    if (other.traits == first.traits) continue;
    Trouble trouble;
    trouble.first = members.front().rank;
    trouble.second = member.rank;
    trouble.code = other.kind.type != first.kind.type     ? Trouble::Code::kType
                   : other.kind.dtype != first.kind.dtype ? Trouble::Code::kDtype
                                                          : Trouble::Code::kShape;
    return trouble;
  }
  return std::nullopt;
}

// A chain of facts about a key, numbered: equal numbers mean equal chains.
struct Fact {
  enum What : uint32_t {
    kHeld,
    kUnusual,
    kOwn
  };  // held in a section as a kind; on a rank in other sizes; like no other
  uint32_t before = 0;  // the fact before, plus 1
  What what = kHeld;
  uint32_t where = 0;
  uint32_t value = 0;

  bool operator==(const Fact&) const = default;
};

struct FactHash {
  size_t operator()(const Fact& fact) const {
    uint64_t hash = (uint64_t{fact.before} << 32 | fact.where) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 29) ^ (uint64_t{fact.what} << 32 | fact.value)) * 0xbf58476d1ce4e5b9u;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

class Facts {
 public:
  // Neighbours mostly have the same facts, so the last answer is tried first.
  void add(uint32_t& chain, Fact fact) {
    fact.before = chain;
    if (facts_.empty() || !(fact == facts_[last_])) {
      const auto [found, is_new] = numbers_.try_emplace(fact, static_cast<uint32_t>(facts_.size()));
      if (is_new) facts_.push_back(fact);
      last_ = found->second;
    }
    chain = last_ + 1;
  }
  const Fact& operator[](uint32_t chain) const { return facts_[chain - 1]; }
  size_t size() const { return facts_.size(); }

 private:
  std::vector<Fact> facts_;
  std::unordered_map<Fact, uint32_t, FactHash> numbers_;
  uint32_t last_ = 0;
};

}  // namespace

std::vector<std::pair<std::string, int64_t>> axes_of(std::vector<MeshForm> meshes, std::span<const size_t> held) {
  std::stable_sort(meshes.begin(), meshes.end(),
                   [](const MeshForm& left, const MeshForm& right) { return left.shape.size() > right.shape.size(); });
  std::vector<std::pair<std::string, int64_t>> axes;
  const auto has_axis = [&axes](const std::string& name) {
    return std::ranges::find(axes, name, [](const auto& axis) { return axis.first; }) != axes.end();
  };
  int64_t largest = 0;
  for (const MeshForm& mesh : meshes) {
    largest = std::max(largest, num_elements(mesh.shape));
    for (size_t axis = 0; axis < std::min(mesh.names.size(), mesh.shape.size()); ++axis) {
      if (!has_axis(mesh.names[axis])) axes.emplace_back(mesh.names[axis], mesh.shape[axis]);
    }
  }
  std::map<size_t, int64_t> num_ranks;
  for (const size_t keys : held) ++num_ranks[keys];
  const auto is_stage = [largest](const auto& group) { return group.second == largest; };
  if (num_ranks.size() > 1 && std::ranges::all_of(num_ranks, is_stage) && !has_axis("pp")) {
    axes.emplace(axes.begin(), "pp", static_cast<int64_t>(num_ranks.size()));
  }
  return axes;
}

std::vector<std::pair<std::string, int64_t>> JointTable::axes() const {
  std::vector<MeshForm> meshes;
  for (const Section& section : sections_) {
    meshes.insert(meshes.end(), section.columns.meshes.begin(), section.columns.meshes.end());
  }
  std::vector<size_t> held;
  for (const std::vector<size_t>& sections : sections_of_) held.push_back(sections.front());
  return axes_of(std::move(meshes), held);
}

std::vector<std::vector<const HeldShard*>> equal_shards(const KeyClass& of_keys) {
  std::vector<std::vector<const HeldShard*>> groups;
  std::map<std::vector<Sizes>, size_t> positions;
  for (const Replica& replica : of_keys.replicas) {
    for (const HeldShard& shard : replica.shards) {
      std::vector<Sizes> boxes;
      for (const Chunk& box : shard.boxes) {
        boxes.push_back(box.offsets);
        boxes.push_back(box.sizes);
      }
      const size_t position = positions.try_emplace(std::move(boxes), groups.size()).first->second;
      if (position == groups.size()) groups.emplace_back();
      groups[position].push_back(&shard);
    }
  }
  return groups;
}

std::vector<std::string_view> cut_path(std::string_view name, const PathForm& form) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  for (size_t part = 0; part < form.parts.size(); ++part) {
    const auto& [num_dots, is_position] = form.parts[part];
    size_t end = begin;
    for (int64_t dots = 0; end < name.size() && (name[end] != '.' || dots < num_dots); ++end) dots += name[end] == '.';
    const std::string_view cut = name.substr(begin, end - begin);
    const bool is_number = !cut.empty() && cut.size() < 19 && cut.find_first_not_of("0123456789") == cut.npos;
    const bool is_last = part + 1 == form.parts.size();
    if ((is_position && !is_number) || is_last != (end == name.size())) {
      throw WireError(concat("key table: the path of ", std::string(name), " does not fit it"));
    }
    parts.push_back(cut);
    begin = end + 1;
  }
  return parts;
}

int64_t rank_at(const MeshForm& mesh, int64_t origin, std::span<const int64_t> coordinate) {
  if (!mesh.is_strided) return mesh.ranks[linear_index(coordinate, mesh.shape)];
  int64_t rank = origin;
  for (size_t axis = 0; axis < coordinate.size(); ++axis) rank += mesh.ranks[axis] * coordinate[axis];
  return rank;
}

uint32_t JointTable::number_of_kind(const Kind& kind, const KeyColumns& columns) {
  const bool has_mesh = kind.mesh != Kind::kPlain;
  const std::string traits = encode_traits(kind);
  std::string layout =
      has_mesh ? encode_mesh(columns.meshes[static_cast<size_t>(kind.mesh)]) + encode_placements(kind) : std::string();
  const std::string whole = traits + (kind.requires_grad ? "1" : "0") + layout;
  const auto [found, is_new] = kind_numbers_.try_emplace(whole, static_cast<uint32_t>(kinds_.size()));
  if (is_new) {
    NumberedKind& known = kinds_.emplace_back();
    known.kind = kind;
    if (has_mesh) known.mesh = columns.meshes[static_cast<size_t>(kind.mesh)];
    known.traits = number(traits_numbers_, traits);
    known.layout = number(layout_numbers_, layout);
  }
  return found->second;
}

size_t JointTable::add_section(std::string_view bytes) {
  Section section;
  section.columns = decode_columns(bytes);
  const KeyColumns& columns = section.columns;
  for (const Kind& kind : columns.kinds) section.kinds.push_back(number_of_kind(kind, columns));
  const auto index = static_cast<uint32_t>(sections_.size());
  std::vector<bool> is_here(names_.size(), false);
  for (size_t key = 0; key < columns.num_keys(); ++key) {
    const auto known = numbers_.find(columns.name(key));
    uint32_t found = 0;
    if (known == numbers_.end()) {
      found = static_cast<uint32_t>(names_.size());
      numbers_.emplace(names_.emplace_back(columns.name(key)), found);
      paths_.emplace_back(0, 0);
      is_here.push_back(false);
    } else {
      found = known->second;
    }
    if (is_here[found]) throw WireError(concat("key table: it has ", std::string(columns.name(key)), " twice"));
    is_here[found] = true;
    section.keys.push_back(found);
    if (paths_[found].second == 0) paths_[found] = {index, columns.form_of[key]};
  }
  sections_.push_back(std::move(section));
  return index;
}

void JointTable::add_rank(std::vector<size_t> sections, std::string_view part) {
  TTE_CHECK(!sections.empty(), "add_rank", "a rank has no section");
  for (size_t index = 0; index < sections.size(); ++index) {
    const KeyColumns& columns = sections_.at(sections[index]).columns;
    const bool has_boxes = std::any_of(columns.kinds.begin(), columns.kinds.end(),
                                       [](const Kind& kind) { return kind.type == EntryType::kBoxes; });
    if (index > 0 && (has_boxes || !columns.meshes.empty())) {
      throw WireError("key table: a mesh or boxes in a section that no part belongs to");
    }
    if (std::count(sections.begin(), sections.end(), sections[index]) > 1) {
      throw WireError("key table: a rank has the same section twice");
    }
  }
  parts_.push_back(decode_part(part, sections_[sections[0]].columns));
  const auto rank = static_cast<int64_t>(sections_of_.size());
  for (const size_t section : sections) sections_[section].ranks.push_back(rank);
  sections_of_.push_back(std::move(sections));
}

const Standing& JointTable::standing(const Member& member) const {
  const int64_t mesh = sections_[member.section].columns.kinds[member.kind].mesh;
  return parts_[static_cast<size_t>(member.rank)].standings[static_cast<size_t>(mesh)];
}

const Sizes& JointTable::local_sizes(const KeyClass& of_keys, const Member& member) const {
  const auto unusual = of_keys.unusual.find(member.rank);
  if (unusual != of_keys.unusual.end()) return *unusual->second;
  return parts_[static_cast<size_t>(member.rank)].local_sizes[member.kind];
}

void JointTable::agree(bool needs_all_ranks) {
  divide_into_classes();
  for (KeyClass& of_keys : classes_) agree_on(of_keys, needs_all_ranks);
}

void JointTable::divide_into_classes() {
  Facts facts;
  std::vector<uint32_t> chains(names_.size(), 0);
  for (size_t index = 0; index < sections_.size(); ++index) {
    const Section& section = sections_[index];
    if (section.ranks.empty()) continue;
    for (size_t key = 0; key < section.keys.size(); ++key) {
      const uint32_t kind = section.columns.kind_of[key];
      const EntryType type = section.columns.kinds[kind].type;
      uint32_t& chain = chains[section.keys[key]];
      if (type == EntryType::kNone) continue;
      facts.add(chain, {0, Fact::kHeld, static_cast<uint32_t>(index), kind});
      if (type == EntryType::kBoxes) facts.add(chain, {0, Fact::kOwn, section.keys[key], 0});
    }
  }
  std::map<Sizes, uint32_t> numbers_of_sizes;
  std::vector<const Sizes*> sizes_of_number;
  using Stated = std::vector<std::pair<int64_t, const std::vector<Chunk>*>>;
  std::unordered_map<uint32_t, Stated> stated;
  for (size_t rank = 0; rank < parts_.size(); ++rank) {
    const Section& section = sections_[sections_of_[rank][0]];
    for (const auto& [key, sizes] : parts_[rank].unusual) {
      const auto [found, is_new] = numbers_of_sizes.try_emplace(sizes, static_cast<uint32_t>(sizes_of_number.size()));
      if (is_new) sizes_of_number.push_back(&sizes);
      uint32_t& chain = chains[section.keys[key]];
      if (chain > 0) facts.add(chain, {0, Fact::kUnusual, static_cast<uint32_t>(rank), found->second});
    }
    for (const auto& [key, boxes] : parts_[rank].boxes) stated[section.keys[key]].emplace_back(rank, &boxes);
  }

  classes_.clear();
  class_of_.assign(names_.size(), kNoClass);
  std::vector<uint32_t> class_of_chain(facts.size() + 1, kNoClass);
  for (uint32_t key = 0; key < chains.size(); ++key) {
    if (chains[key] == 0) continue;
    uint32_t& index = class_of_chain[chains[key]];
    if (index == kNoClass) {
      index = static_cast<uint32_t>(classes_.size());
      KeyClass& of_keys = classes_.emplace_back();
      for (uint32_t chain = chains[key]; chain > 0; chain = facts[chain].before) {
        const Fact& fact = facts[chain];
        if (fact.what == Fact::kUnusual) of_keys.unusual[fact.where] = sizes_of_number[fact.value];
        if (fact.what != Fact::kHeld) continue;
        for (const int64_t rank : sections_[fact.where].ranks)
          of_keys.members.push_back({rank, fact.where, fact.value});
      }
      const auto by_rank = [](const Member& a, const Member& b) { return a.rank < b.rank; };
      std::sort(of_keys.members.begin(), of_keys.members.end(), by_rank);
      for (size_t member = 1; member < of_keys.members.size(); ++member) {
        if (of_keys.members[member].rank == of_keys.members[member - 1].rank) {
          throw WireError(concat("key table: rank ", of_keys.members[member].rank, " has ", names_[key], " twice"));
        }
      }
      if (const auto found = stated.find(key); found != stated.end()) {
        for (const auto& [rank, boxes] : found->second) of_keys.stated.push_back(boxes);
      }
    }
    classes_[index].keys.push_back(key);
    class_of_[key] = index;
  }
}

void JointTable::agree_on(KeyClass& of_keys, bool needs_all_ranks) const {
  try {
    of_keys.trouble = find_disagreement(*this, of_keys.members);
    if (of_keys.trouble) return;
    const EntryType type = kind_of(of_keys).type;
    if (type == EntryType::kBoxes) of_keys.trouble = agree_on_boxes(of_keys, needs_all_ranks);
    if (type == EntryType::kTensor) of_keys.trouble = agree_on_layouts(of_keys, needs_all_ranks);
  } catch (const std::logic_error& error) {  // a layout or boxes that make no sense
    of_keys.trouble = Trouble();
    of_keys.trouble->message = error.what();
  } catch (const std::overflow_error& error) {
    of_keys.trouble = Trouble();
    of_keys.trouble->message = error.what();
  }
  const auto names_no_rank = [](Trouble::Code code) {
    return code == Trouble::Code::kInvalid || code == Trouble::Code::kNotExact;
  };
  if (of_keys.trouble && names_no_rank(of_keys.trouble->code)) of_keys.trouble->first = of_keys.members.front().rank;
}

std::optional<Trouble> JointTable::agree_on_boxes(KeyClass& of_keys, bool needs_all_ranks) const {
  Replica replica;
  std::map<std::pair<Sizes, Sizes>, size_t> positions;
  for (size_t index = 0; index < of_keys.members.size(); ++index) {
    const int64_t rank = of_keys.members[index].rank;
    replica.ranks.push_back(rank);
    for (const Chunk& box : *of_keys.stated.at(index)) {
      if (std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end()) continue;
      const auto [found, is_new] = positions.try_emplace({box.offsets, box.sizes}, replica.shards.size());
      if (is_new) replica.shards.push_back({{}, {box}});
      replica.shards[found->second].ranks.push_back(rank);
    }
  }
  const Sizes& shape = kind_of(of_keys).shape;
  auto trouble = find_cover_trouble(shape, replica.shards);
  // A load may want a part of a tensor, or a part twice.
  if (trouble && (needs_all_ranks || trouble->defect.kind == CoverDefect::Kind::kOutOfBounds)) return trouble;
  hold_empty_box(shape, replica);
  of_keys.replicas.push_back(std::move(replica));
  return std::nullopt;
}

std::optional<Trouble> JointTable::agree_on_layouts(KeyClass& of_keys, bool needs_all_ranks) const {
  const Sizes& shape = kind_of(of_keys).shape;
  const auto is_on_mesh = [&](const Member& member) { return kind_of(member).kind.mesh != Kind::kPlain; };
  of_keys.is_plain = std::none_of(of_keys.members.begin(), of_keys.members.end(), is_on_mesh);
  // Members of one mesh in one layout are one replica; so is each plain tensor.
  std::map<std::tuple<uint32_t, int64_t, int64_t>, size_t> positions;
  std::vector<std::vector<Member>> groups;
  for (const Member& member : of_keys.members) {
    const bool is_plain = !is_on_mesh(member);
    const int64_t alone = is_plain && !of_keys.is_plain ? member.rank : -1;
    const std::tuple key{kind_of(member).layout, is_plain ? 0 : standing(member).origin, alone};
    const size_t position = positions.try_emplace(key, groups.size()).first->second;
    if (position == groups.size()) groups.emplace_back();
    groups[position].push_back(member);
  }
  for (const std::vector<Member>& members : groups) {
    Replica replica;
    for (const Member& member : members) replica.ranks.push_back(member.rank);
    if (is_on_mesh(members.front())) {
      if (auto trouble = decide(of_keys, members, needs_all_ranks, replica)) return trouble;
    } else {
      replica.shards = {{replica.ranks, {{Sizes(shape.size(), 0), shape, Sizes(shape.size(), 0)}}}};
    }
    hold_empty_box(shape, replica);
    of_keys.replicas.push_back(std::move(replica));
  }
  return std::nullopt;
}

std::optional<Trouble> JointTable::decide(const KeyClass& of_keys, const std::vector<Member>& members,
                                          bool needs_all_ranks, Replica& replica) const {
  const NumberedKind& kind = kind_of(members.front());
  const auto candidates = candidate_steps(kind.kind.placements, kind.mesh.shape, kind.kind.stated_order());
  std::vector<Observation> observations;
  for (const Member& member : members) {
    observations.push_back({standing(member).coordinate, local_sizes(of_keys, member)});
  }
  Trouble trouble;
  trouble.first = members.front().rank;
  try {
    trouble.resolution = resolve_steps(kind.kind.shape, kind.mesh.shape, candidates, observations);
  } catch (const std::invalid_argument& error) {
    trouble.message = error.what();
    return trouble;
  }
  if (trouble.resolution.outcome != Resolution::Outcome::kDecided) {
    const bool is_in_doubt = trouble.resolution.outcome == Resolution::Outcome::kInDoubt;
    trouble.code = is_in_doubt ? Trouble::Code::kInDoubt : Trouble::Code::kNoMatch;
    const auto found = std::find_if(observations.begin(), observations.end(), [&](const Observation& seen) {
      return seen.coordinate == trouble.resolution.coordinate;
    });
    trouble.second = members[static_cast<size_t>(found - observations.begin())].rank;
    return trouble;
  }
  replica.steps = candidates[trouble.resolution.first];
  replica.is_foreseen = trouble.resolution.first == 0;
  replica.shards = held_shards(*this, members, {kind.kind.shape, kind.mesh.shape, replica.steps});
  if (!needs_all_ranks) return std::nullopt;
  if (auto absent = find_absent(*this, members)) return absent;
  return find_cover_trouble(kind.kind.shape, replica.shards);
}

}  // namespace torchtitan_ext::core
