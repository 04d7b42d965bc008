#include "storage/run_reader.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "core/boxes.h"
#include "storage/digest.h"
#include "storage/errors.h"
#include "storage/parallel.h"
#include "storage/run_window.h"

namespace torchtitan_ext::storage {
namespace {

// Files without checksums are read in blocks of this size too.
constexpr int64_t kBlockBytes = 1 << 20;
// Runs from this length on go straight to their places; of shorter ones a call would take too many pieces.
constexpr int64_t kDirectBytes = 4 << 10;
// Bytes that nobody wants are read along up to here: that costs less than another call. It is less where the page cache
// holds the bytes: a call costs what copying a page costs there, on a disk it is a seek.
constexpr int64_t kGapBytes = 64 << 10;
constexpr int64_t kCachedGapBytes = 4 << 10;

// So many bytes are hashed while a core's cache still holds what was read, source and destination.
constexpr size_t kHashedBytes = 256 << 10;

// A part of a block that one call reads.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  size_t first = 0;  // its stretches
  size_t last = 0;
};

// Reads pieces that lie one behind the other in a file, and hashes them.
void read_hashed(const File& file, std::span<const iovec> pieces, int64_t offset, Digest& digest) {
  std::vector<iovec> part;
  size_t part_bytes = 0;
  const auto read_part = [&] {
    std::vector<iovec> left = part;
    file.read_at(left, offset);
    for (const iovec& piece : part) digest.add(piece.iov_base, piece.iov_len);
    offset += static_cast<int64_t>(part_bytes);
    part.clear();
    part_bytes = 0;
  };
  for (iovec piece : pieces) {
    while (part_bytes + piece.iov_len >= kHashedBytes) {
      const size_t num_bytes = kHashedBytes - part_bytes;
      part.push_back({piece.iov_base, num_bytes});
      part_bytes = kHashedBytes;
      piece = {static_cast<char*>(piece.iov_base) + num_bytes, piece.iov_len - num_bytes};
      read_part();
    }
    if (piece.iov_len > 0) part.push_back(piece);
    part_bytes += piece.iov_len;
  }
  read_part();
}

}  // namespace

struct RunReader::Worker {
  std::unique_ptr<char[]> buffer;
  int64_t buffer_bytes = 0;
  std::vector<Stretch> stretches;
  std::vector<iovec> pieces;
  CastCopies casts;

  char* room(int64_t num_bytes) {
    if (buffer_bytes < num_bytes) {
      buffer = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(num_bytes));
      buffer_bytes = num_bytes;
    }
    return buffer.get();
  }

  // The bytes that the stretches want, with the gaps between them that cost nothing: the frames of small records are most
  // of these. The stretches are sorted.
  int64_t read_bytes() const {
    int64_t sum = 0;
    int64_t end = stretches.front().file_bytes;
    for (const Stretch& stretch : stretches) {
      const int64_t gap = std::max<int64_t>(0, stretch.file_bytes - end);
      sum += stretch.run_bytes * stretch.count + (gap <= kCachedGapBytes ? gap : 0);
      end = std::max(end, stretch.file_end());
    }
    return sum;
  }

  // Whether all runs are long, none is cast and no two of them touch the same byte; single runs then, in order of the
  // file.
  bool split_into_long_runs() {
    for (const Stretch& stretch : stretches) {
      if (stretch.run_bytes < kDirectBytes || stretch.cast_memory != nullptr) return false;
    }
    std::vector<Stretch> runs;
    for (const Stretch& stretch : stretches) {
      for (int64_t index = 0; index < stretch.count; ++index) {
        runs.push_back({stretch.file_bytes + index * stretch.file_stride,
                        stretch.memory + index * stretch.memory_stride, stretch.run_bytes});
      }
    }
    sort(runs);
    for (size_t index = 1; index < runs.size(); ++index) {
      if (runs[index].file_bytes < runs[index - 1].file_end()) return false;
    }
    stretches = std::move(runs);
    return true;
  }

  static void sort(std::vector<Stretch>& stretches) {
    std::ranges::sort(stretches, {}, [](const Stretch& stretch) { return stretch.file_bytes; });
  }

  // What to read for stretches [first, last), which are sorted: cut where nobody wants more than `max_gap`.
  std::vector<Span> spans(size_t first, size_t last, int64_t max_gap) const {
    std::vector<Span> spans;
    for (size_t index = first; index < last; ++index) {
      const Stretch& stretch = stretches[index];
      if (spans.empty() || stretch.file_bytes > spans.back().end + max_gap) {
        spans.push_back({stretch.file_bytes, stretch.file_end(), index, index + 1});
      } else {
        spans.back().end = std::max(spans.back().end, stretch.file_end());
        spans.back().last = index + 1;
      }
    }
    return spans;
  }

  // Reads the runs of a span, as long as the page cache holds them without their gaps; the rest with gaps.
  void read_long_runs(const File& file, const Span& span) {
    Span rest = span;
    const std::vector<Span> parts = spans(span.first, span.last, kCachedGapBytes);
    for (size_t index = 0; parts.size() > 1 && index < parts.size(); ++index) {
      lay_out(parts[index]);
      if (!file.read_cached_at(pieces, parts[index].begin)) break;
      rest.first = parts[index].last;
    }
    if (rest.first == rest.last) return;
    rest.begin = stretches[rest.first].file_bytes;
    lay_out(rest);
    file.read_at(pieces, rest.begin);
  }

  // Pieces of memory that take a span of long runs, with the gaps in the buffer.
  void lay_out(const Span& span) {
    pieces.clear();
    char* gaps = room(span.end - span.begin);
    int64_t at = span.begin;
    const auto skip_to = [&](int64_t byte) {
      if (byte > at) pieces.push_back({gaps + (at - span.begin), static_cast<size_t>(byte - at)});
    };
    for (size_t index = span.first; index < span.last; ++index) {
      const Stretch& run = stretches[index];
      skip_to(run.file_bytes);
      pieces.push_back({pointer(run.memory), static_cast<size_t>(run.run_bytes)});
      at = run.file_end();
    }
    skip_to(span.end);
  }

  void copy_from_buffer(const Span& span) {
    const std::span<const Stretch> of_span = std::span(stretches).subspan(span.first, span.last - span.first);
    copy_from_window(of_span, buffer.get(), span.begin, casts);
  }
};

RunReader::RunReader() = default;
RunReader::~RunReader() = default;

int64_t RunReader::add_file(File file, int64_t num_bytes, FileChecksums checksums) {
  Source source{std::move(file), 0, std::move(checksums), {}, {}};
  source.num_bytes = source.file.num_bytes();
  if (num_bytes >= 0 && source.num_bytes != num_bytes) {
    throw_format_error(source.file.path(), std::min(num_bytes, source.num_bytes), "the file has ", source.num_bytes,
                       " bytes, expected ", num_bytes);
  }
  if (source.checksums.covered_bytes > source.num_bytes) {
    throw_format_error(source.file.path(), source.num_bytes, "the file ends here, its checksums cover ",
                       source.checksums.covered_bytes, " bytes");
  }
  sources_.push_back(std::move(source));
  return static_cast<int64_t>(sources_.size()) - 1;
}

void RunReader::check_inside(const Source& source, int64_t begin, int64_t num_bytes) {
  const int64_t end = source.records_end();
  if (begin < 0 || num_bytes < 0 || begin > end || num_bytes > end - begin) {
    throw_format_error(source.file.path(), begin, "the file has ", end, " bytes of records, expected ", num_bytes,
                       " from here on");
  }
}

int64_t RunReader::add_box(int64_t file, const Box& box) {
  Source& source = sources_.at(static_cast<size_t>(file));
  const std::string& path = source.file.path();
  if (box.stored_sizes.size() != box.sizes.size()) {
    throw_format_error(path, box.data_offset, "a tensor of ", box.stored_sizes.size(),
                       " dims lies here, expected one of ", box.sizes.size());
  }
  int64_t first = 0;
  int64_t last = 0;
  core::Sizes sizes(box.sizes.begin(), box.sizes.end());  // without repeated elements
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    if (box.offsets[dim] < 0 || box.sizes[dim] < 0 || box.offsets[dim] > box.stored_sizes[dim] - box.sizes[dim]) {
      throw_format_error(path, box.data_offset, box.sizes[dim], " elements from ", box.offsets[dim], " on of dim ", dim,
                         " are wanted, the record has ", box.stored_sizes[dim]);
    }
    if (box.sizes[dim] == 0) return num_boxes_++;
    if (box.stored_strides[dim] == 0) sizes[dim] = 1;
    first = core::checked_add(first, core::checked_mul(box.offsets[dim], box.stored_strides[dim]));
    last = core::checked_add(last, core::checked_mul(box.sizes[dim] - 1, box.stored_strides[dim]));
  }
  const int64_t begin = core::checked_add(box.data_offset, core::checked_mul(first, box.item_bytes));
  check_inside(source, begin, core::checked_mul(core::checked_add(last, 1), box.item_bytes));
  core::RunList& runs = source.runs.list();
  const CastMemory* cast_memory = nullptr;
  if (box.cast != nullptr) {
    cast_memory_.push_back({box.cast, static_cast<int64_t>(box.address), num_boxes_});
    cast_memory = &cast_memory_.back();
  }
  for (const core::Chunk& part : core::boxes_in_file_order(sizes, box.stored_strides)) {
    auto address = static_cast<int64_t>(box.address), byte = begin;
    for (size_t dim = 0; dim < part.sizes.size(); ++dim) {
      address += part.offsets[dim] * box.strides[dim] * box.item_bytes;
      byte += part.offsets[dim] * box.stored_strides[dim] * box.item_bytes;
    }
    runs.start_pair();
    runs.append_box(part.sizes, {address, box.strides}, {byte, box.stored_strides}, box.item_bytes);
    if (cast_memory != nullptr) source.runs.cast_last(*cast_memory);
    TTE_CHECK(is_in_file_order(runs, runs.nests().back()), path,
              "elements of a stored tensor are interleaved; please report");
  }
  const int64_t item_bytes = box.cast == nullptr ? box.item_bytes : box.cast->dst_bytes;
  for (size_t dim = sizes.size(); dim-- > 0;) {  // from the inside, so that the copies become long
    if (sizes[dim] == box.sizes[dim]) continue;
    sizes[dim] = box.sizes[dim] - 1;
    const auto address = static_cast<int64_t>(box.address);
    core::Sizes once(box.strides.begin(), box.strides.end());
    once[dim] = 0;
    repeats_.start_pair();
    repeats_.append_box(sizes, {address, once}, {address + box.strides[dim] * item_bytes, box.strides}, item_bytes);
    sizes[dim] = box.sizes[dim];
  }
  return num_boxes_++;
}

void RunReader::add_bytes(int64_t file, int64_t offset, int64_t num_bytes, uintptr_t address) {
  Source& source = sources_.at(static_cast<size_t>(file));
  check_inside(source, offset, num_bytes);
  source.runs.list().start_pair();
  source.runs.list().append_bytes(static_cast<int64_t>(address), offset, num_bytes);
}

void RunReader::check_bytes(int64_t file, int64_t offset, int64_t num_bytes) const {
  check_inside(sources_.at(static_cast<size_t>(file)), offset, num_bytes);
}

void RunReader::add_blocks(int64_t file, int64_t first, int64_t last) {
  Source& source = sources_.at(static_cast<size_t>(file));
  const auto num_blocks = static_cast<int64_t>(source.checksums.checksums.size());
  TTE_CHECK(first >= 0 && first <= last && last <= num_blocks, source.file.path(), "has ", num_blocks,
            " blocks with a checksum, got blocks ", first, " to ", last);
  const int64_t block_bytes = source.checksums.block_bytes;
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * block_bytes;
    source.blocks.push_back({begin, std::min(begin + block_bytes, source.records_end())});
  }
}

// The blocks in which anything is wanted, and those that were asked for.
std::vector<RunReader::Unit> RunReader::units_of(size_t index) {
  Source& source = sources_[index];
  const int64_t block_bytes = source.checksums.block_bytes > 0 ? source.checksums.block_bytes : kBlockBytes;
  std::vector<Unit> units;
  for (const core::Interval& window : source.runs.windows(block_bytes, source.records_end())) {
    units.push_back({static_cast<int64_t>(index), window.begin, window.end});
  }
  const size_t num_wanted = units.size();
  for (const core::Interval& block : source.blocks) {
    const auto found =
        std::lower_bound(units.begin(), units.begin() + static_cast<std::ptrdiff_t>(num_wanted), block.begin,
                         [](const Unit& unit, int64_t begin) { return unit.begin < begin; });
    if (found != units.begin() + static_cast<std::ptrdiff_t>(num_wanted) && found->begin == block.begin) {
      found->is_for_checksum = true;
    } else {
      units.push_back({static_cast<int64_t>(index), block.begin, block.end, true});
    }
  }
  return units;
}

void RunReader::touch() {
  std::vector<Stretch> stretches;
  for (size_t index = 0; index < sources_.size(); ++index) {
    Source& source = sources_[index];
    if (source.checksums.states != nullptr) {
      for (const Unit& unit : units_of(index)) {
        stretches.clear();
        source.runs.find(unit.begin, unit.end, stretches);
        if (!stretches.empty()) source.touch(unit.begin);
      }
    }
  }
  forget();
}

void RunReader::forget() {
  for (Source& source : sources_) {
    source.runs.clear();
    source.blocks.clear();
  }
  repeats_ = {};
  cast_memory_.clear();
  num_boxes_ = 0;
}

std::vector<RunReader::Unit> RunReader::all_units() {
  std::vector<Unit> units;
  for (size_t index = 0; index < sources_.size(); ++index) {
    const std::vector<Unit> of_source = units_of(index);
    units.insert(units.end(), of_source.begin(), of_source.end());
  }
  return units;
}

std::vector<DamagedBlock> RunReader::read(int num_threads, Verify verify) {
  // Whatever happens: the memory that was to be filled need not be there any more when the next call reads.
  struct Forgetting {
    RunReader& reader;
    ~Forgetting() { reader.forget(); }
  } forgetting{*this};
  lost_.clear();
  TTE_CHECK(num_threads > 0, "read", "got ", num_threads, " threads, expected at least 1");
  const std::vector<Unit> units = all_units();
  std::vector<Worker> workers(static_cast<size_t>(num_threads));
  std::mutex mutex;
  std::vector<DamagedBlock> damaged;
  parallel_for_items(num_threads, static_cast<int64_t>(units.size()), [&](int worker, int64_t item) {
    const Unit& unit = units[static_cast<size_t>(item)];
    if (read_unit(unit, verify, workers[static_cast<size_t>(worker)])) return;
    const std::lock_guard lock(mutex);
    damaged.push_back({unit.source, unit.begin, unit.end});
  });
  std::vector<Worker*> used;
  for (Worker& worker : workers) used.push_back(&worker);
  return end_read(used, std::move(damaged));
}

std::vector<RunReader::Request> RunReader::requests(Verify verify, int64_t max_gap, int64_t max_bytes) {
  lost_.clear();
  fetch_ = std::make_unique<Fetch>();
  Worker worker;
  for (Unit& unit : all_units()) {
    const Source& source = sources_[static_cast<size_t>(unit.source)];
    worker.stretches.clear();
    source.runs.find(unit.begin, unit.end, worker.stretches);
    if (worker.stretches.empty() && !unit.is_for_checksum) continue;
    Worker::sort(worker.stretches);
    unit.is_verified = is_verified(source, unit, verify, worker);
    Request needed{unit.source, unit.begin, unit.end};
    if (!unit.is_verified) {
      needed.begin = worker.stretches.front().file_bytes;
      needed.end = needed.begin;
      for (const Stretch& stretch : worker.stretches) needed.end = std::max(needed.end, stretch.file_end());
    }
    std::vector<Request>& requests = fetch_->requests;
    const bool is_near = !requests.empty() && requests.back().file == needed.file &&
                         needed.begin >= requests.back().begin && needed.begin - requests.back().end <= max_gap &&
                         needed.end - requests.back().begin <= max_bytes;
    if (is_near) {
      requests.back().end = std::max(requests.back().end, needed.end);
      ++fetch_->ends.back();
    } else {
      requests.push_back(needed);
      fetch_->ends.push_back(fetch_->units.size() + 1);
    }
    fetch_->units.push_back(unit);
  }
  return fetch_->requests;
}

void RunReader::take(int64_t request, std::span<const char> bytes) {
  TTE_CHECK(fetch_ != nullptr, "take", "no read was begun");
  Fetch& fetch = *fetch_;
  const auto index = static_cast<size_t>(request);
  const auto [file, begin, end] = fetch.requests.at(index);
  if (static_cast<int64_t>(bytes.size()) != end - begin) {
    throw_format_error(sources_[static_cast<size_t>(file)].file.path(), begin, "got ", bytes.size(),
                       " bytes, expected ", end - begin);
  }
  std::unique_ptr<Worker> worker;
  {
    const std::lock_guard lock(fetch.mutex);
    if (!fetch.idle.empty()) {
      worker = std::move(fetch.idle.back());
      fetch.idle.pop_back();
    }
  }
  if (worker == nullptr) worker = std::make_unique<Worker>();
  std::vector<DamagedBlock> damaged;
  for (size_t number = index == 0 ? 0 : fetch.ends[index - 1]; number < fetch.ends[index]; ++number) {
    const Unit& unit = fetch.units[number];
    if (!take_unit(unit, bytes, begin, *worker)) damaged.push_back({unit.source, unit.begin, unit.end});
  }
  const std::lock_guard lock(fetch.mutex);
  fetch.idle.push_back(std::move(worker));
  fetch.damaged.insert(fetch.damaged.end(), damaged.begin(), damaged.end());
}

std::vector<DamagedBlock> RunReader::finish() {
  const std::unique_ptr<Fetch> fetch = std::move(fetch_);
  TTE_CHECK(fetch != nullptr, "finish", "no read was begun");
  if (fetch->idle.empty()) fetch->idle.push_back(std::make_unique<Worker>());
  std::vector<Worker*> used;
  for (const std::unique_ptr<Worker>& worker : fetch->idle) used.push_back(worker.get());
  std::vector<DamagedBlock> damaged = end_read(used, std::move(fetch->damaged));
  forget();
  return damaged;
}

// What is left when the bytes of all units are in memory; there is at least one worker.
std::vector<DamagedBlock> RunReader::end_read(std::span<Worker* const> workers, std::vector<DamagedBlock> damaged) {
  CastCopies& casts = workers.front()->casts;
  for (Worker* worker : workers.subspan(1)) casts.join(worker->casts);
  casts.finish();
  lost_ = casts.lost();
  for (const core::RunNest& nest : repeats_.nests()) copy_nest(repeats_, nest);
  std::ranges::sort(damaged, {}, [](const DamagedBlock& block) { return std::pair(block.file, block.begin); });
  return damaged;
}

// Whether a block is compared with its checksum now. The worker has what is wanted of it, sorted.
bool RunReader::is_verified(const Source& source, const Unit& unit, Verify verify, const Worker& worker) {
  if (unit.is_for_checksum) return true;
  if (source.checksums.checksums.empty() || verify == Verify::kNone) return false;
  if (verify == Verify::kAll) return true;
  const auto block = static_cast<size_t>(unit.begin / source.checksums.block_bytes);
  if (source.checksums.states != nullptr && source.checksums.states->at(block) >= core::BlockState::kElsewhere)
    return false;
  return verify == Verify::kOnce || 2 * worker.read_bytes() >= unit.end - unit.begin;
}

// False where the block does not match its checksum.
bool RunReader::read_unit(const Unit& unit, Verify verify, Worker& worker) const {
  const Source& source = sources_[static_cast<size_t>(unit.source)];
  worker.stretches.clear();
  source.runs.find(unit.begin, unit.end, worker.stretches);
  if (worker.stretches.empty() && !unit.is_for_checksum) return true;
  const bool is_direct = worker.split_into_long_runs();
  if (!is_direct) Worker::sort(worker.stretches);
  const bool is_verified = RunReader::is_verified(source, unit, verify, worker);
  std::vector<Span> spans = worker.spans(0, worker.stretches.size(), kGapBytes);
  if (is_verified) spans = {{unit.begin, unit.end, 0, worker.stretches.size()}};
  Digest digest;
  for (const Span& span : spans) {
    if (is_direct && !is_verified) {
      worker.read_long_runs(source.file, span);
      continue;
    }
    if (is_direct) {
      worker.lay_out(span);
    } else {
      worker.pieces.assign(1, {worker.room(span.end - span.begin), static_cast<size_t>(span.end - span.begin)});
    }
    if (is_verified) {
      read_hashed(source.file, worker.pieces, span.begin, digest);
    } else {
      source.file.read_at(worker.pieces, span.begin);
    }
    if (!is_direct) worker.copy_from_buffer(span);
  }
  return note(source, unit, is_verified, digest.value());
}

// The same of bytes that were fetched, which begin at byte `begin` of the file.
bool RunReader::take_unit(const Unit& unit, std::span<const char> bytes, int64_t begin, Worker& worker) const {
  const Source& source = sources_[static_cast<size_t>(unit.source)];
  worker.stretches.clear();
  source.runs.find(unit.begin, unit.end, worker.stretches);
  Worker::sort(worker.stretches);
  Digest digest;
  if (unit.is_verified) {
    digest.add(bytes.data() + (unit.begin - begin), static_cast<size_t>(unit.end - unit.begin));
  }
  copy_from_window(worker.stretches, bytes.data(), begin, worker.casts);
  return note(source, unit, unit.is_verified, digest.value());
}

// Notes in the ledger what was done with a block. False where it does not match its checksum.
bool RunReader::note(const Source& source, const Unit& unit, bool is_verified, uint64_t digest) {
  if (source.checksums.checksums.empty()) return true;
  const auto block = static_cast<size_t>(unit.begin / source.checksums.block_bytes);
  const bool is_right = !is_verified || digest == source.checksums.checksums.at(block);
  if (source.checksums.states != nullptr) {
    if (is_verified && is_right) {
      source.checksums.states->raise(block, core::BlockState::kVerified);
    } else {
      source.touch(unit.begin);
    }
  }
  return is_right;
}

}  // namespace torchtitan_ext::storage
