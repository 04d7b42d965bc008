#include "core/problems.h"

#include <algorithm>
#include <array>
#include <ranges>
#include <set>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// A sentence stays readable for tensors and meshes of thousands of parts.
constexpr size_t kMaxNamedChunks = 4;
constexpr size_t kMaxNamedRanks = 8;
constexpr size_t kMaxNamedMeshes = 4;

std::string format_steps(const std::vector<ShardStep>& steps, const MeshForm& mesh) {
  std::string text = "(";
  for (const ShardStep& step : steps) {
    if (text.size() > 1) text += ", then ";
    text += mesh.has_names ? mesh.names[static_cast<size_t>(step.axis)] : std::to_string(step.axis);
    text += " on dim " + std::to_string(step.dim);
    if (step.split_factor > 1) text += " in " + std::to_string(step.split_factor) + " blocks";
  }
  return text + ")";
}

// The first chunks of a shard, as intervals: "0:2x0:3, 4:6x0:3, ...".
std::string format_chunks(const std::vector<Chunk>& chunks) {
  if (chunks.empty()) return "no element";
  std::string text;
  for (size_t index = 0; index < std::min(chunks.size(), kMaxNamedChunks); ++index) {
    const Chunk& chunk = chunks[index];
    if (index > 0) text += ", ";
    for (size_t dim = 0; dim < chunk.sizes.size(); ++dim) {
      const int64_t begin = chunk.offsets[dim];
      text += concat(dim > 0 ? "x" : "", begin, ":", begin + chunk.sizes[dim]);
    }
  }
  return text + (chunks.size() > kMaxNamedChunks ? ", ..." : "");
}

const Member& member_of(const KeyClass& of_keys, int64_t rank) {
  return *std::find_if(of_keys.members.begin(), of_keys.members.end(),
                       [&](const Member& member) { return member.rank == rank; });
}

KeyProblem describe_disagreement(const JointTable& joint, const KeyClass& of_keys) {
  const Trouble& trouble = *of_keys.trouble;
  const auto say = [&](int64_t rank) {
    const Kind& kind = joint.kind_of(member_of(of_keys, rank)).kind;
    const std::string has = concat("rank ", rank, " has ");
    if (trouble.code == Trouble::Code::kDtype) return has + "dtype " + kind.dtype;
    if (trouble.code == Trouble::Code::kShape) return has + "shape " + format_sizes(kind.shape);
    if (kind.type == EntryType::kObject) return has + "a non-tensor value";
    return has + (kind.type == EntryType::kTensor ? "a tensor" : "a tensor that describes itself");
  };
  return {"ranks_disagree",
          concat(say(trouble.first), ", ", say(trouble.second), "; give different values different keys")};
}

KeyProblem describe_absent(const NumberedKind& kind, const std::vector<int64_t>& absent) {
  std::string ranks;
  for (size_t index = 0; index < std::min(absent.size(), kMaxNamedRanks); ++index) {
    ranks += (index > 0 ? ", " : "") + std::to_string(absent[index]);
  }
  if (absent.size() > kMaxNamedRanks) ranks += ", ...";
  return {"incomplete_cover", concat("rank(s) ", ranks, " of its mesh (", format_mesh(kind.mesh), "), placements ",
                                     format_placements(kind.kind.placements),
                                     ", take no part; pass a process group that holds the whole mesh")};
}

// Shape, placements and mesh.
std::string describe_layout(const Kind& kind, const MeshForm& mesh) {
  return concat(format_sizes(kind.shape), " as ", format_placements(kind.placements), " on mesh ", format_mesh(mesh));
}

// Why no reading of a layout was decided on; `held` is the shape of the local tensor where no reading fits.
KeyProblem describe_unresolved(const Kind& kind, const MeshForm& mesh, int64_t origin, const Resolution& resolution,
                               std::span<const int64_t> held) {
  const auto candidates = candidate_steps(kind.placements, mesh.shape, kind.stated_order());
  const int64_t rank = rank_at(mesh, origin, resolution.coordinate);
  const auto shard_by = [&](const std::vector<ShardStep>& steps) {
    return shard_at({kind.shape, mesh.shape, steps}, resolution.coordinate);
  };
  std::string readings;
  if (resolution.outcome == Resolution::Outcome::kInDoubt) {
    for (const size_t number : std::array{resolution.first, resolution.second}) {
      const std::vector<ShardStep>& steps = candidates[number];
      readings += concat(readings.empty() ? "" : " or ", format_chunks(shard_by(steps).chunks), " when sharded ",
                         format_steps(steps, mesh));
    }
    return {"layout_in_doubt",
            concat(describe_layout(kind, mesh), " can be read in two ways that fit all local shapes: rank ", rank,
                   " holds ", readings)};
  }
  for (const std::vector<ShardStep>& steps : candidates) {
    readings += concat("; sharded ", format_steps(steps, mesh), " it would hold ", format_sizes(shard_by(steps).sizes));
  }
  return {"layout_matches_nothing",
          concat(describe_layout(kind, mesh), ": rank ", rank, " holds a local tensor of shape ", format_sizes(held),
                 readings, "; the local tensors were not made by these placements")};
}

}  // namespace

std::string format_sizes(std::span<const int64_t> sizes) {
  std::string text = "(";
  for (size_t dim = 0; dim < sizes.size(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(sizes[dim]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

std::string format_placements(std::span<const Placement> placements) {
  std::string text = "[";
  for (const auto& [dim, split_factor] : placements) {
    if (text.size() > 1) text += ", ";
    text += dim < 0             ? "Replicate()"
            : split_factor == 1 ? concat("Shard(", dim, ")")
                                : concat("_StridedShard(", dim, ", split_factor=", split_factor, ")");
  }
  return text + "]";
}

std::string format_mesh(const MeshForm& mesh) {
  std::string text;
  for (size_t axis = 0; axis < mesh.shape.size(); ++axis) {
    if (axis > 0) text += mesh.has_names ? " x " : "x";
    text += (mesh.has_names ? mesh.names[axis] + " " : "") + std::to_string(mesh.shape[axis]);
  }
  return text;
}

std::string describe_defect(std::span<const int64_t> global_shape, const CoverDefect& defect,
                            std::span<const Chunk> holders, std::optional<std::span<const int64_t>> owners) {
  std::string named;
  for (size_t index = 0; index < std::min(holders.size(), kMaxNamedChunks); ++index) {
    named +=
        concat(index > 0 ? "; " : "", format_sizes(holders[index].offsets), "+", format_sizes(holders[index].sizes));
    if (owners) named += concat(" of rank ", (*owners)[index]);
  }
  const auto [what, found] = [&]() -> std::pair<const char*, std::string> {
    switch (defect.kind) {
      case CoverDefect::Kind::kGap:
        return {"gap", owners ? "is held by no rank" : "is in no saved chunk"};
      case CoverDefect::Kind::kOverlap:
        return {"overlap", "is in chunks " + named};
      case CoverDefect::Kind::kOutOfBounds:
        break;
    }
    return {"out of bounds", "lies outside the tensor, in chunk " + named};
  }();
  return concat(what, " in shape ", format_sizes(global_shape), ": element ", format_sizes(defect.element), " ", found);
}

std::variant<std::vector<ShardStep>, KeyProblem> decide_steps(const Kind& kind, const MeshForm& mesh, int64_t origin,
                                                              std::span<const Observation> observations) {
  const auto candidates = candidate_steps(kind.placements, mesh.shape, kind.stated_order());
  const auto invalid = [&](const std::exception& error) {
    return KeyProblem{"layout_matches_nothing", concat(describe_layout(kind, mesh), ": ", error.what())};
  };
  Resolution resolution;
  try {
    resolution = resolve_steps(kind.shape, mesh.shape, candidates, observations);
  } catch (const std::invalid_argument& error) {
    return invalid(error);
  } catch (const std::overflow_error& error) {
    return invalid(error);
  }
  if (resolution.outcome == Resolution::Outcome::kDecided) return candidates[resolution.first];
  const auto there = std::find_if(observations.begin(), observations.end(),
                                  [&](const Observation& seen) { return seen.coordinate == resolution.coordinate; });
  return describe_unresolved(kind, mesh, origin, resolution,
                             there == observations.end() ? Sizes() : there->local_sizes);
}

std::string describe_replicas(const KeyClass& of_keys) {
  std::string meshes;
  for (size_t index = 0; index < std::min(of_keys.replicas.size(), kMaxNamedMeshes); ++index) {
    std::set<int64_t> ranks;
    for (const HeldShard& shard : of_keys.replicas[index].shards) ranks.insert(shard.ranks.begin(), shard.ranks.end());
    std::string named;
    for (const int64_t rank : ranks | std::views::take(kMaxNamedRanks)) {
      named += (named.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (ranks.size() > kMaxNamedRanks) named += concat(" and ", ranks.size() - kMaxNamedRanks, " more");
    meshes += concat(meshes.empty() ? "[" : " | [", named, "]");
  }
  if (of_keys.replicas.size() > kMaxNamedMeshes)
    meshes += concat(" | ", of_keys.replicas.size() - kMaxNamedMeshes, " more");
  return concat("is a tensor on each of several meshes (", meshes, ")");
}

KeyProblem problem_of(const JointTable& joint, const KeyClass& of_keys) {
  const Trouble& trouble = *of_keys.trouble;
  const Member& first = member_of(of_keys, trouble.first);
  const NumberedKind& kind = joint.kind_of(first);
  switch (trouble.code) {
    case Trouble::Code::kType:
    case Trouble::Code::kDtype:
    case Trouble::Code::kShape:
      return describe_disagreement(joint, of_keys);
    case Trouble::Code::kNoMatch:
    case Trouble::Code::kInDoubt:
      return describe_unresolved(kind.kind, kind.mesh, joint.standing(first).origin, trouble.resolution,
                                 joint.local_sizes(of_keys, member_of(of_keys, trouble.second)));
    case Trouble::Code::kInvalid:
      return {"layout_matches_nothing", concat(describe_layout(kind.kind, kind.mesh), ": ", trouble.message)};
    case Trouble::Code::kAbsent:
      return describe_absent(kind, trouble.absent);
    case Trouble::Code::kNotExact:
      break;
  }
  return {"incomplete_cover", describe_defect(kind.kind.shape, trouble.defect, trouble.chunks, trouble.owners)};
}

}  // namespace torchtitan_ext::core
