// The zip archive in which torch.save keeps one tensor: written around bytes that others write, and found in files.
//
// A record of ours, all of it stored and none compressed:
//
//     archive/data.pkl | archive/byteorder | archive/version | archive/data/0 | central directory
//
// `data/0` are the tensor's elements, row-major. The extra field of its local header is padding, so that they begin at
// a multiple of an alignment of the file. CRC fields are 0: torch does not check them, and Python's zipfile refuses
// them; blocks of the file have checksums of their own. From 4 GiB on sizes are in zip64 fields. The pickle in
// `data.pkl` is what torch.save writes without its memo, which nothing in it refers to.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/chunk.h"

namespace torchtitan_ext::storage {

// How torch names the elements of a tensor in a pickle.
struct ElementType {
  std::string storage_class;  // "FloatStorage"; "UntypedStorage" of torch.storage for dtypes younger than such classes
  std::string dtype;          // "float8_e4m3fn", of the module torch, where the storage is untyped; else empty
  int64_t item_bytes = 0;
};

struct RecordFrame {
  std::string head;  // everything before the tensor's bytes
  std::string tail;  // everything behind them
};

// The frame of a contiguous tensor whose record begins at byte `record_offset` of the file: the tensor's bytes begin at
// a multiple of `alignment` (a power of two, at most 32 KiB) of the file.
RecordFrame frame_tensor(const ElementType& type, std::span<const int64_t> sizes, int64_t record_offset,
                         int64_t alignment);

// A tensor as a record describes it. Strides and `storage_offset` count elements; the bytes at `data_offset` of the
// record are its storage.
struct StoredTensor {
  ElementType type;  // without item_bytes
  core::Sizes sizes;
  core::Sizes strides;
  int64_t storage_offset = 0;
  int64_t data_offset = 0;
  int64_t data_bytes = 0;
};

// Gives bytes [offset, offset + num_bytes) of a record; valid until the next call.
using RecordBytes = std::function<std::string_view(int64_t offset, int64_t num_bytes)>;

// Finds the tensor in a record of `num_bytes` that torch.save wrote, of any version since zip archives. Nothing where
// it holds something else than one plain tensor. Throws FormatError, naming `where` and the byte of the record, where
// the archive is damaged.
std::optional<StoredTensor> find_tensor(const RecordBytes& record, int64_t num_bytes, const std::string& where);

}  // namespace torchtitan_ext::storage
