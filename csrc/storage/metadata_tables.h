// The tables of an index: what `.metadata` would say of the state dict, without a pickle. They hold the columns' names,
// sizes, chunk lists and keys, then plain values; where the parts of keys lie is in the index's records.
#pragma once

#include "core/metadata_columns.h"
#include "storage/bytes.h"
#include "storage/index.h"

namespace torchtitan_ext::storage {

// Reads up to the plain values that follow. Throws FormatError, also where a number is in none of the tables or a name
// is none of a dtype or layout.
core::MetadataColumns parse_columns(ByteReader& reader);

// Adds where the records of a rank file lie. Throws FormatError.
void add_records(const SavedFile& file, core::MetadataColumns& columns);

}  // namespace torchtitan_ext::storage
