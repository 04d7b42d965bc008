// Writes boxes of tensors to their places in files that exist already: what other processes write lies between them.
//
// The unit is a block of a file. Its runs are joined where they touch in the file, and each joined part is one call:
// long runs go from where they lie, short and strided ones are packed into a buffer first. No other byte is touched.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk.h"
#include "storage/file.h"
#include "storage/file_runs.h"

namespace torchtitan_ext::storage {

class RunWriter {
 public:
  // Takes a file that is open for writing, of `num_bytes` in the end; none where another rank writes it. Returns its
  // number.
  int64_t add_file(std::optional<File> file, std::string path, int64_t num_bytes);

  // Elements at `address` with these strides, and where each of them goes: the first to byte `offset_bytes` of the file,
  // the others by `file_strides`. Sizes and strides count elements; strides of the file are not 0, and no two elements go
  // to one place. Throws std::invalid_argument where they do not lie in the file.
  struct Box {
    std::span<const int64_t> sizes;
    int64_t item_bytes = 0;
    uintptr_t address = 0;
    std::span<const int64_t> strides;
    int64_t offset_bytes = 0;
    std::span<const int64_t> file_strides;
  };
  void add_box(int64_t file, const Box& box);

  // What was added, for the ranks that write the files: runs (file, first byte, number of bytes) and their bytes, those for
  // rank 0 first; and how many of both there are for each rank. Nothing is queued any more then.
  struct Packed {
    std::vector<std::pair<int64_t, int64_t>> counts;
    std::vector<int64_t> runs;
    std::string data;
  };
  Packed pack(std::span<const int64_t> rank_of_file, int64_t num_ranks);
  // Adds runs that other ranks have packed, whose `num_bytes` bytes lie at `address`. Throws std::invalid_argument, and
  // adds nothing, where they are not the runs of these bytes.
  void add_packed(std::span<const int64_t> runs, uintptr_t address, int64_t num_bytes);

  // Bytes that write() will write.
  int64_t queued_bytes() const;
  // Writes all that was added, and forgets it, also where it throws. With `starts_write_back` the system is asked to begin
  // with writing the bytes out. `num_threads` is at least 1.
  void write(int num_threads, bool starts_write_back);
  // Waits until the files are on the disk, and closes them.
  void finish(int num_threads, bool sync);

 private:
  struct Target {
    std::optional<File> file;
    std::string path;
    int64_t num_bytes = 0;
    FileRuns runs = {};
  };
  struct Worker;

  static void check_inside(const Target& target, int64_t begin, int64_t end);
  void add_in_order(Target& target, const Box& box);
  // Whether all bytes of the window are written.
  static bool write_window(const Target& target, int64_t begin, int64_t end, Worker& worker);

  std::vector<Target> targets_;
};

}  // namespace torchtitan_ext::storage
