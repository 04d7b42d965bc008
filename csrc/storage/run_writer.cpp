#include "storage/run_writer.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "storage/parallel.h"

namespace torchtitan_ext::storage {
namespace {

constexpr int64_t kWindowBytes = 1 << 20;
// A run that is shorter is copied to its neighbours: a call takes 1,024 pieces, and each of them costs as much as copying a
// few kilobytes.
constexpr int64_t kPackedBytes = 16 << 10;
// Write-back is asked for once for so many bytes of a file: smaller requests cost calls, larger ones leave the disk idle.
constexpr int64_t kWriteBackBytes = 8 << 20;

}  // namespace

struct RunWriter::Worker {
  std::unique_ptr<char[]> buffer;
  std::vector<Stretch> found;
  std::vector<Stretch> parts;
  std::vector<iovec> pieces;

  char* room() {
    if (!buffer) buffer = std::make_unique_for_overwrite<char[]>(kWindowBytes);
    return buffer.get();
  }

  // What was found as parts of the file without gaps, in its order.
  void split_at_gaps() {
    parts.clear();
    for (const Stretch& stretch : found) {
      if (stretch.count == 1 || stretch.file_stride == stretch.run_bytes) {
        parts.push_back(stretch);
        continue;
      }
      for (int64_t index = 0; index < stretch.count; ++index) {
        parts.push_back({stretch.file_bytes + index * stretch.file_stride,
                         stretch.memory + index * stretch.memory_stride, stretch.run_bytes});
      }
    }
    std::ranges::sort(parts, {}, [](const Stretch& part) { return part.file_bytes; });
  }

  // The bytes of a part as they lie one behind the other.
  void add_piece(const Stretch& part, int64_t window_begin) {
    const auto num_bytes = static_cast<size_t>(part.file_end() - part.file_bytes);
    if (part.count == 1 && part.run_bytes >= kPackedBytes) {
      pieces.push_back({reinterpret_cast<void*>(static_cast<uintptr_t>(part.memory)), num_bytes});
      return;
    }
    copy_stretch(part, room(), window_begin, Direction::kToFile);
    char* packed = room() + (part.file_bytes - window_begin);
    if (!pieces.empty() && static_cast<char*>(pieces.back().iov_base) + pieces.back().iov_len == packed) {
      pieces.back().iov_len += num_bytes;
    } else {
      pieces.push_back({packed, num_bytes});
    }
  }
};

int64_t RunWriter::add_file(std::optional<File> file, std::string path, int64_t num_bytes) {
  targets_.push_back({std::move(file), std::move(path), num_bytes});
  return static_cast<int64_t>(targets_.size()) - 1;
}

void RunWriter::add_box(int64_t file, const Box& box) {
  Target& target = targets_.at(static_cast<size_t>(file));
  int64_t last = 0;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    if (box.sizes[dim] == 0) return;
    last = core::checked_add(last, core::checked_mul(box.sizes[dim] - 1, box.file_strides[dim]));
  }
  const int64_t end =
      core::checked_add(box.offset_bytes, core::checked_mul(core::checked_add(last, 1), box.item_bytes));
  check_inside(target, box.offset_bytes, end);
  add_in_order(target, box);
}

void RunWriter::check_inside(const Target& target, int64_t begin, int64_t end) {
  TTE_CHECK(begin >= 0 && begin <= end && end <= target.num_bytes, target.path, "got bytes ", begin, " to ", end,
            " of a file that has ", target.num_bytes, "; please report");
}

RunWriter::Packed RunWriter::pack(std::span<const int64_t> rank_of_file, int64_t num_ranks) {
  TTE_CHECK(rank_of_file.size() == targets_.size(), "pack", "got ranks of ", rank_of_file.size(), " files, expected ",
            targets_.size());
  Packed packed;
  packed.data.resize(static_cast<size_t>(queued_bytes()));
  char* at = packed.data.data();
  Worker worker;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const size_t first_run = packed.runs.size();
    const char* const first = at;
    for (size_t file = 0; file < targets_.size(); ++file) {
      FileRuns& runs = targets_[file].runs;
      if (rank_of_file[file] != rank) continue;
      const size_t first_of_file = packed.runs.size();
      for (const core::Interval& window : runs.windows(kWindowBytes, targets_[file].num_bytes)) {
        worker.found.clear();
        runs.find(window.begin, window.end, worker.found);
        worker.split_at_gaps();
        for (const Stretch& part : worker.parts) {
          copy_stretch(part, at, part.file_bytes, Direction::kToFile);
          const int64_t num_bytes = part.file_end() - part.file_bytes;
          at += num_bytes;
          const bool goes_on = packed.runs.size() > first_of_file &&
                               packed.runs[packed.runs.size() - 2] + packed.runs.back() == part.file_bytes;
          if (goes_on) {
            packed.runs.back() += num_bytes;
          } else {
            packed.runs.insert(packed.runs.end(), {static_cast<int64_t>(file), part.file_bytes, num_bytes});
          }
        }
      }
      runs.clear();
    }
    packed.counts.emplace_back((packed.runs.size() - first_run) / 3, at - first);
  }
  return packed;
}

void RunWriter::add_packed(std::span<const int64_t> runs, uintptr_t address, int64_t num_bytes) {
  TTE_CHECK(runs.size() % 3 == 0, "add_packed", "got ", runs.size(), " numbers, expected three for each run");
  int64_t num_left = num_bytes;
  for (size_t at = 0; at < runs.size(); at += 3) {
    TTE_CHECK(runs[at] >= 0 && static_cast<size_t>(runs[at]) < targets_.size() && runs[at + 2] > 0 &&
                  runs[at + 2] <= num_left,
              "add_packed", "got a run of ", runs[at + 2], " bytes of file ", runs[at], ", of ", targets_.size(),
              " files and ", num_left, " bytes that are left");
    const Target& target = targets_[static_cast<size_t>(runs[at])];
    TTE_CHECK(target.file.has_value(), target.path, "another rank writes it; please report");
    check_inside(target, runs[at + 1], core::checked_add(runs[at + 1], runs[at + 2]));
    num_left -= runs[at + 2];
  }
  TTE_CHECK(num_left == 0, "add_packed", "got ", num_bytes, " bytes, of which ", num_left, " are in no run");
  for (; !runs.empty(); runs = runs.subspan(3)) {
    Target& target = targets_[static_cast<size_t>(runs[0])];
    target.runs.list().start_pair();
    target.runs.list().append_bytes(static_cast<int64_t>(address), runs[1], runs[2]);
    address += static_cast<uintptr_t>(runs[2]);
  }
}

// A box whose loops would not step over all of those inside them is added in parts.
void RunWriter::add_in_order(Target& target, const Box& box) {
  core::RunList one;
  one.append_box(box.sizes, {static_cast<int64_t>(box.address), box.strides}, {box.offset_bytes, box.file_strides},
                 box.item_bytes);
  if (is_in_file_order(one, one.nests().back())) {
    target.runs.list().start_pair();
    target.runs.list().append_box(box.sizes, {static_cast<int64_t>(box.address), box.strides},
                                  {box.offset_bytes, box.file_strides}, box.item_bytes);
    return;
  }
  size_t longest = 0;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    if (box.sizes[longest] == 1 || (box.sizes[dim] > 1 && box.file_strides[dim] > box.file_strides[longest])) {
      longest = dim;
    }
  }
  core::Sizes sizes(box.sizes.begin(), box.sizes.end());
  const int64_t count = std::exchange(sizes[longest], 1);
  for (int64_t index = 0; index < count; ++index) {
    Box part = box;
    part.sizes = sizes;
    part.address += static_cast<uintptr_t>(index * box.strides[longest] * box.item_bytes);
    part.offset_bytes += index * box.file_strides[longest] * box.item_bytes;
    add_in_order(target, part);
  }
}

int64_t RunWriter::queued_bytes() const {
  int64_t sum = 0;
  for (const Target& target : targets_) sum += target.runs.list().num_bytes();
  return sum;
}

void RunWriter::write(int num_threads, bool starts_write_back) {
  // Whatever happens: the memory need not be there any more when the next call writes.
  struct Forgetting {
    std::vector<Target>& targets;
    ~Forgetting() {
      for (Target& target : targets) target.runs.clear();
    }
  } forgetting{targets_};
  TTE_CHECK(num_threads > 0, "write", "got ", num_threads, " threads, expected at least 1");
  for (const Target& target : targets_) {
    const bool is_written = target.file.has_value() || target.runs.list().nests().empty();
    TTE_CHECK(is_written, target.path, "another rank writes it; please report");
  }
  std::vector<std::pair<Target*, core::Interval>> units;
  for (Target& target : targets_) {
    for (const core::Interval& window : target.runs.windows(kWindowBytes, target.num_bytes)) {
      units.emplace_back(&target, window);
    }
  }
  std::vector<Worker> workers(static_cast<size_t>(num_threads));
  parallel_for_items(num_threads, static_cast<int64_t>(units.size()), [&](int worker, int64_t item) {
    const auto& [target, window] = units[static_cast<size_t>(item)];
    const bool is_full = write_window(*target, window.begin, window.end, workers[static_cast<size_t>(worker)]);
    // Where other processes write the rest, the disk would get runs in place of blocks.
    if (starts_write_back && is_full && window.end / kWriteBackBytes > window.begin / kWriteBackBytes) {
      target->file->start_write_back(window.end / kWriteBackBytes * kWriteBackBytes - kWriteBackBytes, kWriteBackBytes);
    }
  });
}

bool RunWriter::write_window(const Target& target, int64_t begin, int64_t end, Worker& worker) {
  worker.found.clear();
  target.runs.find(begin, end, worker.found);
  worker.split_at_gaps();
  worker.pieces.clear();
  int64_t part_begin = begin;
  int64_t at = begin;
  const auto write_part = [&] {
    target.file->write_at(worker.pieces, part_begin);
    worker.pieces.clear();
  };
  for (const Stretch& part : worker.parts) {
    if (part.file_bytes != at) {
      write_part();
      part_begin = part.file_bytes;
    }
    worker.add_piece(part, begin);
    at = part.file_end();
  }
  write_part();
  return part_begin == begin && at == end;
}

void RunWriter::finish(int num_threads, bool sync) {
  parallel_for_items(sync ? num_threads : 1, static_cast<int64_t>(targets_.size()), [&](int, int64_t item) {
    std::optional<File>& file = targets_[static_cast<size_t>(item)].file;
    if (!file) return;
    if (sync) file->sync();
    file->close();
  });
  targets_.clear();
}

}  // namespace torchtitan_ext::storage
