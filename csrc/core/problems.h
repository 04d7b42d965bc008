// What is wrong with a key, in the sentences that users read.
//
// Whoever reports a problem knows the key, so the sentences do not name it. They print shapes as Python does.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/agreement.h"

namespace torchtitan_ext::core {

struct KeyProblem {
  const char* kind;  // a ProblemKind of torchtitan_ext/errors.py
  std::string detail;
};

// As Python writes a tuple: "(2, 3)".
std::string format_sizes(std::span<const int64_t> sizes);
// In DTensor's words: "[Shard(0), Replicate()]".
std::string format_placements(std::span<const Placement> placements);
// "dp 4 x tp 2", or "4x2" of a mesh without names.
std::string format_mesh(const MeshForm& mesh);
// Which order of sharding is true, by what the local tensors of all reporting ranks are.
// Args:
//   origin: the rank at the mesh's origin.
std::variant<std::vector<ShardStep>, KeyProblem> decide_steps(const Kind& kind, const MeshForm& mesh, int64_t origin,
                                                              std::span<const Observation> observations);

// That an element is held by no chunk, by several, or lies outside: "gap in shape (4,): element (3,) is held by no rank".
// Args:
//   holders: the chunks of the defect, the first of them are named;
//   owners: their ranks; none for the chunks of a checkpoint.
std::string describe_defect(std::span<const int64_t> global_shape, const CoverDefect& defect,
                            std::span<const Chunk> holders, std::optional<std::span<const int64_t>> owners);

// On which ranks the replicas of a tensor lie: "is a tensor on each of several meshes ([0, 1] | [2, 3])".
std::string describe_replicas(const KeyClass& of_keys);

// What is wrong with the keys of a class. REQUIRES: the class has a trouble.
KeyProblem problem_of(const JointTable& joint, const KeyClass& of_keys);

}  // namespace torchtitan_ext::core
