// The index of a checkpoint, beside `.metadata`: what `.metadata` says about files, readable without a pickle, and
// where each tensor's bytes lie in its record. Sealed sections (sections.h) with the magic "TTEINDEX":
//
//     1  save     once: save id, size and digest of the `.metadata` that this index belongs to, notes
//     2  file     one per rank file: its name, size, footer, and its records
//     3  tables   where there is no `.metadata`: what it would say beside files and records (metadata_tables.h)
//     4  proof    free: the sums of tensor records
//     5  shared   one per rank file that an earlier save wrote: the id of that save, then as a file
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/chunk.h"
#include "storage/footer.h"

namespace torchtitan_ext::storage {

constexpr int64_t kNoMetadata = -1;

// One entry of a rank file.
struct SavedRecord {
  std::string fqn;
  bool is_tensor = false;    // one plain tensor, its elements row-major at `data_offset`; else a torch.save record
  bool has_offsets = false;  // whether its MetadataIndex has an offset
  int64_t index_hint = -1;   // of its MetadataIndex; -1 for none
  std::string dtype;         // "float32"; empty where it is no tensor
  core::Sizes offsets;       // of its chunk in the global tensor
  core::Sizes sizes;
  int64_t offset = 0;  // of the record in its file
  int64_t num_bytes = 0;
  int64_t data_offset = 0;  // of the elements in the file; 0 where it is no tensor
  // Of the hashes of its words at their positions in the global tensor (core/element_hash.h); only of tensors, and only
  // where the save took them.
  std::optional<uint64_t> sum;
};

struct SavedFile {
  std::string name;
  uint32_t rank = 0;
  int64_t num_bytes = 0;
  int64_t footer_offset = 0;
  uint64_t footer_digest = 0;  // of all bytes from `footer_offset` on
  std::string records;         // encoded: made by the rank that wrote the file, joined unread by the coordinator
  std::string sums;            // of its tensor records, encoded in the same way; empty where no record has one
  // Of the save that wrote the file, where that is another one than that of the index. Bytes of such a file that no
  // record names belong to the other save alone.
  std::optional<SaveId> save_id = std::nullopt;
};

struct Index {
  SaveId save_id{};
  int64_t metadata_bytes = 0;  // kNoMetadata where the tables stand for it
  uint64_t metadata_digest = 0;
  std::vector<std::pair<std::string, std::string>> notes;  // step, world size, versions: for people and later readers
  std::vector<SavedFile> files;
  std::string tables;     // encoded; empty where there are none
  bool has_sums = false;  // whether the save took sums, were it of no record
};

std::string encode_records(const std::vector<SavedRecord>& records);

// A sum is stored together with the key of its record, so that it is no sum of another key.
std::string encode_sums(const std::vector<SavedRecord>& records);

// What encode_sums has made, by the positions of the tensor records in the file.
class StoredSums {
 public:
  // Throws FormatError.
  StoredSums(std::string_view bytes, const std::string& where);

  size_t size() const { return sums_.size(); }
  // What the record has if `fqn` is its key; else an unrelated number.
  std::optional<uint64_t> of(size_t tensor_record, std::string_view fqn) const;

 private:
  std::vector<std::optional<uint64_t>> sums_;
};

// Gives each record, in order, to `take`, which must not keep it. Throws FormatError, also where a record does not lie
// before `footer_offset`.
void parse_records(std::string_view bytes, int64_t footer_offset, const std::string& where,
                   const std::function<void(const SavedRecord&)>& take);
std::vector<SavedRecord> parse_records(std::string_view bytes, int64_t footer_offset, const std::string& where);
// The same of a file, with the sums.
std::vector<SavedRecord> records_of(const SavedFile& file);

std::string encode_index(const Index& index);

// Throws FormatError, also where a file's name leads out of its directory.
Index parse_index(std::string_view bytes, const std::string& where);

// The save of an index (id, size and digest of `.metadata`, notes) from its first bytes, without files and without a
// look at its digest: the steps of a run are asked for it. Throws FormatError, also where the notes are longer.
Index parse_index_head(std::string_view bytes, const std::string& where);

}  // namespace torchtitan_ext::storage
