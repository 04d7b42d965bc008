// Reads boxes of stored tensors, and plain byte ranges, from files into memory: only what is wanted, in the order of
// the files, several blocks at a time.
//
// The unit is a block of a file. Long runs that do not touch are read straight into their places by one call, with
// what lies between them going to a buffer that nobody looks at; a block of short runs is read into a buffer and copied
// from there, or cast. Where the file has checksums, a block that is verified is read whole, and hashed part by part as
// it comes.
//
// Where the bytes come from elsewhere, as from an object store, the same work is done in halves: `requests` says which
// bytes are needed, `take` gets them, `finish` ends the read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/block_ledger.h"
#include "storage/cast_copies.h"
#include "storage/file.h"
#include "storage/file_runs.h"

namespace torchtitan_ext::storage {

// Which blocks are verified, of those that have a checksum and of which anything is wanted.
enum class Verify {
  kNone,
  kMostly,  // those of which at least half is read anyway, unless they are in the ledger as verified; others are left to it
  kOnce,  // all that are not in the ledger as verified, here or elsewhere
  kAll,
};

struct FileChecksums {
  int64_t block_bytes = 0;
  int64_t covered_bytes = 0;
  std::vector<uint64_t> checksums;  // none where the file has none
  // What earlier reads of the file have done; without it, each read is the first.
  std::shared_ptr<core::BlockStates> states = nullptr;
};

struct DamagedBlock {
  int64_t file = 0;
  int64_t begin = 0;  // bytes of the file
  int64_t end = 0;
};

class RunReader {
 public:
  RunReader();
  RunReader(RunReader&&) = delete;
  RunReader& operator=(RunReader&&) = delete;
  ~RunReader();

  // Takes a file. Where `num_bytes` >= 0 it must have that size: else FormatError. Returns its number.
  int64_t add_file(File file, int64_t num_bytes, FileChecksums checksums);

  // A box of the tensor whose elements lie at `data_offset` of a file, into memory that begins at `address`. Sizes,
  // offsets and strides count elements, of the file or of the memory, which has others where there is a cast. An element
  // that the file stores once for many (stride 0) is read once and then copied to its places. Throws FormatError where the tensor has another number of dims, where the box does not lie in
  // the file or in the tensor; std::invalid_argument where elements of the stored tensor are interleaved.
  struct Box {
    int64_t data_offset = 0;
    int64_t item_bytes = 0;
    std::span<const int64_t> stored_sizes;
    std::span<const int64_t> stored_strides;
    std::span<const int64_t> offsets;
    std::span<const int64_t> sizes;
    uintptr_t address = 0;
    std::span<const int64_t> strides;
    const Cast* cast = nullptr;
  };
  // Returns its number, from 0 on since the last `read`.
  int64_t add_box(int64_t file, const Box& box);
  void add_bytes(int64_t file, int64_t offset, int64_t num_bytes, uintptr_t address);
  // Throws FormatError where a file does not have these bytes: for who makes memory for them first.
  void check_bytes(int64_t file, int64_t offset, int64_t num_bytes) const;
  // Blocks [first, last) of a file with checksums, to be verified whether anything of them is wanted or not. Throws
  // std::invalid_argument where the file has fewer.
  void add_blocks(int64_t file, int64_t first, int64_t last);

  // Notes in the ledgers of the files what a `read` of all that was added would touch, and forgets it.
  void touch();

  // Reads every box and range that was added, and forgets them, also where it throws; the files stay open. Returns the
  // blocks whose bytes do not match their checksums, in order; what was wanted of them is in memory all the same.
  // `num_threads` is at least 1.
  std::vector<DamagedBlock> read(int num_threads, Verify verify);

  // Bytes [begin, end) of a file that a read needs.
  struct Request {
    int64_t file = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };
  // What a read of all that was added needs, in order. Parts that are closer than `max_gap` bytes share a request, which
  // has at most `max_bytes`, or one block. A read that was begun before is forgotten.
  std::vector<Request> requests(Verify verify, int64_t max_gap, int64_t max_bytes);
  // Verifies and copies the bytes of one of these requests. Several threads may call this at a time. Throws FormatError
  // where there are fewer or more bytes than were asked for.
  void take(int64_t request, std::span<const char> bytes);
  // Ends the read, as `read` does, also after an error: what was added is forgotten.
  std::vector<DamagedBlock> finish();

  // Of each box of the last `read` of which a finite number has become infinite by its cast, one such number.
  const std::map<int64_t, double>& lost() const { return lost_; }

 private:
  struct Source {
    File file;
    int64_t num_bytes = 0;
    FileChecksums checksums;
    FileRuns runs;
    std::vector<core::Interval> blocks;  // to be verified in any case, by their bytes

    // Checksums cover all records: nothing behind them is one.
    int64_t records_end() const { return checksums.checksums.empty() ? num_bytes : checksums.covered_bytes; }
    // Notes that the block which begins there is touched. The file has a ledger.
    void touch(int64_t begin) const {
      checksums.states->raise(static_cast<size_t>(begin / checksums.block_bytes), core::BlockState::kTouched);
    }
  };
  struct Unit {
    int64_t source = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool is_for_checksum = false;  // verified, whether anything of it is wanted or not
    bool is_verified = false;      // where it was asked for by a request
  };
  struct Worker;
  // A read between `requests` and `finish`.
  struct Fetch {
    std::vector<Unit> units;
    std::vector<Request> requests;
    std::vector<size_t> ends;  // of each request, one past its last unit
    std::mutex mutex;          // of all below
    std::vector<std::unique_ptr<Worker>> idle;
    std::vector<DamagedBlock> damaged;
  };

  static void check_inside(const Source& source, int64_t begin, int64_t num_bytes);
  std::vector<Unit> units_of(size_t index);
  static bool is_verified(const Source& source, const Unit& unit, Verify verify, const Worker& worker);
  bool read_unit(const Unit& unit, Verify verify, Worker& worker) const;
  bool take_unit(const Unit& unit, std::span<const char> bytes, int64_t begin, Worker& worker) const;
  static bool note(const Source& source, const Unit& unit, bool is_verified, uint64_t digest);
  std::vector<Unit> all_units();
  std::vector<DamagedBlock> end_read(std::span<Worker* const> workers, std::vector<DamagedBlock> damaged);
  void forget();

  std::vector<Source> sources_;
  int64_t num_boxes_ = 0;
  std::deque<CastMemory> cast_memory_;  // where runs point to it
  std::map<int64_t, double> lost_;
  core::RunList repeats_;  // copies within memory, made behind the reads
  std::unique_ptr<Fetch> fetch_;
};

}  // namespace torchtitan_ext::storage
