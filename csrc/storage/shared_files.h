// Files of an earlier checkpoint that a later one shares with it, because what they hold has not changed.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "storage/index.h"

namespace torchtitan_ext::storage {

// A record of an earlier checkpoint with the bytes that a later one wants.
struct EarlierRecord {
  size_t file = 0;     // position in the files of the earlier index
  SavedRecord record;  // as wanted, at its place in that file
};

// For each wanted record the one of the same key, box, dtype and sum, wherever it lies. Nothing where the bytes differ,
// or where either side has no sum. Throws FormatError.
std::vector<std::optional<EarlierRecord>> find_unchanged(const Index& earlier, const std::vector<SavedRecord>& wanted);

// A file of an earlier checkpoint in a later one, with those of its records that the later one uses. `save_id` is that of
// the save that wrote the file.
SavedFile share_file(SavedFile file, const SaveId& save_id, std::string name, std::vector<SavedRecord> records);

// Of each shared file one, with the records that all ranks use of it. The others stay as they are, in front. Throws
// FormatError where two ranks tell different things of a file.
std::vector<SavedFile> join_shared(std::vector<SavedFile> files);

}  // namespace torchtitan_ext::storage
