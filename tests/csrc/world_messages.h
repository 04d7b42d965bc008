// Messages of simulated ranks, as encoders make them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/agreement.h"
#include "core/key_columns.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::core {

// A tensor on a mesh, FSDP2 over TP unless placements say otherwise.
inline Kind sharded(Sizes shape, std::vector<Placement> placements, int64_t mesh = 0) {
  Kind kind;
  kind.type = EntryType::kTensor;
  kind.dtype = "torch.float32";
  kind.itemsize = 4;
  kind.shape = std::move(shape);
  kind.mesh = mesh;
  kind.placements = std::move(placements);
  return kind;
}

inline Kind plain(Sizes shape) { return sharded(std::move(shape), {}, Kind::kPlain); }

inline Kind object() {
  Kind kind;
  kind.type = EntryType::kObject;
  return kind;
}

inline Kind stated_boxes(Sizes shape) {
  Kind kind = plain(std::move(shape));
  kind.type = EntryType::kBoxes;
  return kind;
}

inline MeshForm strided_mesh(Sizes shape, Sizes strides) {
  return {std::move(shape), true, std::move(strides), false, {}};
}

inline KeyColumns make_columns(std::vector<MeshForm> meshes, std::vector<Kind> kinds,
                               const std::vector<std::pair<std::string, uint32_t>>& keys) {
  KeyColumns columns;
  columns.meshes = std::move(meshes);
  columns.kinds = std::move(kinds);
  for (const auto& [name, kind] : keys) {
    columns.names += name;
    columns.name_ends.push_back(columns.names.size());
    columns.kind_of.push_back(kind);
    columns.form_of.push_back(0);
  }
  return columns;
}

// The part of a rank that holds what the nested reading gives it. It stands at `coordinate` on every mesh, as far as the
// mesh has axes.
inline RankPart make_part(const KeyColumns& columns, const Sizes& coordinate, int64_t origin = 0) {
  RankPart part;
  const auto at = [&](const Sizes& shape) {
    return Sizes(coordinate.begin(), coordinate.begin() + static_cast<std::ptrdiff_t>(shape.size()));
  };
  for (const MeshForm& mesh : columns.meshes) part.standings.push_back({mesh.is_strided ? origin : 0, at(mesh.shape)});
  for (const Kind& kind : columns.kinds) {
    Sizes local;
    if (kind.mesh != Kind::kPlain) {
      const Sizes& mesh_shape = columns.meshes[static_cast<size_t>(kind.mesh)].shape;
      const auto steps = read_placements(kind.placements, mesh_shape, Reading::kNested);
      local = shard_at({kind.shape, mesh_shape, steps}, at(mesh_shape)).sizes;
    }
    part.local_sizes.push_back(std::move(local));
  }
  return part;
}

}  // namespace torchtitan_ext::core
