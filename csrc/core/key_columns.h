// What a rank holds, as columns: its keys, each with a kind, and the few kinds there are.
//
// A *kind* is all that ranks can say alike of a key: tensor or not, dtype, global shape, placements, stated order,
// mesh. Llama 405B with AdamW has 4,548 keys and 8 kinds. What is left is a rank's own *part*: where it stands on each
// mesh, and its local sizes per kind. So a table travels as two messages:
//
//   columns    equal bytes on ranks that hold alike      meshes (shape and strides), kinds, keys with kind and path
//   part       one rank's own, some twenty bytes         first rank and coordinate per mesh, local sizes per kind,
//                                                        keys whose local sizes are not those of their kind, boxes
//
// Keys are front-coded: each says how many bytes it shares with the key before it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/chunk.h"
#include "core/shard_layout.h"
#include "core/wire.h"

namespace torchtitan_ext::core {

// A mesh up to the rank at its origin, which is in the part: the meshes of all tensor parallel groups are one.
struct MeshForm {
  Sizes shape;
  bool is_strided = true;
  Sizes ranks;  // strides per axis (0 where an axis has one rank), or all ranks in row-major order
  bool has_names = false;
  std::vector<std::string> names;
};

enum class EntryType : uint8_t {
  kNone,    // nothing is held here; the key has a path
  kObject,  // no tensor
  kTensor,  // a tensor that placements describe, or a plain one
  kBoxes,   // a tensor that states its own boxes
};

struct Kind {
  static constexpr int64_t kPlain = -1;

  EntryType type = EntryType::kNone;
  std::string dtype;  // as Python prints it
  int64_t itemsize = 0;
  bool requires_grad = false;
  Sizes shape;
  int64_t mesh = kPlain;  // index into the meshes
  std::vector<Placement> placements;
  bool has_order = false;
  std::vector<ShardStep> order;

  const std::vector<ShardStep>* stated_order() const { return has_order ? &order : nullptr; }
};

// How a flat key is cut into a path: per part how many dots it holds, and whether it is a position in a sequence.
struct PathForm {
  std::vector<std::pair<int64_t, bool>> parts;
};

struct KeyColumns {
  std::vector<MeshForm> meshes;
  std::vector<Kind> kinds;
  std::vector<PathForm> forms;
  std::vector<uint32_t> kind_of;  // per key
  std::vector<uint32_t> form_of;  // per key an index into the forms plus 1, or 0 for a key without path
  std::string names;              // of all keys, one after the other
  std::vector<size_t> name_ends;

  size_t num_keys() const { return kind_of.size(); }
  std::string_view name(size_t key) const {
    const size_t begin = key == 0 ? 0 : name_ends[key - 1];
    return std::string_view(names).substr(begin, name_ends[key] - begin);
  }
};

struct Standing {
  int64_t origin = 0;  // global rank at coordinate 0 of a strided mesh
  Sizes coordinate;
};

struct RankPart {
  std::vector<Standing> standings;                             // per mesh
  std::vector<Sizes> local_sizes;                              // per kind; those of the tensors on meshes count
  std::vector<std::pair<uint32_t, Sizes>> unusual;             // key, its local sizes
  std::vector<std::pair<uint32_t, std::vector<Chunk>>> boxes;  // of every key of kind kBoxes, in order
};

// Keys of one message may take this many bytes when written out: front coding can promise more than it sends.
constexpr size_t kMaxNameBytes = size_t{1} << 28;

std::string encode_columns(const KeyColumns& columns);
std::string encode_part(const RankPart& part);
// Kinds and meshes as bytes, equal for equal ones; `kind.mesh` is not among them.
std::string encode_mesh(const MeshForm& mesh);
std::string encode_traits(const Kind& kind);
std::string encode_placements(const Kind& kind);
void put_steps(const std::vector<ShardStep>& steps, WireWriter& out);
std::vector<ShardStep> get_steps(WireReader& in);

// Throw WireError.
KeyColumns decode_columns(std::string_view bytes);
RankPart decode_part(std::string_view bytes, const KeyColumns& columns);

}  // namespace torchtitan_ext::core
