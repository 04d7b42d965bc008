#include "storage/index.h"

#include <algorithm>
#include <map>

#include "storage/bytes.h"
#include "storage/digest.h"
#include "storage/element_types.h"
#include "storage/sections.h"

namespace torchtitan_ext::storage {
namespace {

constexpr std::string_view kMagic = "TTEINDEX";
constexpr uint32_t kSaveTag = 1, kFileTag = 2, kTablesTag = 3, kProofTag = 4, kSharedTag = 5;
constexpr uint8_t kTensorFlag = 1, kOffsetsFlag = 2;
constexpr uint8_t kSumFlag = 1;
constexpr uint64_t kLeastRecordBytes = 4 + 4 + 4 * 8;
constexpr uint64_t kSumBytes = 1 + 8;

std::string encode_file(const SavedFile& file) {
  ByteWriter out;
  out.text(file.name).number(file.rank).number(file.num_bytes).number(file.footer_offset).number(file.footer_digest);
  return out.raw(file.records).take();
}

std::string encode_shared(const SavedFile& file) {
  ByteWriter out;
  for (const uint8_t byte : *file.save_id) out.number(byte);
  return out.raw(encode_file(file)).take();
}

bool leads_out(std::string_view name) {
  return name.empty() || name == "." || name == ".." || name.find('/') != name.npos || name.find('\0') != name.npos;
}

SavedFile parse_file(const Section& section, const std::string& where, uint64_t& num_tensors) {
  ByteReader reader(section.bytes, where, section.offset);
  SavedFile file;
  file.name = reader.text();
  if (leads_out(file.name)) throw_format_error(where, reader.byte(), "a file's name leads out of the directory");
  file.rank = reader.number<uint32_t>();
  file.num_bytes = reader.number<int64_t>();
  file.footer_offset = reader.number<int64_t>();
  file.footer_digest = reader.number<uint64_t>();
  if (file.footer_offset < 0 || file.footer_offset > file.num_bytes) {
    throw_format_error(where, reader.byte(), file.name, " has ", file.num_bytes, " bytes and its footer at ",
                       file.footer_offset);
  }
  file.records = reader.raw(reader.left());
  parse_records(file.records, file.footer_offset, where + ", records of " + file.name,
                [&](const SavedRecord& record) { num_tensors += record.is_tensor ? 1 : 0; });
  return file;
}

SavedFile parse_shared(const Section& section, const std::string& where, uint64_t& num_tensors) {
  ByteReader reader(section.bytes, where, section.offset);
  SaveId save_id{};
  std::ranges::copy(reader.raw(save_id.size()), save_id.begin());
  const int64_t offset = reader.byte();
  SavedFile file = parse_file({section.tag, section.flags, reader.raw(reader.left()), offset}, where, num_tensors);
  file.save_id = save_id;
  return file;
}

// The sections of the files stand before this one.
std::string encode_proof(const std::vector<SavedFile>& files) {
  ByteWriter out;
  out.number(static_cast<uint32_t>(files.size()));
  for (const SavedFile& file : files) out.raw(file.sums.empty() ? encode_sums({}) : file.sums);
  return out.take();
}

void parse_proof(const Section& section, const std::string& where, const std::vector<uint64_t>& num_tensors,
                 std::vector<SavedFile>& files) {
  ByteReader reader(section.bytes, where, section.offset);
  const auto num_files = reader.number<uint32_t>();
  if (num_files != files.size()) {
    throw_format_error(where, reader.byte(), "has fingerprints of ", num_files, " files, and ", files.size(), " files");
  }
  for (size_t number = 0; number < files.size(); ++number) {
    const uint64_t num_sums = reader.count(reader.number<uint64_t>(), kSumBytes);
    const std::string_view sums = reader.raw(num_sums * kSumBytes);
    if (num_sums == 0) continue;
    if (num_sums != num_tensors[number]) {
      throw_format_error(where, reader.byte(), files[number].name, " has ", num_tensors[number], " tensors and ",
                         num_sums, " fingerprints");
    }
    files[number].sums = ByteWriter().number(num_sums).raw(sums).take();
  }
  if (reader.left() != 0) throw_format_error(where, reader.byte(), reader.left(), " bytes stand behind fingerprints");
}

void parse_save(const Section& section, const std::string& where, Index& index) {
  ByteReader reader(section.bytes, where, section.offset);
  std::ranges::copy(reader.raw(index.save_id.size()), index.save_id.begin());
  index.metadata_bytes = reader.number<int64_t>();
  index.metadata_digest = reader.number<uint64_t>();
  const uint64_t num_notes = reader.count(reader.number<uint32_t>(), 8);
  for (uint64_t note = 0; note < num_notes; ++note) {
    const std::string_view name = reader.text();
    index.notes.emplace_back(name, reader.text());
  }
}

void check_inside(const SavedRecord& record, int64_t footer_offset, const ByteReader& reader) {
  const bool is_inside = record.offset >= 0 && record.num_bytes >= 0 && record.offset <= footer_offset &&
                         record.num_bytes <= footer_offset - record.offset;
  // Sums and differences of what stands outside need be no int64.
  const bool is_data_inside = !record.is_tensor || (is_inside && record.data_offset >= record.offset &&
                                                    record.data_offset - record.offset <= record.num_bytes);
  if (!is_inside || !is_data_inside) {
    throw_format_error(reader.where(), reader.byte(), record.fqn, " lies at byte ", record.offset, ", data at ",
                       record.data_offset, ", ", record.num_bytes, " bytes, outside of the ", footer_offset,
                       " bytes of records");
  }
}

// The record was checked to lie inside of its file, and its data to begin inside of the record.
void check_elements(const SavedRecord& record, const ByteReader& reader) {
  const ElementType* const type = record.is_tensor ? find_element_type(record.dtype) : nullptr;
  if (type == nullptr) return;
  int64_t num_bytes = type->item_bytes;
  for (const int64_t size : record.sizes) num_bytes = size == 0 || num_bytes == 0 ? 0 : capped_mul(num_bytes, size);
  if (num_bytes > record.offset + record.num_bytes - record.data_offset) {
    throw_format_error(reader.where(), reader.byte(), record.fqn, " has ", num_bytes, " bytes of ", record.dtype,
                       " from byte ", record.data_offset, " on: they reach out of its record, which ends at byte ",
                       record.offset + record.num_bytes);
  }
}

}  // namespace

std::string encode_records(const std::vector<SavedRecord>& records) {
  std::map<std::string, uint16_t> dtypes;
  for (const SavedRecord& record : records) dtypes.emplace(record.dtype, static_cast<uint16_t>(dtypes.size()));
  std::vector<std::string> names(dtypes.size());
  for (const auto& [name, position] : dtypes) names[position] = name;
  ByteWriter out;
  out.number(static_cast<uint32_t>(names.size()));
  for (const std::string& name : names) out.text(name);
  out.number(static_cast<uint64_t>(records.size()));
  for (const SavedRecord& record : records) {
    const uint8_t flags = (record.is_tensor ? kTensorFlag : 0) | (record.has_offsets ? kOffsetsFlag : 0);
    out.text(record.fqn).number(flags).number(static_cast<uint8_t>(record.sizes.size()));
    out.number(dtypes.at(record.dtype)).number(record.index_hint);
    out.number(record.offset).number(record.num_bytes).number(record.data_offset);
    for (const int64_t offset : record.offsets) out.number(offset);
    for (const int64_t size : record.sizes) out.number(size);
  }
  return out.take();
}

std::string encode_sums(const std::vector<SavedRecord>& records) {
  ByteWriter out;
  out.number(static_cast<uint64_t>(std::ranges::count_if(records, &SavedRecord::is_tensor)));
  for (const SavedRecord& record : records) {
    if (!record.is_tensor) continue;
    out.number(static_cast<uint8_t>(record.sum ? kSumFlag : 0));
    out.number(record.sum ? *record.sum + digest_of(record.fqn) : uint64_t{0});
  }
  return out.take();
}

StoredSums::StoredSums(std::string_view bytes, const std::string& where) {
  if (bytes.empty()) return;
  ByteReader reader(bytes, where);
  sums_.resize(reader.count(reader.number<uint64_t>(), kSumBytes));
  for (std::optional<uint64_t>& sum : sums_) {
    const auto flags = reader.number<uint8_t>();
    const auto stored = reader.number<uint64_t>();
    if ((flags & kSumFlag) != 0) sum = stored;
  }
  if (reader.left() != 0) throw_format_error(where, reader.byte(), reader.left(), " bytes stand behind the sums");
}

std::optional<uint64_t> StoredSums::of(size_t tensor_record, std::string_view fqn) const {
  if (tensor_record >= sums_.size() || !sums_[tensor_record]) return std::nullopt;
  return *sums_[tensor_record] - digest_of(fqn);
}

std::vector<SavedRecord> records_of(const SavedFile& file) {
  std::vector<SavedRecord> records = parse_records(file.records, file.footer_offset, file.name);
  const StoredSums sums(file.sums, file.name);
  size_t tensor_record = 0;
  for (SavedRecord& record : records) {
    if (record.is_tensor) record.sum = sums.of(tensor_record++, record.fqn);
  }
  return records;
}

std::vector<SavedRecord> parse_records(std::string_view bytes, int64_t footer_offset, const std::string& where) {
  std::vector<SavedRecord> records;
  parse_records(bytes, footer_offset, where, [&](const SavedRecord& record) { records.push_back(record); });
  return records;
}

void parse_records(std::string_view bytes, int64_t footer_offset, const std::string& where,
                   const std::function<void(const SavedRecord&)>& take) {
  ByteReader reader(bytes, where);
  std::vector<std::string> dtypes(reader.count(reader.number<uint32_t>(), 4));
  for (std::string& dtype : dtypes) dtype = reader.text();
  const uint64_t num_records = reader.count(reader.number<uint64_t>(), kLeastRecordBytes);
  SavedRecord record;
  for (uint64_t number = 0; number < num_records; ++number) {
    record.fqn = reader.text();
    const auto flags = reader.number<uint8_t>();
    const auto num_dims = reader.number<uint8_t>();
    const auto dtype = reader.number<uint16_t>();
    if (dtype >= dtypes.size()) throw_format_error(where, reader.byte(), record.fqn, " has the unknown dtype ", dtype);
    record.dtype = dtypes[dtype];
    record.is_tensor = (flags & kTensorFlag) != 0;
    record.has_offsets = (flags & kOffsetsFlag) != 0;
    record.index_hint = reader.number<int64_t>();
    record.offset = reader.number<int64_t>();
    record.num_bytes = reader.number<int64_t>();
    record.data_offset = reader.number<int64_t>();
    check_inside(record, footer_offset, reader);
    record.offsets.resize(num_dims);
    record.sizes.resize(num_dims);
    for (int64_t& offset : record.offsets) offset = reader.number<int64_t>();
    for (int64_t& size : record.sizes) {
      size = reader.number<int64_t>();
      if (size < 0) throw_format_error(where, reader.byte(), record.fqn, " has the size ", size);
    }
    check_elements(record, reader);
    take(record);
  }
  if (reader.left() != 0) throw_format_error(where, reader.byte(), reader.left(), " bytes stand behind the records");
}

std::string encode_index(const Index& index) {
  ByteWriter save;
  for (const uint8_t byte : index.save_id) save.number(byte);
  save.number(index.metadata_bytes).number(index.metadata_digest).number(static_cast<uint32_t>(index.notes.size()));
  for (const auto& [name, value] : index.notes) save.text(name).text(value);
  std::vector<NewSection> sections{{kSaveTag, kRequiredSection, save.take()}};
  for (const SavedFile& file : index.files) {
    if (file.save_id) {
      sections.push_back({kSharedTag, kRequiredSection, encode_shared(file)});
    } else {
      sections.push_back({kFileTag, kRequiredSection, encode_file(file)});
    }
  }
  if (!index.tables.empty()) sections.push_back({kTablesTag, kRequiredSection, index.tables});
  if (index.has_sums) {
    sections.push_back({kProofTag, 0, encode_proof(index.files)});
  }
  return seal(kMagic, sections);
}

Index parse_index(std::string_view bytes, const std::string& where) {
  Index index;
  bool has_save = false;
  std::vector<uint64_t> num_tensors;  // of each file
  const std::vector<uint32_t> known_tags{kSaveTag, kFileTag, kTablesTag, kProofTag, kSharedTag};
  for (const Section& section : unseal(bytes, kMagic, known_tags, where, 0)) {
    if (section.tag == kSaveTag) parse_save(section, where, index);
    if (section.tag == kFileTag) index.files.push_back(parse_file(section, where, num_tensors.emplace_back(0)));
    if (section.tag == kSharedTag) index.files.push_back(parse_shared(section, where, num_tensors.emplace_back(0)));
    if (section.tag == kTablesTag) index.tables = section.bytes;
    if (section.tag == kProofTag) parse_proof(section, where, num_tensors, index.files);
    index.has_sums |= section.tag == kProofTag;
    has_save |= section.tag == kSaveTag;
  }
  if (!has_save) throw_format_error(where, 0, "the index does not say which save it belongs to");
  if (index.metadata_bytes == kNoMetadata && index.tables.empty()) {
    throw_format_error(where, 0, "the index says that there is no .metadata, and has no tables in its place");
  }
  return index;
}

Index parse_index_head(std::string_view bytes, const std::string& where) {
  const Section section = first_section(bytes, kMagic, where);
  if (section.tag != kSaveTag) throw_format_error(where, 0, "the index does not begin with the save it belongs to");
  Index index;
  parse_save(section, where, index);
  return index;
}

}  // namespace torchtitan_ext::storage
