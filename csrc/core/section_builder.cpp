#include "core/section_builder.h"

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {

int64_t SectionBuilder::add_mesh(const MeshForm& mesh, const Standing& standing) {
  WireWriter stands;
  stands.put_signed(standing.origin);
  stands.put_sizes(standing.coordinate);
  const auto number = static_cast<int64_t>(columns_.meshes.size());
  const auto [found, is_new] = meshes_.try_emplace(encode_mesh(mesh) + stands.take(), number);
  if (is_new) {
    columns_.meshes.push_back(mesh);
    part_.standings.push_back(standing);
  }
  return found->second;
}

uint32_t SectionBuilder::add_kind(const Kind& kind, const Sizes& local_sizes) {
  WireWriter rest;
  rest.put(kind.requires_grad);
  rest.put_signed(kind.mesh);
  const auto number = static_cast<uint32_t>(columns_.kinds.size());
  const auto [found, is_new] = kinds_.try_emplace(encode_traits(kind) + rest.take() + encode_placements(kind), number);
  if (is_new) {
    columns_.kinds.push_back(kind);
    part_.local_sizes.push_back(local_sizes);
  }
  return found->second;
}

void SectionBuilder::add_key(std::string_view name, uint32_t kind, const std::optional<PathForm>& form) {
  uint32_t number = 0;
  if (form) {
    const auto [found, is_new] = forms_.try_emplace(form->parts, static_cast<uint32_t>(forms_.size() + 1));
    if (is_new) columns_.forms.push_back(*form);
    number = found->second;
  }
  columns_.names.append(name);
  columns_.name_ends.push_back(columns_.names.size());
  columns_.kind_of.push_back(kind);
  columns_.form_of.push_back(number);
}

void SectionBuilder::add_unusual(const Sizes& local_sizes) {
  part_.unusual.emplace_back(static_cast<uint32_t>(columns_.num_keys() - 1), local_sizes);
}

void SectionBuilder::add_boxes(std::vector<Chunk> boxes) {
  part_.boxes.emplace_back(static_cast<uint32_t>(columns_.num_keys() - 1), std::move(boxes));
}

std::pair<MeshForm, int64_t> form_of_mesh(Sizes shape, Sizes ranks, std::optional<std::vector<std::string>> names) {
  TTE_CHECK(static_cast<int64_t>(ranks.size()) == num_elements(shape), "mesh", "has ", ranks.size(),
            " ranks, expected ", num_elements(shape));
  MeshForm mesh{std::move(shape), false, {}, names.has_value(), std::move(names).value_or(std::vector<std::string>())};
  Sizes strides(mesh.shape.size(), 0);
  size_t step = 1;
  for (size_t axis = strides.size(); axis-- > 0;) {
    if (mesh.shape[axis] > 1 && !ranks.empty()) strides[axis] = ranks[step] - ranks[0];
    step *= static_cast<size_t>(mesh.shape[axis]);
  }
  mesh.is_strided = !ranks.empty();
  for (size_t index = 0; mesh.is_strided && index < ranks.size(); ++index) {
    int64_t rank = ranks[0];
    auto rest = static_cast<int64_t>(index);
    for (size_t axis = strides.size(); axis-- > 0; rest /= mesh.shape[axis]) {
      rank += strides[axis] * (rest % mesh.shape[axis]);
    }
    mesh.is_strided = rank == ranks[index];
  }
  const int64_t origin = mesh.is_strided ? ranks[0] : 0;
  mesh.ranks = mesh.is_strided ? std::move(strides) : std::move(ranks);
  return {std::move(mesh), origin};
}

}  // namespace torchtitan_ext::core
