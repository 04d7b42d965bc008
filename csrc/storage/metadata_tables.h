// The tables of an index: what `.metadata` would say of the state dict, without a pickle. They hold the columns' names,
// sizes, chunk lists and keys, then plain values; where the parts of keys lie is in the index's records.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/metadata_columns.h"
#include "core/plain_sink.h"
#include "storage/bytes.h"
#include "storage/index.h"

namespace torchtitan_ext::storage {

// Writes plain values: a kind (u8), then
//     bool u8 | int i64 | float u64 | text, bytes: u32 length, the bytes | same: u32 number
//     tuple, list, dict: whether it is shared u8, number of members u64, members (of a dict keys and values in turn)
// Shared containers are numbered in the order in which they end; `same` stands for one of them.
class PlainEncoder : public core::PlainSink {
 public:
  explicit PlainEncoder(ByteWriter& out) : out_(out) {}

  void none() override { kind(core::PlainKind::kNone); }
  void boolean(bool value) override;
  void integer(int64_t value) override;
  void number(double value) override;
  void text(std::string_view utf8) override;
  void bytes(std::string_view value) override;
  void begin(core::PlainKind kind, size_t num_members) override;
  void end(core::PlainKind kind, size_t num_members) override;
  uint32_t share() override;
  void same(uint32_t shared) override;

 private:
  void kind(core::PlainKind kind) { out_.number(static_cast<uint8_t>(kind)); }

  ByteWriter& out_;
  std::vector<size_t> open_;  // where the flags of containers stand that have not ended
  size_t ended_ = 0;          // the same of the last one that has
  uint32_t num_shared_ = 0;
};

void encode_columns(const core::MetadataColumns& columns, ByteWriter& out);

// Reads up to the plain values that follow. Throws FormatError, also where a number is in none of the tables or a name
// is none of a dtype or layout.
core::MetadataColumns parse_columns(ByteReader& reader);

// Adds where the records of a rank file lie. Throws FormatError.
void add_records(const SavedFile& file, core::MetadataColumns& columns);

}  // namespace torchtitan_ext::storage
