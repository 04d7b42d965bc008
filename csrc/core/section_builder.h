// One section of a rank's key table while it grows, key by key; key_columns.h says what it becomes.
//
//   SectionBuilder section;
//   kind.mesh = section.add_mesh(mesh, standing);
//   section.add_key("layers.0.weight", section.add_kind(kind, local_sizes), form);
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/key_columns.h"

namespace torchtitan_ext::core {

class SectionBuilder {
 public:
  // The number of a mesh: one for equal meshes on which the rank stands at one coordinate.
  int64_t add_mesh(const MeshForm& mesh, const Standing& standing);
  // The number of a kind: one for equal kinds. The local sizes of the first tensor of a kind are those of the kind.
  uint32_t add_kind(const Kind& kind, const Sizes& local_sizes);
  // The next key, held in a kind; `form` of a key that has a path.
  void add_key(std::string_view name, uint32_t kind, const std::optional<PathForm>& form);
  // The local sizes of the last key, which are not those of its kind.
  void add_unusual(const Sizes& local_sizes);
  // The boxes of the last key, of kind kBoxes.
  void add_boxes(std::vector<Chunk> boxes);

  const KeyColumns& columns() const { return columns_; }
  const RankPart& part() const { return part_; }

 private:
  KeyColumns columns_;
  RankPart part_;
  std::unordered_map<std::string, int64_t> meshes_;
  std::unordered_map<std::string, uint32_t> kinds_;
  std::map<std::vector<std::pair<int64_t, bool>>, uint32_t> forms_;
};

// A mesh of these ranks, in row-major order, and its rank at the origin: by strides where these tell all ranks.
std::pair<MeshForm, int64_t> form_of_mesh(Sizes shape, Sizes ranks, std::optional<std::vector<std::string>> names);

}  // namespace torchtitan_ext::core
