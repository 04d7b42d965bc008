// What the parts of a checkpoint come to, per key and per file, and which of its chunks lie nowhere. All in one pass over
// the parts, of which a thousand ranks make millions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/cover.h"
#include "core/metadata_columns.h"

namespace torchtitan_ext::core {

struct PartSum {
  int64_t num_parts = 0;
  int64_t num_bytes = 0;
  int64_t end = 0;  // one past the last byte of the last part in its file
};

// One per key, in their order. Parts of names that are no keys count nowhere.
std::vector<PartSum> sum_parts_by_key(const MetadataColumns& columns);

struct FileSum {
  uint32_t path = 0;  // a name
  PartSum sum;
};

// In the order in which the parts first name the files.
std::vector<FileSum> sum_parts_by_file(const MetadataColumns& columns);

// The parts of each file, and the chunks that the metadata describes; each is looked up once, at the first use. The
// columns must stay as they are.
class SavedParts {
 public:
  explicit SavedParts(const MetadataColumns& columns) : columns_(columns) {}

  // Positions in columns.parts(), in their order.
  const std::vector<uint32_t>& of_file(std::string_view path);
  // A number in columns.sizes; SavedPart::kNone where the tensor's list has no chunk at these offsets.
  uint32_t sizes_of_chunk(const SavedKey& tensor, uint32_t offsets);

 private:
  const MetadataColumns& columns_;
  bool is_grouped_ = false;
  std::vector<std::vector<uint32_t>> of_path_;                                     // by the number of the name
  std::unordered_map<uint32_t, std::unordered_map<uint32_t, uint32_t>> of_lists_;  // sizes by offsets
};

// A chunk, or a value that is no tensor, that has no part.
struct UnplacedChunk {
  size_t key = 0;
  uint32_t offsets = SavedPart::kNone;
};

// The first `limit` of them.
std::vector<UnplacedChunk> find_unplaced(const MetadataColumns& columns, size_t limit);

// A key whose chunks do not hold every element of its tensor exactly once.
struct UncoveredKey {
  size_t key = 0;
  CoverDefect defect;  // without the chunks that hold the element
};

// All of them. A list of chunks fits one shape: where a file has it for many, their first elements in row-major order
// that are missing are looked for of a few, and of the others any one is named.
std::vector<UncoveredKey> find_uncovered(const MetadataColumns& columns);

}  // namespace torchtitan_ext::core
