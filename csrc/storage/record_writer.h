// Writes one rank file: records one behind the other, then a footer with the checksums of its blocks.
//
// Records are queued, with the addresses of their bytes, and written by write_queued(): whole blocks, by several
// threads, each block hashed as soon as it is written. Bytes that lie contiguous in memory go from there to the file;
// short and strided ones are packed into a buffer of one block per thread first. The addresses must stay valid until
// write_queued() returns; what is left of the last block is kept. Not for several threads at a time.
//
// With `to_memory` there is no file: write_part() in place of write_queued() writes into memory that the caller gives,
// who brings the parts to where the file is to be, such as an object store; finish() leaves the last bytes in rest().
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/runs.h"
#include "storage/file.h"
#include "storage/footer.h"
#include "storage/index.h"
#include "storage/tensor_record.h"

namespace torchtitan_ext::storage {

struct WriteOptions {
  uint32_t block_bytes = 0;
  int num_threads = 1;
  bool sync = true;
  bool to_memory = false;
};

class RecordWriter {
 public:
  RecordWriter(std::string path, const WriteOptions& options);

  // A tensor of `key.sizes`, whose first element lies at `address`; strides count elements. `key` says everything but
  // where the record lies. With global sizes the sum of the record is taken while it is written: it is a chunk of a
  // tensor of these sizes. What does not lie in that tensor has no sum.
  void add_tensor(SavedRecord key, const ElementType& type, uintptr_t address, std::span<const int64_t> strides,
                  const std::optional<core::Sizes>& global_sizes = std::nullopt);
  // The same in parts, for a tensor that comes through a buffer: begin_tensor, then add_bytes with all of its bytes in
  // row-major order, whole elements each time, then end_tensor.
  void begin_tensor(SavedRecord key, const ElementType& type,
                    const std::optional<core::Sizes>& global_sizes = std::nullopt);
  void add_bytes(uintptr_t address, int64_t num_bytes);
  void end_tensor();
  // A record that is complete as it is.
  void add_record(SavedRecord key, uintptr_t address, int64_t num_bytes);

  int64_t queued_bytes() const { return end_ - written_; }
  void write_queued();
  // Writes whole blocks, at most `max_bytes`, to an address. Returns the number of bytes: 0 when all queued blocks are
  // written.
  int64_t write_part(uintptr_t address, int64_t max_bytes);
  // Writes the rest and the footer, syncs where asked to, closes. Everything of the result but the name is known then.
  SavedFile finish(const SaveId& save_id, uint32_t rank);
  // What no part has: less than a block, and the footer.
  const std::string& rest() const { return rest_; }

 private:
  // Bytes [begin, end) of the file: at `address`, or packed from a nest of runs_ where `nest` >= 0.
  struct Segment {
    int64_t begin = 0;
    int64_t end = 0;
    uintptr_t address = 0;
    int64_t nest = -1;
  };
  // A record whose sum is taken, by the order of the file. `nest` of positions_ leads from the bytes of its elements in
  // the file to those in the global tensor.
  struct Summed {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t word_bytes = 0;
    size_t nest = 0;
    size_t record = 0;
    uint64_t sum = 0;
  };
  struct Scratch;

  void queue(uintptr_t address, int64_t num_bytes);
  void queue_own(std::string bytes);
  void write_blocks(int64_t end);
  void write_at(std::span<iovec> pieces, int64_t offset) const;
  void keep_rest();
  void lay_out(int64_t begin, int64_t end, Scratch& scratch);
  size_t first_segment(int64_t byte) const;
  void copy_out(int64_t begin, int64_t end, char* dst) const;
  void begin_sum(const ElementType& type, const core::Sizes& global_sizes);
  void add_sums(std::span<const iovec> pieces, int64_t begin);

  std::string path_;
  std::optional<File> file_;
  uintptr_t part_ = 0;  // without a file: where its bytes go, from `part_begin_` on
  int64_t part_begin_ = 0;
  std::string rest_;
  WriteOptions options_;
  std::vector<SavedRecord> records_;
  std::string tail_frame_;  // of the tensor that has been begun
  int64_t tensor_end_ = 0;

  int64_t end_ = 0;      // of everything queued
  int64_t written_ = 0;  // a multiple of the block size: everything before is in the file
  std::vector<Segment> segments_;
  core::RunList runs_;
  std::deque<std::string> own_bytes_;  // frames, and the unwritten rest of the last block
  std::vector<uint64_t> checksums_;
  std::vector<Summed> summed_;
  core::RunList positions_;  // of all records: the last block may have to wait for the next call
  bool has_sums_ = false;
};

}  // namespace torchtitan_ext::storage
