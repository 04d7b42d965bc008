#include "storage/record_writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "core/boxes.h"
#include "core/word_sums.h"
#include "storage/digest.h"
#include "storage/parallel.h"
#include "storage/run_window.h"

namespace torchtitan_ext::storage {
namespace {

// torch maps storages at multiples of 64 bytes; a large one begins with a page, at 2 kB of padding on average.
constexpr int64_t kAlignment = 64, kLargeAlignment = 4096;
constexpr int64_t kLargeBytes = 256 << 10;
// A piece of a block that is shorter is copied to its neighbours: a system call takes 1,024 pieces, and each of them
// costs as much as copying a few kilobytes.
constexpr int64_t kPackedBytes = 16 << 10;
// Write-back is asked for once for so many bytes of a file: smaller requests cost calls, larger ones leave the disk
// idle.
constexpr int64_t kWriteBackBytes = 8 << 20;

int64_t num_blocks_of(int64_t num_bytes, int64_t block_bytes) { return (num_bytes + block_bytes - 1) / block_bytes; }

iovec piece_of(const void* data, int64_t num_bytes) {
  return {const_cast<void*>(data), static_cast<size_t>(num_bytes)};
}

}  // namespace

struct RecordWriter::Scratch {
  std::unique_ptr<char[]> block;
  std::vector<iovec> pieces;
};

RecordWriter::RecordWriter(std::string path, const WriteOptions& options) : path_(std::move(path)), options_(options) {
  if (!options_.to_memory) file_.emplace(File::create(path_));
}

void RecordWriter::queue(uintptr_t address, int64_t num_bytes) {
  if (num_bytes == 0) return;
  segments_.push_back({end_, end_ + num_bytes, address, -1});
  end_ += num_bytes;
}

void RecordWriter::queue_own(std::string bytes) {
  own_bytes_.push_back(std::move(bytes));
  queue(reinterpret_cast<uintptr_t>(own_bytes_.back().data()), static_cast<int64_t>(own_bytes_.back().size()));
}

void RecordWriter::begin_tensor(SavedRecord key, const ElementType& type,
                                const std::optional<core::Sizes>& global_sizes) {
  const int64_t num_bytes = core::checked_mul(core::num_elements(key.sizes), type.item_bytes);
  RecordFrame frame = frame_tensor(type, key.sizes, end_, num_bytes >= kLargeBytes ? kLargeAlignment : kAlignment);
  key.is_tensor = true;
  key.offset = end_;
  queue_own(std::move(frame.head));
  key.data_offset = end_;
  tensor_end_ = core::checked_add(end_, num_bytes);
  key.num_bytes = tensor_end_ + static_cast<int64_t>(frame.tail.size()) - key.offset;
  tail_frame_ = std::move(frame.tail);
  records_.push_back(std::move(key));
  if (global_sizes) begin_sum(type, *global_sizes);
}

void RecordWriter::begin_sum(const ElementType& type, const core::Sizes& global_sizes) {
  SavedRecord& record = records_.back();
  TTE_CHECK(options_.block_bytes % kAlignment == 0, path_, "blocks of ", options_.block_bytes,
            " bytes cut elements; please report");
  has_sums_ = true;
  if (!core::lies_inside({record.offsets, record.sizes}, global_sizes)) return;
  record.sum = 0;
  const core::Sizes strides = core::row_major_strides(global_sizes);
  int64_t position = 0;
  for (size_t dim = 0; dim < strides.size(); ++dim) position += record.offsets[dim] * strides[dim];
  const size_t nest = positions_.nests().size();
  positions_.start_pair();
  positions_.append_box(record.sizes, {core::checked_mul(position, type.item_bytes), strides},
                        {record.data_offset, core::row_major_strides(record.sizes)}, type.item_bytes);
  if (positions_.nests().size() == nest) return;  // it has no elements
  const int64_t word_bytes = std::min<int64_t>(type.item_bytes, sizeof(uint64_t));
  summed_.push_back({record.data_offset, tensor_end_, word_bytes, nest, records_.size() - 1});
}

void RecordWriter::add_bytes(uintptr_t address, int64_t num_bytes) {
  TTE_CHECK(num_bytes <= tensor_end_ - end_, path_, "got ", num_bytes, " bytes of ", records_.back().fqn,
            ", expected at most ", tensor_end_ - end_, "; please report");
  queue(address, num_bytes);
}

void RecordWriter::end_tensor() {
  TTE_CHECK(end_ == tensor_end_, path_, tensor_end_ - end_, " bytes of ", records_.back().fqn,
            " are missing; please report");
  queue_own(std::exchange(tail_frame_, {}));
}

void RecordWriter::add_tensor(SavedRecord key, const ElementType& type, uintptr_t address,
                              std::span<const int64_t> strides, const std::optional<core::Sizes>& global_sizes) {
  const core::Sizes sizes = key.sizes;
  begin_tensor(std::move(key), type, global_sizes);
  const core::Sizes file_strides = core::row_major_strides(sizes);
  const size_t num_nests = runs_.nests().size();
  runs_.start_pair();
  runs_.append_box(sizes, {static_cast<int64_t>(address), strides}, {end_, file_strides}, type.item_bytes);
  if (runs_.nests().size() > num_nests) {
    const core::RunNest& nest = runs_.nests().back();
    const bool is_contiguous = nest.num_loops == 0;
    segments_.push_back({end_, tensor_end_, address, is_contiguous ? -1 : static_cast<int64_t>(num_nests)});
    end_ = tensor_end_;
  }
  end_tensor();
}

void RecordWriter::add_record(SavedRecord key, uintptr_t address, int64_t num_bytes) {
  key.is_tensor = false;
  key.offset = end_;
  key.num_bytes = num_bytes;
  records_.push_back(std::move(key));
  queue(address, num_bytes);
}

void RecordWriter::write_queued() {
  write_blocks(end_ - end_ % options_.block_bytes);
  keep_rest();
}

int64_t RecordWriter::write_part(uintptr_t address, int64_t max_bytes) {
  const int64_t full_end = end_ - end_ % options_.block_bytes;
  part_ = address;
  part_begin_ = written_;
  write_blocks(std::min(full_end, written_ + max_bytes - max_bytes % options_.block_bytes));
  const int64_t num_bytes = written_ - part_begin_;
  if (written_ == full_end) keep_rest();
  return num_bytes;
}

// Keeps what is left of the last block: the memory of records may go.
void RecordWriter::keep_rest() {
  std::string rest(static_cast<size_t>(end_ - written_), '\0');
  copy_out(written_, end_, rest.data());
  segments_.clear();
  own_bytes_.clear();
  runs_ = {};
  end_ = written_;
  queue_own(std::move(rest));
}

void RecordWriter::write_at(std::span<iovec> pieces, int64_t offset) const {
  if (file_) {
    file_->write_at(pieces, offset);
    return;
  }
  auto* to = reinterpret_cast<char*>(part_) + (offset - part_begin_);
  for (const iovec& piece : pieces) {
    std::memcpy(to, piece.iov_base, piece.iov_len);
    to += piece.iov_len;
  }
}

SavedFile RecordWriter::finish(const SaveId& save_id, uint32_t rank) {
  if (!file_) {
    rest_.resize(static_cast<size_t>(end_ - written_));
    part_ = reinterpret_cast<uintptr_t>(rest_.data());
    part_begin_ = written_;
  }
  write_blocks(end_);
  const std::string footer = encode_footer({save_id, rank, options_.block_bytes, end_, checksums_});
  if (file_) {
    iovec piece = piece_of(footer.data(), static_cast<int64_t>(footer.size()));
    file_->write_at({&piece, 1}, end_);
    if (options_.sync) file_->sync();
    file_->close();
  } else {
    rest_ += footer;
  }
  SavedFile saved;
  saved.rank = rank;
  saved.num_bytes = end_ + static_cast<int64_t>(footer.size());
  saved.footer_offset = end_;
  saved.footer_digest = digest_of(footer);
  saved.records = encode_records(records_);
  for (const Summed& one : summed_) records_[one.record].sum = one.sum;
  if (has_sums_) saved.sums = encode_sums(records_);
  return saved;
}

// Writes blocks from `written_` on up to `end`; all but the last of the file are full.
void RecordWriter::write_blocks(int64_t end) {
  const int64_t block_bytes = options_.block_bytes;
  const int64_t num_blocks = num_blocks_of(end - written_, block_bytes);
  const size_t first_checksum = checksums_.size();
  checksums_.resize(first_checksum + static_cast<size_t>(num_blocks));
  std::vector<Scratch> scratches(static_cast<size_t>(options_.num_threads));
  if (file_ && num_blocks > 1) file_->reserve(written_, end - written_);
  parallel_for_items(options_.num_threads, num_blocks, [&](int worker, int64_t item) {
    const int64_t begin = written_ + item * block_bytes;
    const int64_t block_end = std::min(begin + block_bytes, end);
    Scratch& scratch = scratches[static_cast<size_t>(worker)];
    lay_out(begin, block_end, scratch);
    std::vector<iovec> pieces = scratch.pieces;
    write_at(pieces, begin);
    // Behind the write: it has brought the bytes into a core's cache at the pace of the copy, which hides the wait for
    // them. The other way round hashing waits for memory, and costs twice as much.
    Digest digest;
    for (const iovec& piece : scratch.pieces) digest.add(piece.iov_base, piece.iov_len);
    checksums_[first_checksum + static_cast<size_t>(item)] = digest.value();
    if (!summed_.empty()) add_sums(scratch.pieces, begin);
    if (file_ && options_.sync && block_end / kWriteBackBytes > begin / kWriteBackBytes) {
      const int64_t window_end = block_end / kWriteBackBytes * kWriteBackBytes;
      file_->start_write_back(window_end - kWriteBackBytes, kWriteBackBytes);
    }
  });
  written_ = end;
}

// Leaves the bytes of a block in `scratch.pieces`.
void RecordWriter::lay_out(int64_t begin, int64_t end, Scratch& scratch) {
  if (!scratch.block) scratch.block = std::make_unique_for_overwrite<char[]>(options_.block_bytes);
  scratch.pieces.clear();
  char* free = scratch.block.get();
  for (size_t index = first_segment(begin); index < segments_.size() && segments_[index].begin < end; ++index) {
    const Segment& segment = segments_[index];
    const core::Interval own = core::intersect({begin, end}, {segment.begin, segment.end});
    const int64_t from = own.begin, num_bytes = own.length();
    if (segment.nest < 0 && num_bytes >= kPackedBytes) {
      scratch.pieces.push_back(
          piece_of(reinterpret_cast<const char*>(segment.address) + (from - segment.begin), num_bytes));
      continue;
    }
    copy_out(from, from + num_bytes, free);
    iovec* last = scratch.pieces.empty() ? nullptr : &scratch.pieces.back();
    if (last != nullptr && static_cast<char*>(last->iov_base) + last->iov_len == free) {
      last->iov_len += static_cast<size_t>(num_bytes);
    } else {
      scratch.pieces.push_back(piece_of(free, num_bytes));
    }
    free += num_bytes;
  }
}

// Adds what the pieces, which lie one behind the other from byte `begin` of the file on, are of the sums of records.
// Several threads call this at a time.
void RecordWriter::add_sums(std::span<const iovec> pieces, int64_t begin) {
  const auto ends_before = [](int64_t value, const Summed& one) { return value < one.end; };
  auto one = std::upper_bound(summed_.begin(), summed_.end(), begin, ends_before);
  for (const iovec& piece : pieces) {
    const int64_t end = begin + static_cast<int64_t>(piece.iov_len);
    const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(piece.iov_base));
    while (one != summed_.end() && one->begin < end) {
      uint64_t sum = 0;
      visit_window(positions_, positions_.nests()[one->nest], begin, end, [&](const Stretch& stretch) {
        const core::Loop loop{stretch.count, stretch.file_stride, stretch.memory_stride};
        const int64_t src = address + (stretch.file_bytes - begin);
        sum += core::sum_runs(src, stretch.memory, loop, stretch.run_bytes, one->word_bytes);
      });
      std::atomic_ref(one->sum).fetch_add(sum, std::memory_order_relaxed);
      if (one->end > end) break;
      ++one;
    }
    begin = end;
  }
}

size_t RecordWriter::first_segment(int64_t byte) const {
  const auto ends_before = [](int64_t value, const Segment& segment) { return value < segment.end; };
  return static_cast<size_t>(std::upper_bound(segments_.begin(), segments_.end(), byte, ends_before) -
                             segments_.begin());
}

void RecordWriter::copy_out(int64_t begin, int64_t end, char* dst) const {
  for (size_t index = first_segment(begin); index < segments_.size() && segments_[index].begin < end; ++index) {
    const Segment& segment = segments_[index];
    const auto [from, to] = core::intersect({begin, end}, {segment.begin, segment.end});
    if (segment.nest < 0) {
      std::memcpy(dst + (from - begin), reinterpret_cast<const char*>(segment.address) + (from - segment.begin),
                  static_cast<size_t>(to - from));
      continue;
    }
    visit_window(runs_, runs_.nests()[static_cast<size_t>(segment.nest)], from, to,
                 [&](const Stretch& stretch) { copy_stretch(stretch, dst, begin, Direction::kToFile); });
  }
}

}  // namespace torchtitan_ext::storage
