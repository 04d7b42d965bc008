#include "core/noted_parts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::core {
namespace {

// As DTensor writes them: the split factor counts the parts into which axes further right cut the dim before.
std::vector<Placement> placements_of(std::span<const int64_t> dims, const Sizes& mesh_shape) {
  std::vector<Placement> placements;
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    int64_t factor = 1;
    for (size_t later = axis + 1; later < dims.size(); ++later) {
      if (dims[later] == dims[axis]) factor = checked_mul(factor, mesh_shape[later]);
    }
    placements.push_back({dims[axis], dims[axis] == Placement::kReplicated ? 1 : factor});
  }
  return placements;
}

bool explains(const Shard& noted, const Shard& held, const NotedPart& part) {
  if (held.chunks.size() > 1 || held.sizes != part.written || noted.sizes != part.sizes) return false;
  return noted.chunks.empty() || noted.chunks[0].offsets == part.offsets;
}

std::vector<TruePlace> places_of(const std::vector<Shard>& held, std::span<const NotedPart> parts) {
  std::map<std::pair<Sizes, Sizes>, TruePlace> places;
  for (size_t rank = 0; rank < held.size(); ++rank) {
    for (const Chunk& chunk : held[rank].chunks) {
      places.try_emplace({chunk.offsets, chunk.sizes},
                         TruePlace{chunk.offsets, chunk.sizes, static_cast<int64_t>(rank), -1});
    }
  }
  for (size_t number = 0; number < parts.size(); ++number) {
    for (const Chunk& chunk : held[static_cast<size_t>(parts[number].rank)].chunks) {
      places.at({chunk.offsets, chunk.sizes}).part = static_cast<int64_t>(number);
    }
  }
  std::vector<TruePlace> found;
  for (auto& [box, place] : places) found.push_back(std::move(place));
  return found;
}

}  // namespace

TruePlaces find_true_places(const Sizes& shape, const Sizes& mesh_shape, std::span<const std::vector<int64_t>> choices,
                            std::span<const NotedPart> parts) {
  TTE_CHECK(choices.size() == mesh_shape.size(), "find_true_places", "there are choices for ", choices.size(),
            " axes, the mesh has ", mesh_shape.size());
  const int64_t num_ranks = num_elements(mesh_shape);
  const bool has_ranks =
      std::ranges::all_of(parts, [&](const NotedPart& part) { return part.rank >= 0 && part.rank < num_ranks; });
  const bool has_choices = std::ranges::none_of(choices, [](const auto& of_axis) { return of_axis.empty(); });
  std::vector<std::vector<Shard>> ways;
  std::vector<size_t> chosen(choices.size(), 0);
  for (bool is_left = has_ranks && has_choices; is_left;) {
    Sizes dims;
    for (size_t axis = 0; axis < choices.size(); ++axis) dims.push_back(choices[axis][chosen[axis]]);
    const std::vector<Placement> placements = placements_of(dims, mesh_shape);
    const auto shards_by = [&](Reading reading) {
      return all_shards({shape, mesh_shape, read_placements(placements, mesh_shape, reading)});
    };
    const std::vector<Shard> noted = shards_by(Reading::kLeftToRight);
    std::vector<Shard> held = shards_by(Reading::kNested);
    const bool is_way = std::ranges::all_of(parts, [&](const NotedPart& part) {
      const auto rank = static_cast<size_t>(part.rank);
      return explains(noted[rank], held[rank], part);
    });
    if (is_way && std::ranges::find(ways, held) == ways.end()) ways.push_back(std::move(held));
    size_t axis = 0;
    while (axis < chosen.size() && ++chosen[axis] == choices[axis].size()) chosen[axis++] = 0;
    is_left = axis < chosen.size();
  }
  return {ways.size(), ways.size() == 1 ? places_of(ways[0], parts) : std::vector<TruePlace>()};
}

}  // namespace torchtitan_ext::core
