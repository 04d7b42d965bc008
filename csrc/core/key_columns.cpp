#include "core/key_columns.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr uint64_t kVersion = 1;
// More ranks than any machine has; a mesh of so many can still be counted.
constexpr int64_t kMaxMeshRanks = int64_t{1} << 24;
// A strided shard has as many boxes as its split factors say, so these must end somewhere.
constexpr int64_t kMaxSplitFactor = int64_t{1} << 20;

void put_mesh(const MeshForm& mesh, WireWriter& out) {
  out.put_sizes(mesh.shape);
  out.put(mesh.is_strided);
  for (const int64_t rank : mesh.ranks) out.put_signed(rank);
  out.put(mesh.has_names);
  if (mesh.has_names) {
    for (const std::string& name : mesh.names) out.put_string(name);
  }
}

MeshForm get_mesh(WireReader& in) {
  MeshForm mesh;
  mesh.shape = in.get_sizes("mesh shape");
  int64_t num_ranks = 1;
  for (const int64_t size : mesh.shape) {
    if (size < 1 || size > kMaxMeshRanks / num_ranks) in.fail("mesh shape", concat("an axis of ", size, " ranks"));
    num_ranks *= size;
  }
  mesh.is_strided = in.get_index("mesh form", 2) == 1;
  const size_t num_numbers = mesh.is_strided ? mesh.shape.size() : static_cast<size_t>(num_ranks);
  if (num_numbers > in.num_left()) in.fail("mesh ranks", concat(num_numbers, " numbers, more than bytes are left"));
  mesh.ranks.resize(num_numbers);
  for (int64_t& rank : mesh.ranks) {
    rank = in.get_signed("mesh ranks");
    if (rank > kMaxMeshRanks || rank < -kMaxMeshRanks) in.fail("mesh ranks", concat("got ", rank));
  }
  mesh.has_names = in.get_index("mesh names", 2) == 1;
  for (size_t axis = 0; mesh.has_names && axis < mesh.shape.size(); ++axis) {
    mesh.names.emplace_back(in.get_string("mesh name"));
  }
  return mesh;
}

void put_traits(const Kind& kind, WireWriter& out) {
  out.put(static_cast<uint64_t>(kind.type));
  out.put_string(kind.dtype);
  out.put(static_cast<uint64_t>(kind.itemsize));
  out.put_sizes(kind.shape);
}

void put_placements(const Kind& kind, WireWriter& out) {
  for (const Placement& placement : kind.placements) {
    out.put_signed(placement.dim);
    out.put_signed(placement.split_factor);
  }
  out.put(kind.has_order);
  if (kind.has_order) put_steps(kind.order, out);
}

int64_t get_split_factor(WireReader& in) {
  const int64_t split_factor = in.get_signed("split factor");
  if (split_factor > kMaxSplitFactor) in.fail("split factor", concat("got ", split_factor));
  return split_factor;
}

Kind get_kind(WireReader& in, const std::vector<MeshForm>& meshes) {
  Kind kind;
  kind.type = static_cast<EntryType>(in.get_index("entry type", 4));
  kind.dtype = in.get_string("dtype");
  kind.itemsize = static_cast<int64_t>(in.get_index("itemsize", 256));
  kind.shape = in.get_sizes("global shape");
  int64_t num_bytes = std::max<int64_t>(kind.itemsize, 1);
  for (const int64_t size : kind.shape) {
    if (size < 0 || __builtin_mul_overflow(num_bytes, std::max<int64_t>(size, 1), &num_bytes)) {
      in.fail("global shape", concat("a dim of ", size));
    }
  }
  kind.requires_grad = in.get_index("requires_grad", 2) == 1;
  kind.mesh = static_cast<int64_t>(in.get_index("mesh", meshes.size() + 1)) - 1;
  if (kind.mesh == Kind::kPlain) return kind;
  if (kind.type != EntryType::kTensor) in.fail("mesh", "what is no tensor has a mesh");
  for (size_t axis = 0; axis < meshes[static_cast<size_t>(kind.mesh)].shape.size(); ++axis) {
    const int64_t dim = in.get_signed("placement");
    kind.placements.push_back({dim, get_split_factor(in)});
  }
  kind.has_order = in.get_index("order", 2) == 1;
  if (kind.has_order) kind.order = get_steps(in);
  return kind;
}

// How many bytes a key shares with the one before.
size_t num_shared(std::string_view name, std::string_view before) {
  const size_t limit = std::min(before.size(), name.size());
  size_t shared = 0;
  while (shared < limit && name[shared] == before[shared]) ++shared;
  return shared;
}

// Three columns compress better than one of mixed fields: bytes shared, bytes of its own, and these.
void put_names(const KeyColumns& columns, WireWriter& out) {
  std::vector<std::string_view> rests;
  for (size_t key = 0; key < columns.num_keys(); ++key) {
    const size_t shared = key == 0 ? 0 : num_shared(columns.name(key), columns.name(key - 1));
    out.put(shared);
    rests.push_back(columns.name(key).substr(shared));
  }
  for (const std::string_view rest : rests) out.put(rest.size());
  for (const std::string_view rest : rests) out.append(rest);
}

void get_names(WireReader& in, KeyColumns& columns) {
  std::vector<size_t> shared(columns.num_keys());
  std::vector<size_t> rest(columns.num_keys());
  for (size_t& count : shared) count = in.get_index("shared bytes of a key", kMaxNameBytes);
  for (size_t& count : rest) count = in.get_index("bytes of a key", kMaxNameBytes);
  columns.name_ends.reserve(columns.num_keys());
  size_t begin_before = 0;
  for (size_t key = 0; key < columns.num_keys(); ++key) {
    const size_t begin = columns.names.size();
    if (shared[key] > begin - begin_before) in.fail("shared bytes of a key", "more than the key before has");
    if (shared[key] + rest[key] > kMaxNameBytes - begin) {
      in.fail("key", concat("all keys together take more than ", kMaxNameBytes, " bytes"));
    }
    columns.names.append(columns.names, begin_before, shared[key]);
    columns.names.append(in.get_bytes("key", rest[key]));
    columns.name_ends.push_back(columns.names.size());
    begin_before = begin;
  }
}

}  // namespace

void put_steps(const std::vector<ShardStep>& steps, WireWriter& out) {
  out.put(steps.size());
  for (const ShardStep& step : steps) {
    out.put_signed(step.axis);
    out.put_signed(step.dim);
    out.put_signed(step.split_factor);
  }
}

std::vector<ShardStep> get_steps(WireReader& in) {
  std::vector<ShardStep> steps(in.get_count("order", 3));
  for (ShardStep& step : steps) {
    step.axis = in.get_signed("order");
    step.dim = in.get_signed("order");
    step.split_factor = get_split_factor(in);
  }
  return steps;
}

std::string encode_mesh(const MeshForm& mesh) {
  WireWriter out;
  put_mesh(mesh, out);
  return out.take();
}

std::string encode_traits(const Kind& kind) {
  WireWriter out;
  put_traits(kind, out);
  return out.take();
}

std::string encode_placements(const Kind& kind) {
  WireWriter out;
  put_placements(kind, out);
  return out.take();
}

std::string encode_columns(const KeyColumns& columns) {
  WireWriter out;
  out.put(kVersion);
  out.put(columns.meshes.size());
  for (const MeshForm& mesh : columns.meshes) put_mesh(mesh, out);
  out.put(columns.kinds.size());
  for (const Kind& kind : columns.kinds) {
    put_traits(kind, out);
    out.put(kind.requires_grad);
    out.put(static_cast<uint64_t>(kind.mesh + 1));
    if (kind.mesh != Kind::kPlain) put_placements(kind, out);
  }
  out.put(columns.forms.size());
  for (const PathForm& form : columns.forms) {
    out.put(form.parts.size());
    for (const auto& [num_dots, is_position] : form.parts) out.put(static_cast<uint64_t>(2 * num_dots + is_position));
  }
  out.put(columns.num_keys());
  for (const uint32_t kind : columns.kind_of) out.put(kind);
  for (const uint32_t form : columns.form_of) out.put(form);
  put_names(columns, out);
  return out.take();
}

KeyColumns decode_columns(std::string_view bytes) {
  WireReader in(bytes, "key table");
  KeyColumns columns;
  if (const uint64_t version = in.get("version"); version != kVersion) {
    in.fail("version", concat("got ", version, ", expected ", kVersion));
  }
  const size_t num_meshes = in.get_count("meshes", 3);
  for (size_t mesh = 0; mesh < num_meshes; ++mesh) columns.meshes.push_back(get_mesh(in));
  const size_t num_kinds = in.get_count("kinds", 6);
  for (size_t kind = 0; kind < num_kinds; ++kind) columns.kinds.push_back(get_kind(in, columns.meshes));
  const size_t num_forms = in.get_count("path forms");
  for (size_t form = 0; form < num_forms; ++form) {
    PathForm& parts = columns.forms.emplace_back();
    const size_t num_parts = in.get_count("path form");
    for (size_t part = 0; part < num_parts; ++part) {
      const size_t coded = in.get_index("path form", kMaxNameBytes);
      parts.parts.emplace_back(coded / 2, coded % 2 == 1);
    }
  }
  const size_t num_keys = in.get_count("keys", 4);
  columns.kind_of.resize(num_keys);
  columns.form_of.resize(num_keys);
  for (uint32_t& kind : columns.kind_of) kind = static_cast<uint32_t>(in.get_index("kind of a key", num_kinds));
  for (uint32_t& form : columns.form_of) form = static_cast<uint32_t>(in.get_index("path of a key", num_forms + 1));
  get_names(in, columns);
  in.finish();
  return columns;
}

std::string encode_part(const RankPart& part) {
  WireWriter out;
  for (const Standing& standing : part.standings) {
    out.put_signed(standing.origin);
    for (const int64_t index : standing.coordinate) out.put_signed(index);
  }
  for (const Sizes& sizes : part.local_sizes) out.put_sizes(sizes);
  out.put(part.unusual.size());
  for (const auto& [key, sizes] : part.unusual) {
    out.put(key);
    out.put_sizes(sizes);
  }
  for (const auto& [key, boxes] : part.boxes) {
    out.put(key);
    out.put(boxes.size());
    for (const Chunk& box : boxes) {
      out.put_sizes(box.offsets);
      out.put_sizes(box.sizes);
    }
  }
  return out.take();
}

RankPart decode_part(std::string_view bytes, const KeyColumns& columns) {
  WireReader in(bytes, "part of a rank");
  RankPart part;
  for (const MeshForm& mesh : columns.meshes) {
    Standing& standing = part.standings.emplace_back();
    standing.origin = in.get_signed("first rank of a mesh");
    if (standing.origin > kMaxMeshRanks || standing.origin < -kMaxMeshRanks) {
      in.fail("first rank of a mesh", concat("got ", standing.origin));
    }
    for (const int64_t size : mesh.shape) {
      const int64_t index = in.get_signed("coordinate");
      if (index < 0 || index >= size) in.fail("coordinate", concat("got ", index, " on an axis of ", size));
      standing.coordinate.push_back(index);
    }
  }
  for (size_t kind = 0; kind < columns.kinds.size(); ++kind) part.local_sizes.push_back(in.get_sizes("local sizes"));
  const size_t num_unusual = in.get_count("unusual keys", 2);
  for (size_t index = 0; index < num_unusual; ++index) {
    const size_t key = in.get_index("unusual key", columns.num_keys());
    if (index > 0 && key <= part.unusual.back().first) in.fail("unusual key", "keys are not in increasing order");
    part.unusual.emplace_back(static_cast<uint32_t>(key), in.get_sizes("local sizes"));
  }
  for (size_t key = 0; key < columns.num_keys(); ++key) {
    if (columns.kinds[columns.kind_of[key]].type != EntryType::kBoxes) continue;
    if (in.get("key of boxes") != key) in.fail("key of boxes", concat("expected key ", key));
    auto& boxes = part.boxes.emplace_back(static_cast<uint32_t>(key), std::vector<Chunk>()).second;
    const size_t num_boxes = in.get_count("boxes", 2);
    for (size_t box = 0; box < num_boxes; ++box) {
      Sizes offsets = in.get_sizes("offsets of a box");
      boxes.push_back({std::move(offsets), in.get_sizes("sizes of a box"), {}});
    }
  }
  in.finish();
  return part;
}

}  // namespace torchtitan_ext::core
