#include "storage/tensor_record.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "storage/bytes.h"
#include "storage/tensor_pickle.h"

namespace torchtitan_ext::storage {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndOfDirectory = 0x06054b50;
constexpr uint32_t kZip64End = 0x06064b50, kZip64Locator = 0x07064b50;
constexpr int64_t kLocalHeaderBytes = 30, kCentralHeaderBytes = 46, kEndBytes = 22, kLocatorBytes = 20;
constexpr int64_t kZip64EndBytes = 56;
constexpr uint16_t kUtf8Names = 0x0800;
constexpr uint16_t kZip64Field = 0x0001;
constexpr uint16_t kPaddingField = 0x4246;  // "FB", as torch marks its own
constexpr uint16_t kVersion = 20, kZip64Version = 45;
constexpr uint32_t kInZip64 = 0xffffffff;

struct Entry {
  std::string_view name;
  int64_t header_offset = 0;  // in the record
  int64_t num_bytes = 0;

  bool is_large() const { return num_bytes >= static_cast<int64_t>(kInZip64); }
};

// Signature to name of a local header, or the same fields of a central one.
void put_fields(ByteWriter& out, const Entry& entry, size_t extra_bytes) {
  const uint32_t size = entry.is_large() ? kInZip64 : static_cast<uint32_t>(entry.num_bytes);
  out.number(entry.is_large() ? kZip64Version : kVersion).number(kUtf8Names).number(uint16_t{0});  // stored
  out.number(uint32_t{0}).number(uint32_t{0}).number(size).number(size);                           // no time, no CRC
  out.number(static_cast<uint16_t>(entry.name.size())).number(static_cast<uint16_t>(extra_bytes));
}

std::string zip64_sizes(const Entry& entry) {
  if (!entry.is_large()) return {};
  ByteWriter out;
  out.number(kZip64Field).number(uint16_t{16}).number(entry.num_bytes).number(entry.num_bytes);
  return out.take();
}

void put_local_header(ByteWriter& out, Entry& entry, std::string_view extra) {
  entry.header_offset = static_cast<int64_t>(out.size());
  out.number(kLocalHeader);
  put_fields(out, entry, extra.size());
  out.raw(entry.name).raw(extra);
}

void put_central_header(ByteWriter& out, const Entry& entry) {
  const std::string extra = zip64_sizes(entry);
  out.number(kCentralHeader).number(entry.is_large() ? kZip64Version : kVersion);
  put_fields(out, entry, extra.size());
  out.number(uint16_t{0}).number(uint16_t{0}).number(uint16_t{0}).number(uint32_t{0});  // comment, disk, attributes
  out.number(static_cast<uint32_t>(entry.header_offset)).raw(entry.name).raw(extra);
}

// `directory_offset` is where `out` begins in the record; its size so far is the directory's.
void put_end(ByteWriter& out, uint16_t num_entries, int64_t directory_offset) {
  const auto directory_bytes = static_cast<int64_t>(out.size());
  const bool is_far = directory_offset >= static_cast<int64_t>(kInZip64);
  if (is_far) {
    out.number(kZip64End).number(kZip64EndBytes - 12).number(kZip64Version).number(kZip64Version);
    out.number(uint32_t{0}).number(uint32_t{0});  // disks
    out.number(uint64_t{num_entries}).number(uint64_t{num_entries}).number(directory_bytes).number(directory_offset);
    out.number(kZip64Locator).number(uint32_t{0}).number(directory_offset + directory_bytes).number(uint32_t{1});
  }
  out.number(kEndOfDirectory).number(uint16_t{0}).number(uint16_t{0}).number(num_entries).number(num_entries);
  out.number(static_cast<uint32_t>(directory_bytes));
  out.number(is_far ? kInZip64 : static_cast<uint32_t>(directory_offset)).number(uint16_t{0});
}

// Reads numbers at places of a record, all of them checked against its length.
class RecordReader {
 public:
  RecordReader(const RecordBytes& record, int64_t num_bytes, const std::string& where)
      : record_(record), num_bytes_(num_bytes), where_(where) {}

  ByteReader at(int64_t offset, int64_t num_bytes) const {
    if (offset < 0 || num_bytes < 0 || offset > num_bytes_ || num_bytes > num_bytes_ - offset) {
      throw_format_error(where_, offset, "the archive points to ", num_bytes, " bytes outside of its ", num_bytes_);
    }
    const std::string_view bytes = record_(offset, num_bytes);
    if (static_cast<int64_t>(bytes.size()) != num_bytes) throw_format_error(where_, offset, "the file ends here");
    return ByteReader(bytes, where_, offset);
  }
  int64_t num_bytes() const { return num_bytes_; }
  const std::string& where() const { return where_; }

 private:
  const RecordBytes& record_;
  int64_t num_bytes_;
  const std::string& where_;
};

struct Directory {
  int64_t offset = 0;
  int64_t num_bytes = 0;
  uint64_t num_entries = 0;
};

Directory find_directory(const RecordReader& record) {
  // An archive with a comment behind its end is none of torch's; the end is where it has none.
  const int64_t end = record.num_bytes() - kEndBytes;
  ByteReader reader = record.at(end, kEndBytes);
  if (reader.number<uint32_t>() != kEndOfDirectory) {
    throw_format_error(record.where(), end, "the record does not end as an archive of torch.save does");
  }
  reader.raw(6);
  Directory directory;
  directory.num_entries = reader.number<uint16_t>();
  directory.num_bytes = reader.number<uint32_t>();
  directory.offset = reader.number<uint32_t>();
  const bool is_zip64 =
      directory.offset == kInZip64 || directory.num_bytes == kInZip64 || directory.num_entries == 0xffff;
  if (!is_zip64) return directory;
  ByteReader locator = record.at(end - kLocatorBytes, kLocatorBytes);
  if (locator.number<uint32_t>() != kZip64Locator) {
    throw_format_error(record.where(), end - kLocatorBytes, "the archive is larger than 4 GiB and has no zip64 end");
  }
  locator.raw(4);
  const auto zip64_offset = locator.number<int64_t>();
  ByteReader zip64 = record.at(zip64_offset, kZip64EndBytes);
  if (zip64.number<uint32_t>() != kZip64End) throw_format_error(record.where(), zip64_offset, "is no zip64 end");
  zip64.raw(28);
  directory.num_entries = zip64.number<uint64_t>();
  directory.num_bytes = zip64.number<int64_t>();
  directory.offset = zip64.number<int64_t>();
  return directory;
}

// Of the zip64 field the numbers that the header has no room for, in the order of the format.
void read_zip64(std::string_view extra, const RecordReader& record, int64_t offset, bool is_stored_size_large,
                Entry& entry) {
  ByteReader reader(extra, record.where(), offset);
  while (reader.left() >= 4) {
    const auto id = reader.number<uint16_t>();
    ByteReader field(reader.raw(reader.number<uint16_t>()), record.where(), offset);
    if (id != kZip64Field) continue;
    if (entry.num_bytes == kInZip64) entry.num_bytes = field.number<int64_t>();
    if (is_stored_size_large) field.number<int64_t>();
    if (entry.header_offset == kInZip64) entry.header_offset = field.number<int64_t>();
    return;
  }
}

// The entry whose name, behind the archive's own folder, is `name`; nothing where there is none or it is compressed.
std::optional<Entry> find_entry(const RecordReader& record, const Directory& directory, std::string_view name) {
  ByteReader reader = record.at(directory.offset, directory.num_bytes);
  for (uint64_t index = 0; index < directory.num_entries; ++index) {
    const int64_t offset = reader.byte();
    if (reader.number<uint32_t>() != kCentralHeader) {
      throw_format_error(record.where(), offset, "is no entry of the archive's directory");
    }
    reader.raw(6);
    const auto method = reader.number<uint16_t>();
    reader.raw(8);
    const auto stored_size = reader.number<uint32_t>();
    Entry entry;
    entry.num_bytes = reader.number<uint32_t>();
    const auto name_bytes = reader.number<uint16_t>();
    const auto extra_bytes = reader.number<uint16_t>();
    const auto comment_bytes = reader.number<uint16_t>();
    reader.raw(8);
    entry.header_offset = reader.number<uint32_t>();
    entry.name = reader.raw(name_bytes);
    const std::string_view extra = reader.raw(extra_bytes);
    reader.raw(comment_bytes);
    const size_t folder_end = entry.name.find('/');
    if (folder_end == entry.name.npos || entry.name.substr(folder_end + 1) != name) continue;
    if (method != 0) return std::nullopt;
    read_zip64(extra, record, offset, stored_size == kInZip64, entry);
    return entry;
  }
  return std::nullopt;
}

int64_t data_offset(const RecordReader& record, const Entry& entry) {
  ByteReader reader = record.at(entry.header_offset, kLocalHeaderBytes);
  if (reader.number<uint32_t>() != kLocalHeader) {
    throw_format_error(record.where(), entry.header_offset, "is no local header of the archive");
  }
  reader.raw(22);
  const auto name_bytes = reader.number<uint16_t>();
  const auto extra_bytes = reader.number<uint16_t>();
  return entry.header_offset + kLocalHeaderBytes + name_bytes + extra_bytes;
}

}  // namespace

RecordFrame frame_tensor(const ElementType& type, std::span<const int64_t> sizes, int64_t record_offset,
                         int64_t alignment) {
  const std::string pickle = pickle_tensor(type, sizes);
  const std::string_view byteorder = "little", version = "3\n";
  Entry entries[] = {
      {"archive/data.pkl", 0, static_cast<int64_t>(pickle.size())},
      {"archive/byteorder", 0, static_cast<int64_t>(byteorder.size())},
      {"archive/version", 0, static_cast<int64_t>(version.size())},
      {"archive/data/0", 0, core::checked_mul(core::num_elements(sizes), type.item_bytes)},
  };
  Entry& data = entries[3];
  ByteWriter head;
  const std::string_view contents[] = {pickle, byteorder, version};
  for (size_t index = 0; index < 3; ++index) {
    put_local_header(head, entries[index], {});
    head.raw(contents[index]);
  }
  ByteWriter extra;
  extra.raw(zip64_sizes(data));
  const int64_t unpadded = record_offset + static_cast<int64_t>(head.size()) + kLocalHeaderBytes +
                           static_cast<int64_t>(data.name.size() + extra.size()) + 4;
  const int64_t padding = (alignment - unpadded % alignment) % alignment;
  extra.number(kPaddingField).number(static_cast<uint16_t>(padding)).raw(std::string(padding, '\0'));
  put_local_header(head, data, extra.bytes());

  ByteWriter tail;
  for (const Entry& entry : entries) put_central_header(tail, entry);
  put_end(tail, 4, core::checked_add(static_cast<int64_t>(head.size()), data.num_bytes));
  return {head.take(), tail.take()};
}

std::optional<StoredTensor> find_tensor(const RecordBytes& record_bytes, int64_t num_bytes, const std::string& where) {
  constexpr int64_t kMaxPickleBytes = 64 << 10;  // a tensor's has 200; a longer one is something else
  constexpr int64_t kMaxDirectoryBytes = 64 << 10;
  const RecordReader record(record_bytes, num_bytes, where);
  const Directory directory = find_directory(record);
  if (directory.num_bytes > kMaxDirectoryBytes) return std::nullopt;
  const std::optional<Entry> pickle_entry = find_entry(record, directory, "data.pkl");
  if (!pickle_entry || pickle_entry->num_bytes > kMaxPickleBytes) return std::nullopt;
  const int64_t pickle_offset = data_offset(record, *pickle_entry);
  std::optional<PickledTensor> found =
      match_tensor_pickle(record.at(pickle_offset, pickle_entry->num_bytes).raw(pickle_entry->num_bytes));
  if (!found) return std::nullopt;
  const std::optional<Entry> byteorder = find_entry(record, directory, "byteorder");
  if (byteorder) {
    if (byteorder->num_bytes != 6 || record.at(data_offset(record, *byteorder), 6).raw(6) != "little") {
      return std::nullopt;
    }
  }
  const std::optional<Entry> data = find_entry(record, directory, "data/" + found->storage_key);
  if (!data) return std::nullopt;
  found->tensor.data_offset = data_offset(record, *data);
  found->tensor.data_bytes = data->num_bytes;
  if (data->num_bytes < 0 || found->tensor.data_offset > num_bytes ||
      data->num_bytes > num_bytes - found->tensor.data_offset) {
    throw_format_error(where, found->tensor.data_offset, "the archive says ", data->num_bytes,
                       " bytes of data, the record has ", num_bytes);
  }
  return found->tensor;
}

}  // namespace torchtitan_ext::storage
