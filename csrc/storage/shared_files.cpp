#include "storage/shared_files.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "storage/errors.h"

namespace torchtitan_ext::storage {
namespace {

void set_records(SavedFile& file, std::vector<SavedRecord> records) {
  std::ranges::sort(records, {}, &SavedRecord::offset);
  file.records = encode_records(records);
  file.sums = encode_sums(records);
}

bool are_the_same(const SavedFile& first, const SavedFile& second) {
  return first.num_bytes == second.num_bytes && first.footer_offset == second.footer_offset &&
         first.footer_digest == second.footer_digest && first.save_id == second.save_id;
}

}  // namespace

std::vector<std::optional<EarlierRecord>> find_unchanged(const Index& earlier, const std::vector<SavedRecord>& wanted) {
  std::unordered_multimap<std::string_view, size_t> by_key;
  for (size_t number = 0; number < wanted.size(); ++number) by_key.emplace(wanted[number].fqn, number);
  std::vector<std::optional<EarlierRecord>> found(wanted.size());
  for (size_t position = 0; position < earlier.files.size(); ++position) {
    const SavedFile& file = earlier.files[position];
    const StoredSums sums(file.sums, file.name);
    if (sums.size() == 0) continue;
    size_t tensor_record = 0;
    parse_records(file.records, file.footer_offset, file.name, [&](const SavedRecord& record) {
      if (!record.is_tensor) return;
      const size_t at = tensor_record++;
      const auto [first, last] = by_key.equal_range(record.fqn);
      for (auto same = first; same != last; ++same) {
        const SavedRecord& want = wanted[same->second];
        if (!want.sum || want.offsets != record.offsets || want.sizes != record.sizes || want.dtype != record.dtype ||
            want.sum != sums.of(at, record.fqn)) {
          continue;
        }
        EarlierRecord& place = found[same->second].emplace(EarlierRecord{position, want});
        place.record.is_tensor = true;
        place.record.offset = record.offset;
        place.record.num_bytes = record.num_bytes;
        place.record.data_offset = record.data_offset;
      }
    });
  }
  return found;
}

SavedFile share_file(SavedFile file, const SaveId& save_id, std::string name, std::vector<SavedRecord> records) {
  file.save_id = save_id;
  file.name = std::move(name);
  set_records(file, std::move(records));
  return file;
}

std::vector<SavedFile> join_shared(std::vector<SavedFile> files) {
  std::vector<SavedFile> joined;
  std::map<std::string, std::pair<SavedFile, std::vector<SavedRecord>>> shared;
  for (SavedFile& file : files) {
    if (!file.save_id) {
      joined.push_back(std::move(file));
      continue;
    }
    std::vector<SavedRecord> records = records_of(file);
    const auto [entry, is_new] = shared.try_emplace(file.name, file, std::vector<SavedRecord>());
    if (!is_new && !are_the_same(entry->second.first, file)) {
      throw_format_error(file.name, file.footer_offset, "ranks tell different things of this shared file");
    }
    std::ranges::move(records, std::back_inserter(entry->second.second));
  }
  for (auto& [name, entry] : shared) {
    set_records(entry.first, std::move(entry.second));
    joined.push_back(std::move(entry.first));
  }
  return joined;
}

}  // namespace torchtitan_ext::storage
