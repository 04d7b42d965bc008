#include "core/delta_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "core/check.h"
#include "core/cover.h"
#include "core/problems.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Piece = DeltaOffer::Piece;
using Part = DeltaOffer::Part;
using Boxes = std::vector<DeltaBox>;

constexpr const char* kReplicasDiffer =
    "has replicas that differ, before or after; tte.sync_module_states makes them equal";

struct HeldPiece {
  size_t rank = 0;
  const Piece* piece = nullptr;
};

// What the ranks hold of a tensor: the members of each list of boxes, in the order in which they came.
struct HeldKey {
  std::vector<std::vector<HeldPiece>> groups;
  std::map<Boxes, size_t> group_of;

  void add(const HeldPiece& member) {
    const auto [found, is_new] = group_of.try_emplace(member.piece->boxes, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(member);
  }
};

// Tensors of one shape are cut alike, so that few covers are looked at.
class Covers {
 public:
  const std::optional<std::string>& defect(const Sizes& shape, const std::vector<HeldPiece>& members) {
    Boxes boxes;
    for (const HeldPiece& member : members) {
      boxes.insert(boxes.end(), member.piece->boxes.begin(), member.piece->boxes.end());
    }
    const auto [found, is_new] = known_.try_emplace({shape, std::move(boxes)});
    if (is_new) {
      std::vector<Chunk> chunks;
      for (const auto& [offsets, sizes] : found->first.second) chunks.push_back({offsets, sizes, {}});
      const std::optional<CoverDefect> defect = find_cover_defect(shape, chunks);
      if (defect) found->second = defect_text(*defect);
    }
    return found->second;
  }

 private:
  std::map<std::pair<Sizes, Boxes>, std::optional<std::string>> known_;
};

// Why what the ranks hold of a tensor does not go into a file, apart from what is missing.
std::optional<DeltaPlan::Fault> why_not_written(const std::string& key, const HeldKey& held,
                                                const std::set<std::string>& dtypes) {
  const auto& [first, one] = held.groups.front().front();
  for (const std::vector<HeldPiece>& group : held.groups) {
    for (const auto& [rank, other] : group) {
      if (other->dtype == one->dtype && other->shape == one->shape) continue;
      return DeltaPlan::Fault{"ranks_disagree",
                              key,
                              concat("is ", one->dtype, " of shape ", format_sizes(one->shape), " on rank ", first,
                                     ", ", other->dtype, " of shape ", format_sizes(other->shape), " on rank ", rank,
                                     "; give changes of snapshots of one state"),
                              {}};
    }
  }
  if (!dtypes.contains(one->dtype)) {
    return DeltaPlan::Fault{
        "unsupported_tensor",
        key,
        concat("is ", one->dtype, ", which files of changes do not have; leave it out of the snapshot"),
        {}};
  }
  const auto differ = [](const std::vector<HeldPiece>& group) {
    return std::ranges::any_of(group,
                               [&](const HeldPiece& member) { return member.piece->sums != group[0].piece->sums; });
  };
  if (std::ranges::any_of(held.groups, differ)) return DeltaPlan::Fault{"replicas_differ", key, kReplicasDiffer, {}};
  return std::nullopt;
}

// Of a tensor its replicas that have each element once; the first is written. None where there are none, for which
// `defect` says why.
std::vector<std::vector<HeldPiece>> whole_replicas(const HeldKey& held, Covers& covers,
                                                   std::optional<std::string>& defect) {
  std::vector<HeldPiece> firsts;
  for (const std::vector<HeldPiece>& group : held.groups) firsts.push_back(group.front());
  const Sizes& shape = firsts.front().piece->shape;
  defect = covers.defect(shape, firsts);
  if (!defect) return {firsts};
  // Of a replica without a name its rank.
  std::map<std::pair<std::string, size_t>, size_t> number_of;
  std::vector<std::vector<HeldPiece>> replicas;
  for (const std::vector<HeldPiece>& group : held.groups) {
    std::set<size_t> are_in;  // of replicas with several copies of these boxes the first counts
    for (const HeldPiece& member : group) {
      const std::string& name = member.piece->replica;
      const auto [found, is_new] = number_of.try_emplace({name, name.empty() ? member.rank : 0}, replicas.size());
      if (is_new) replicas.emplace_back();
      if (are_in.insert(found->second).second) replicas[found->second].push_back(member);
    }
  }
  std::erase_if(replicas, [&](const std::vector<HeldPiece>& of) { return covers.defect(shape, of).has_value(); });
  return replicas;
}

DeltaSums sums_of(const std::vector<HeldPiece>& members) {
  DeltaSums sums{};
  for (const HeldPiece& member : members) {
    for (size_t kind = 0; kind < sums.size(); ++kind) sums[kind] += member.piece->sums[kind];
  }
  return sums;
}

std::vector<size_t> ranks_of(const HeldKey& held) {
  std::set<size_t> ranks;
  for (const std::vector<HeldPiece>& group : held.groups) {
    for (const HeldPiece& member : group) ranks.insert(member.rank);
  }
  return {ranks.begin(), ranks.end()};
}

// `total_of`: of the tensors of ranks that are written the total.
void add_writes(const std::vector<const DeltaOffer*>& offers,
                const std::map<std::pair<size_t, int64_t>, size_t>& total_of, DeltaPlan& plan) {
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    for (size_t part = 0; part < offers[rank]->parts().size(); ++part) {
      const Part& offered = offers[rank]->parts()[part];
      const auto found = total_of.find({rank, offered.tensor});
      if (found == total_of.end()) continue;
      DeltaPlan::Total& total = plan.totals[found->second];
      plan.writes.push_back({rank, part, total.key, total.boxes.size(), offered.box, offered.lengths});
      total.boxes.push_back(offered.box);
      total.count += offered.num_changed;
    }
  }
}

void put_box(WireWriter& out, const DeltaBox& box) {
  out.put_sizes(box.first);
  out.put_sizes(box.second);
}

DeltaBox get_box(WireReader& in) {
  Sizes offsets = in.get_sizes("offsets");
  return {std::move(offsets), in.get_sizes("sizes")};
}

}  // namespace

void DeltaOffer::add_held(const std::string& key, std::vector<DeltaBox> boxes, const SumTable::Box& box,
                          const SumTable& before, const SumTable& replaced, const SumTable& after) {
  const int64_t tensor = num_held_++;
  const SumTable::Part& held = before.part(key);
  const auto sum = held.sums.find(box);
  if (sum == held.sums.end()) return;
  constexpr std::string_view kPrefix = "torch.";
  const std::string dtype = held.dtype.starts_with(kPrefix) ? held.dtype.substr(kPrefix.size()) : held.dtype;
  pieces_.push_back({key,
                     tensor,
                     std::move(boxes),
                     held.replica,
                     dtype,
                     held.shape,
                     {sum->second, replaced.part(key).sums.at(box), after.part(key).sums.at(box)}});
}

std::string DeltaOffer::encode() const {
  WireWriter out;
  out.put(elsewhere_.size());
  for (const std::string& key : elsewhere_) out.put_string(key);
  out.put(pieces_.size());
  for (const Piece& piece : pieces_) {
    out.put_string(piece.key);
    out.put_signed(piece.tensor);
    out.put(piece.boxes.size());
    for (const DeltaBox& box : piece.boxes) put_box(out, box);
    out.put_string(piece.replica);
    out.put_string(piece.dtype);
    out.put_sizes(piece.shape);
    for (const uint64_t sum : piece.sums) out.put(sum);
  }
  out.put(parts_.size());
  for (const Part& part : parts_) {
    out.put_signed(part.tensor);
    out.put(part.box.has_value());
    if (part.box) put_box(out, *part.box);
    out.put_signed(part.num_changed);
    out.put_sizes(part.lengths);
  }
  return out.take();
}

DeltaOffer DeltaOffer::decode(std::string_view bytes) {
  WireReader in(bytes, "changes to save");
  DeltaOffer offer;
  for (size_t left = in.get_count("elsewhere"); left > 0; --left) {
    offer.elsewhere_.emplace_back(in.get_string("key"));
  }
  for (size_t left = in.get_count("pieces"); left > 0; --left) {
    Piece piece;
    piece.key = in.get_string("key");
    piece.tensor = in.get_signed("tensor");
    for (size_t boxes = in.get_count("boxes", 2); boxes > 0; --boxes) piece.boxes.push_back(get_box(in));
    piece.replica = in.get_string("replica");
    piece.dtype = in.get_string("dtype");
    piece.shape = in.get_sizes("shape");
    for (uint64_t& sum : piece.sums) sum = in.get("sum");
    offer.pieces_.push_back(std::move(piece));
  }
  for (size_t left = in.get_count("parts"); left > 0; --left) {
    Part part;
    part.tensor = in.get_signed("tensor");
    if (in.get_index("box", 2) == 1) part.box = get_box(in);
    part.num_changed = in.get_signed("changed elements");
    part.lengths = in.get_sizes("lengths");
    offer.parts_.push_back(std::move(part));
  }
  in.finish();
  return offer;
}

DeltaPlan plan_delta(const std::vector<const DeltaOffer*>& offers, const std::vector<std::string>& dtypes) {
  DeltaPlan plan;
  std::unordered_map<std::string, size_t> number_of;
  std::vector<HeldKey> held;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    for (const Piece& piece : offers[rank]->pieces()) {
      const auto [found, is_new] = number_of.try_emplace(piece.key, held.size());
      if (is_new) {
        held.emplace_back();
        plan.keys.push_back(piece.key);
      }
      held[found->second].add({rank, &piece});
    }
  }
  std::set<std::string> missed;
  for (const DeltaOffer* const offer : offers) {
    for (const std::string& key : offer->elsewhere()) {
      if (!number_of.contains(key) && missed.insert(key).second) plan.nowhere.push_back(key);
    }
  }
  Covers covers;
  const std::set<std::string> known(dtypes.begin(), dtypes.end());
  std::map<std::pair<size_t, int64_t>, size_t> total_of;
  for (size_t number = 0; number < held.size(); ++number) {
    const std::string& key = plan.keys[number];
    std::optional<DeltaPlan::Fault> fault = why_not_written(key, held[number], known);
    if (fault) {
      plan.faults.push_back(std::move(*fault));
      continue;
    }
    std::optional<std::string> defect;
    const std::vector<std::vector<HeldPiece>> replicas = whole_replicas(held[number], covers, defect);
    if (replicas.empty()) {
      plan.faults.push_back({"incomplete_cover", key, *defect, ranks_of(held[number])});
      continue;
    }
    const DeltaSums sums = sums_of(replicas.front());
    if (std::ranges::any_of(replicas, [&](const auto& replica) { return sums_of(replica) != sums; })) {
      plan.faults.push_back({"replicas_differ", key, kReplicasDiffer, {}});
    }
    for (const HeldPiece& member : replicas.front()) total_of[{member.rank, member.piece->tensor}] = plan.totals.size();
    const Piece& one = *replicas.front().front().piece;
    plan.totals.push_back({key, one.dtype, one.shape, 0, sums, {}});
  }
  add_writes(offers, total_of, plan);
  return plan;
}

}  // namespace torchtitan_ext::core
