// Key tables, agreement and write plans for Python. Like core.cpp it converts and decides nothing.
#include "bindings/plan.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/convert.h"
#include "core/agreement.h"
#include "core/boxes.h"
#include "core/cover.h"
#include "core/replica_digests.h"
#include "core/write_plan.h"

namespace py = pybind11;
using namespace torchtitan_ext::core;      // NOLINT: this file only translates that namespace
using namespace torchtitan_ext::bindings;  // NOLINT: and what all bindings convert

namespace {

std::string_view to_view(const py::bytes& bytes) { return static_cast<std::string_view>(bytes); }

py::list names_py(const World& world) {
  py::list names;
  for (uint32_t key = 0; key < world.num_keys(); ++key) names.append(to_str(world.name(key)));
  return names;
}

py::list paths_py(const World& world) {
  py::list paths;
  for (uint32_t key = 0; key < world.num_keys(); ++key) {
    const auto [section, form] = world.path(key);
    if (form == 0) {
      paths.append(py::none());
      continue;
    }
    const PathForm& path_form = world.sections()[section].columns.forms[form - 1];
    const std::vector<std::string_view> parts = cut_path(world.name(key), path_form);
    py::tuple path(parts.size());
    for (size_t part = 0; part < parts.size(); ++part) {
      const bool is_position = path_form.parts[part].second;
      path[part] =
          is_position ? py::object(py::int_(std::stoll(std::string(parts[part])))) : py::object(to_str(parts[part]));
    }
    paths.append(std::move(path));
  }
  return paths;
}

py::object mesh_py(const MeshForm& mesh, int64_t origin) {
  Sizes ranks;
  const int64_t num_ranks = num_elements(mesh.shape);
  Sizes coordinate(mesh.shape.size(), 0);
  for (int64_t index = 0; index < num_ranks; ++index) {
    ranks.push_back(rank_at(mesh, origin, coordinate));
    for (size_t axis = coordinate.size(); axis-- > 0;) {
      if (++coordinate[axis] < mesh.shape[axis]) break;
      coordinate[axis] = 0;
    }
  }
  const py::object names = mesh.has_names ? py::object(py::tuple(py::cast(mesh.names))) : py::none();
  return py::make_tuple(to_tuple(mesh.shape), to_tuple(ranks), names);
}

const KeyClass& class_at(const World& world, size_t index) { return world.classes().at(index); }

const Member& member_at(const KeyClass& of_keys, int64_t rank) {
  for (const Member& member : of_keys.members) {
    if (member.rank == rank) return member;
  }
  throw std::out_of_range("World: the rank has no key of this class");
}

// Global shape, mesh or None, coordinate, placements, local sizes, order or None: a ShardReport.
py::tuple report_py(const World& world, size_t index, int64_t rank) {
  const KeyClass& of_keys = class_at(world, index);
  const Member& member = member_at(of_keys, rank);
  const WorldKind& kind = world.kind_of(member);
  const py::tuple shape = to_tuple(kind.kind.shape);
  if (kind.kind.mesh == Kind::kPlain)
    return py::make_tuple(shape, py::none(), py::tuple(), py::tuple(), shape, py::none());
  const Standing& standing = world.standing(member);
  py::list placements;
  for (const Placement& placement : kind.kind.placements) {
    placements.append(py::make_tuple(placement.dim, placement.split_factor));
  }
  py::object order = py::none();
  if (kind.kind.has_order) order = to_tuple(kind.kind.order);
  return py::make_tuple(shape, mesh_py(kind.mesh, standing.origin), to_tuple(standing.coordinate),
                        py::tuple(placements), to_tuple(world.local_sizes(of_keys, member)), order);
}

// Type, dtype, shape of what a rank holds: what ranks can disagree in.
py::tuple traits_py(const World& world, size_t index, int64_t rank) {
  const Kind& kind = world.kind_of(member_at(class_at(world, index), rank)).kind;
  return py::make_tuple(static_cast<int>(kind.type), kind.dtype, to_tuple(kind.shape));
}

// Type, dtype, shape, requires_grad, is_plain.
py::tuple class_py(const World& world, size_t index) {
  const KeyClass& of_keys = class_at(world, index);
  const Kind& kind = world.kind_of(of_keys);
  return py::make_tuple(static_cast<int>(kind.type), kind.dtype, to_tuple(kind.shape), kind.requires_grad,
                        of_keys.is_plain);
}

py::list ranks_py(const World& world, size_t index) {
  py::list ranks;
  for (const Member& member : class_at(world, index).members) ranks.append(member.rank);
  return ranks;
}

// Per replica: steps, ranks, and per shard its ranks and boxes.
py::list replicas_py(const World& world, size_t index) {
  py::list replicas;
  for (const Replica& replica : class_at(world, index).replicas) {
    py::list shards;
    for (const HeldShard& shard : replica.shards) {
      py::tuple boxes(shard.boxes.size());
      for (size_t box = 0; box < shard.boxes.size(); ++box) boxes[box] = to_box(shard.boxes[box]);
      shards.append(py::make_tuple(to_tuple(shard.ranks), boxes));
    }
    replicas.append(py::make_tuple(to_tuple(replica.steps), to_tuple(replica.ranks), shards));
  }
  return replicas;
}

// Class, steps and ranks, where ranks take their placements to mean something else.
py::list unforeseen_py(const World& world) {
  py::list found;
  for (size_t index = 0; index < world.classes().size(); ++index) {
    for (const Replica& replica : world.classes()[index].replicas) {
      if (!replica.is_foreseen) found.append(py::make_tuple(index, to_tuple(replica.steps), to_tuple(replica.ranks)));
    }
  }
  return found;
}

const char* code_name(Trouble::Code code) {
  switch (code) {
    case Trouble::Code::kType:
      return "type";
    case Trouble::Code::kDtype:
      return "dtype";
    case Trouble::Code::kShape:
      return "shape";
    case Trouble::Code::kNoMatch:
      return "no_match";
    case Trouble::Code::kInDoubt:
      return "in_doubt";
    case Trouble::Code::kInvalid:
      return "invalid";
    case Trouble::Code::kAbsent:
      return "absent";
    case Trouble::Code::kNotExact:
      break;
  }
  return "not_exact";
}

// None, or code, first and second rank, the rest by code.
py::object trouble_py(const World& world, size_t index) {
  const std::optional<Trouble>& trouble = class_at(world, index).trouble;
  if (!trouble) return py::none();
  const auto with = [&](const py::object& rest) {
    return py::make_tuple(code_name(trouble->code), trouble->first, trouble->second, rest);
  };
  switch (trouble->code) {
    case Trouble::Code::kNoMatch:
    case Trouble::Code::kInDoubt:
      return with(py::make_tuple(trouble->resolution.first, trouble->resolution.second,
                                 to_tuple(trouble->resolution.coordinate)));
    case Trouble::Code::kInvalid:
      return with(py::str(trouble->message));
    case Trouble::Code::kAbsent:
      return with(to_tuple(trouble->absent));
    case Trouble::Code::kNotExact: {
      const char* const what = trouble->defect.kind == CoverDefect::Kind::kGap       ? "gap"
                               : trouble->defect.kind == CoverDefect::Kind::kOverlap ? "overlap"
                                                                                     : "out_of_bounds";
      py::list holders;
      for (size_t chunk = 0; chunk < trouble->chunks.size(); ++chunk) {
        holders.append(py::make_tuple(to_box(trouble->chunks[chunk]), trouble->owners[chunk]));
      }
      return with(py::make_tuple(what, to_tuple(trouble->defect.element), holders));
    }
    default:
      return with(py::none());
  }
}

// Shape and names of the meshes of all ranks, in the order of ranks.
py::list meshes_py(const World& world) {
  py::list meshes;
  for (const Section& section : world.sections()) {
    for (const MeshForm& mesh : section.columns.meshes) {
      meshes.append(py::make_tuple(to_tuple(mesh.shape), mesh.names));
    }
  }
  return meshes;
}

py::list written_boxes_py(const World& world, size_t index) {
  py::list boxes;
  for (const HeldShard& shard : WritePlan::written_shards(class_at(world, index))) {
    for (const Chunk& box : shard.boxes) boxes.append(to_box(box));
  }
  return boxes;
}

// Differences (key, two sides of rank, digest and whether it was cut, whether presumed), equal keys, uncompared keys.
py::tuple compare_py(const ReplicaDigests& digests) {
  ReplicaDigests::Comparison compared;
  {
    py::gil_scoped_release release;
    compared = digests.compare();
  }
  py::list differing;
  for (const auto& found : compared.differing) {
    const auto side = [](int64_t rank, const std::string& digest, bool is_cut) {
      return py::make_tuple(rank, py::bytes(digest), is_cut);
    };
    differing.append(py::make_tuple(found.key, side(found.first, found.first_digest, found.first_is_cut),
                                    side(found.second, found.second_digest, found.second_is_cut), found.is_presumed));
  }
  return py::make_tuple(differing, compared.equal, compared.uncompared);
}

// Per class of which something is written: section, steps, first chunk, keys, boxes with their positions.
py::list read_decision_py(const py::bytes& bytes, const std::vector<std::vector<uint32_t>>& kind_of) {
  py::list result;
  for (const ClassWrites& writes : read_decision(to_view(bytes), kind_of)) {
    py::list boxes;
    for (const auto& [position, box] : writes.boxes) boxes.append(py::make_tuple(position, to_box(box)));
    result.append(py::make_tuple(writes.section, to_tuple(writes.steps), writes.first_chunk, writes.keys, boxes));
  }
  return result;
}

Sizes to_sizes(const py::handle& numbers) {
  Sizes sizes;
  for (const py::handle number : py::reinterpret_borrow<py::tuple>(numbers)) sizes.push_back(number.cast<int64_t>());
  return sizes;
}

// From objects with tuples as offsets and sizes, such as DCP's ChunkStorageMetadata.
ChunkIndex index_chunks(const py::list& chunks) {
  const py::str offsets("offsets");
  const py::str sizes("sizes");
  std::vector<Chunk> saved;
  saved.reserve(chunks.size());
  for (const py::handle chunk : chunks)
    saved.push_back({to_sizes(chunk.attr(offsets)), to_sizes(chunk.attr(sizes)), {}});
  return ChunkIndex(std::move(saved));
}

py::bytes index_bytes(const ChunkIndex& index) {
  WireWriter out;
  for (const Chunk& chunk : index.chunks()) {
    out.put_sizes(chunk.offsets);
    out.put_sizes(chunk.sizes);
  }
  return py::bytes(out.take());
}

py::list overlaps_py(const ChunkIndex& index, const std::vector<std::tuple<Sizes, Sizes, Sizes>>& wanted_tuples) {
  std::vector<Chunk> wanted;
  for (const auto& [offsets, sizes, local_offsets] : wanted_tuples) wanted.push_back({offsets, sizes, local_offsets});
  py::list result;
  for (const Overlap& overlap : index.find_overlaps(wanted)) {
    result.append(py::make_tuple(overlap.wanted, overlap.saved, to_tuple(overlap.saved_offsets),
                                 to_tuple(overlap.local_offsets), to_tuple(overlap.sizes)));
  }
  return result;
}

}  // namespace

void register_plan(py::module_& module) {
  module.def("read_decision", &read_decision_py, py::arg("decision"), py::arg("kind_of"));

  py::class_<ChunkIndex>(module, "ChunkIndex", "Saved chunks, sorted once; see csrc/core/plan.h.")
      .def(py::init(&index_chunks), py::arg("chunks"))
      .def("to_bytes", &index_bytes)
      .def("box", [](const ChunkIndex& index, size_t chunk) { return to_box(index.chunks().at(chunk)); })
      .def("boxes",
           [](const ChunkIndex& index) {
             py::list boxes;
             for (const Chunk& chunk : index.chunks()) boxes.append(to_box(chunk));
             return boxes;
           })
      .def(
          "covers", [](const ChunkIndex& index, const Sizes& shape) { return index.covers(shape); },
          py::call_guard<py::gil_scoped_release>())
      .def("find_overlaps", &overlaps_py, py::arg("wanted"));

  py::class_<World>(module, "World", "What all ranks' key tables say together; see csrc/core/agreement.h.")
      .def(py::init<>())
      .def("add_section", [](World& world, const py::bytes& bytes) { return world.add_section(to_view(bytes)); })
      .def("add_rank", [](World& world, std::vector<size_t> sections,
                          const py::bytes& part) { world.add_rank(std::move(sections), to_view(part)); })
      .def("agree", &World::agree, py::call_guard<py::gil_scoped_release>(), py::arg("every_rank_reports"))
      .def_property_readonly("num_ranks", &World::num_ranks)
      .def_property_readonly("num_classes", [](const World& world) { return world.classes().size(); })
      .def("names", &names_py)
      .def("paths", &paths_py)
      .def("meshes", &meshes_py)
      .def("keys", [](const World& world, size_t index) { return class_at(world, index).keys; })
      .def("kind", &class_py)
      .def("ranks", &ranks_py)
      .def("replicas", &replicas_py)
      .def("unforeseen", &unforeseen_py)
      .def("trouble", &trouble_py)
      .def("report", &report_py)
      .def("traits", &traits_py)
      .def("written_boxes", &written_boxes_py);

  py::class_<ReplicaDigests>(module, "ReplicaDigests", "Whether replicas are equal; see csrc/core/replica_digests.h.")
      .def(py::init<const World&>(), py::keep_alive<1, 2>())
      .def("add_message", [](ReplicaDigests& digests, size_t section,
                             const py::bytes& bytes) { return digests.add_message(section, to_view(bytes)); })
      .def("add_rank", &ReplicaDigests::add_rank)
      .def("compare", &compare_py);

  py::class_<WritePlan>(module, "WritePlan", "Who writes what; see csrc/core/write_plan.h.")
      .def(py::init<const World&, bool, const std::vector<uint32_t>&, std::vector<uint32_t>,
                    const std::vector<uint32_t>&>(),
           py::keep_alive<1, 2>(), py::call_guard<py::gil_scoped_release>(), py::arg("world"), py::arg("lowest_only"),
           py::arg("lowest_keys"), py::arg("hosts"), py::arg("equal_keys") = std::vector<uint32_t>())
      .def("decision", [](const WritePlan& plan, int64_t rank) { return py::bytes(plan.decision(rank)); })
      .def_property_readonly("load_bytes", &WritePlan::load_bytes)
      .def("keys_of_several_boxes", &WritePlan::keys_of_several_boxes);
}
