// Files written and read in one piece and in many, on one thread and on several, against bytes put together by hand.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <string>

#include "core/pickle_writer.h"
#include "storage/bytes.h"
#include "storage/digest.h"
#include "storage/errors.h"
#include "storage/file.h"
#include "storage/parallel.h"
#include "storage/record_writer.h"
#include "storage/run_reader.h"
#include "storage/run_window.h"
#include "storage/run_writer.h"

namespace {

// How many more allocations of this thread succeed; any number where it is negative.
thread_local int allocations_left = -1;

}  // namespace

__attribute__((noinline)) void* operator new(size_t num_bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(num_bytes > 0 ? num_bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// All forms: a sanitizer has one of its own for each that is left to it.
__attribute__((noinline)) void* operator new(size_t num_bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(num_bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace torchtitan_ext::storage {
namespace {

class Files : public testing::Test {
 protected:
  Files() {
    std::string name = (std::filesystem::temp_directory_path() / "tte_files_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~Files() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

core::RunList random_runs(std::mt19937& random, int64_t* num_bytes) {
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random); };
  const core::Sizes sizes{pick(1, 4), pick(1, 5), pick(1, 6)};
  const core::Sizes file_shape{sizes[0], sizes[1] + pick(0, 2), sizes[2] + pick(0, 2)};
  const core::Sizes file_strides{file_shape[1] * file_shape[2], file_shape[2], 1};
  const core::Sizes strides{pick(1, 3), 100, 1000};
  core::RunList runs;
  runs.append_box(sizes, {0, strides}, {pick(0, 20), file_strides}, 4);
  *num_bytes = runs.dst_extent().end;
  return runs;
}

TEST(RunWindow, WindowsTogetherVisitEveryByteOnce) {
  std::mt19937 random(0);
  for (int round = 0; round < 500; ++round) {
    int64_t end = 0;
    const core::RunList runs = random_runs(random, &end);
    std::vector<int64_t> expected(static_cast<size_t>(end), -1);
    for (const core::Run& run : runs.enumerate()) {
      for (int64_t byte = 0; byte < run.num_bytes; ++byte) {
        expected[static_cast<size_t>(run.dst_bytes + byte)] = run.src_bytes + byte;
      }
    }
    const int64_t window = std::uniform_int_distribution<int64_t>(1, 40)(random);
    std::vector<int64_t> seen(static_cast<size_t>(end), -1);
    for (const core::RunNest& nest : runs.nests()) {
      ASSERT_TRUE(is_in_file_order(runs, nest));
      for (int64_t begin = 0; begin < end; begin += window) {
        visit_window(runs, nest, begin, begin + window, [&](const Stretch& stretch) {
          EXPECT_GE(stretch.file_bytes, begin);
          EXPECT_LE(stretch.file_end(), begin + window);
          for (int64_t index = 0; index < stretch.count; ++index) {
            for (int64_t byte = 0; byte < stretch.run_bytes; ++byte) {
              int64_t& place = seen[static_cast<size_t>(stretch.file_bytes + index * stretch.file_stride + byte)];
              EXPECT_EQ(place, -1);
              place = stretch.memory + index * stretch.memory_stride + byte;
            }
          }
        });
      }
    }
    ASSERT_EQ(seen, expected) << "window " << window;
  }
}

TEST(Parallel, EveryItemOnceAndTheFirstErrorIsThrown) {
  std::vector<int> seen(1000, 0);
  parallel_for_items(4, 1000, [&](int, int64_t item) { ++seen[static_cast<size_t>(item)]; });
  EXPECT_EQ(seen, std::vector<int>(1000, 1));
  EXPECT_THROW(parallel_for_items(4, 1000,
                                  [](int, int64_t item) {
                                    if (item == 7) throw IoError(5, "path", "broken");
                                  }),
               IoError);
}

TEST(Parallel, ThreadsThatRunAreJoinedWhereMemoryEnds) {
  int num_finished = 0;
  for (int allocations = 0; allocations < 20; ++allocations) {
    std::atomic<int> num_done = 0;
    const std::function<void(int, int64_t)> body = [&](int, int64_t) { ++num_done; };
    bool is_thrown = false;
    allocations_left = allocations;
    try {
      parallel_for_items(8, 100, body);
    } catch (const std::bad_alloc&) {
      is_thrown = true;
    }
    allocations_left = -1;
    EXPECT_TRUE(num_done == 100 || (is_thrown && num_done == 0)) << allocations;
    num_finished += num_done == 100 ? 1 : 0;
  }
  EXPECT_GT(num_finished, 0);
}

SavedRecord key_of(const std::string& name, core::Sizes sizes) {
  SavedRecord key;
  key.fqn = name;
  key.dtype = "int32";
  key.offsets = core::Sizes(sizes.size(), 0);
  key.sizes = std::move(sizes);
  return key;
}

const ElementType kInt{"IntStorage", "", 4};

TEST_F(Files, RecordsOfAllKindsComeBackWhateverTheBlocksAndThreads) {
  std::vector<int32_t> numbers(200 * 300);
  std::iota(numbers.begin(), numbers.end(), 0);
  const auto address = reinterpret_cast<uintptr_t>(numbers.data());
  const std::string value = "a pickled value";
  for (const uint32_t block_bytes : {512u, 4096u, 1u << 20}) {
    for (const int num_threads : {1, 3}) {
      RecordWriter writer(path("file"), {block_bytes, num_threads, true});
      writer.add_record(key_of("value", {}), reinterpret_cast<uintptr_t>(value.data()), 15);
      writer.add_tensor(key_of("rows", {200, 300}), kInt, address, core::Sizes{300, 1});
      writer.add_tensor(key_of("columns", {300, 200}), kInt, address, core::Sizes{1, 300});
      writer.write_queued();
      for (int64_t index = 0; index < 50; ++index) {
        writer.add_tensor(key_of("small", {index}), kInt, address + 4 * static_cast<uintptr_t>(index), core::Sizes{1});
      }
      writer.begin_tensor(key_of("parts", {200, 300}), kInt);
      for (int64_t row = 0; row < 200; ++row) {
        writer.add_bytes(address + static_cast<uintptr_t>(row) * 1200, 1200);
        if (row % 7 == 0) writer.write_queued();
      }
      writer.end_tensor();
      const SavedFile saved = writer.finish({}, 0);

      const std::string content = read_file(path("file"), 1 << 24);
      ASSERT_EQ(static_cast<int64_t>(content.size()), saved.num_bytes);
      const Footer footer =
          parse_footer(std::string_view(content).substr(saved.footer_offset), "file", saved.footer_offset);
      RunReader reader;
      const int64_t file = reader.add_file(File::open(path("file")), saved.num_bytes,
                                           {footer.block_bytes, footer.covered_bytes, footer.checksums});
      std::vector<std::vector<int32_t>> loaded;
      std::vector<SavedRecord> records = parse_records(saved.records, saved.footer_offset, "file");
      ASSERT_EQ(records.size(), 54u);
      loaded.reserve(records.size());
      for (const SavedRecord& record : records) {
        if (!record.is_tensor) continue;
        loaded.emplace_back(static_cast<size_t>(core::num_elements(record.sizes)));
        const core::Sizes strides =
            record.sizes.size() == 2 ? core::Sizes{record.sizes[1], 1} : core::Sizes(record.sizes.size(), 1);
        reader.add_box(file, {record.data_offset, 4, record.sizes, strides, record.offsets, record.sizes,
                              reinterpret_cast<uintptr_t>(loaded.back().data()), strides});
      }
      std::string value_back(15, ' ');
      reader.add_bytes(file, records[0].offset, 15, reinterpret_cast<uintptr_t>(value_back.data()));
      EXPECT_TRUE(reader.read(num_threads, Verify::kAll).empty());
      EXPECT_EQ(value_back, value);
      EXPECT_EQ(loaded[0], numbers);
      for (int64_t column = 0; column < 300; ++column) {
        for (int64_t row = 0; row < 200; ++row) {
          ASSERT_EQ(loaded[1][static_cast<size_t>(column * 200 + row)], row * 300 + column);
        }
      }
      for (int32_t index = 0; index < 50; ++index) {
        std::vector<int32_t> expected(static_cast<size_t>(index));
        std::iota(expected.begin(), expected.end(), index);
        EXPECT_EQ(loaded[static_cast<size_t>(2 + index)], expected);
      }
      EXPECT_EQ(loaded.back(), numbers);
    }
  }
}

// Leaves every other piece of this many bytes of a file in the page cache, as far as the file system can do that.
void drop_from_cache(const std::string& path, int64_t num_bytes, int64_t piece_bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  for (int64_t begin = 0; begin < num_bytes; begin += 2 * piece_bytes) {
    EXPECT_EQ(::posix_fadvise(descriptor, begin, piece_bytes, POSIX_FADV_DONTNEED), 0);
  }
  ::close(descriptor);
}

TEST_F(Files, LongRunsWithGapsComeBackFromTheCacheAndFromTheDisk) {
  constexpr int64_t kRows = 200, kRowInts = 6000, kWanted = 2048;
  std::vector<int32_t> numbers(kRows * kRowInts);
  std::iota(numbers.begin(), numbers.end(), 0);
  File file = File::create(path("rows"));
  iovec piece{numbers.data(), numbers.size() * 4};
  file.write_at({&piece, 1}, 0);
  file.sync();
  file.close();
  for (const int64_t dropped_bytes : {int64_t{0}, int64_t{512} << 10, int64_t{100} << 20}) {
    if (dropped_bytes > 0) drop_from_cache(path("rows"), kRows * kRowInts * 4, dropped_bytes);
    std::vector<int32_t> loaded(kRows * kWanted, -1);
    RunReader reader;
    const int64_t number = reader.add_file(File::open(path("rows")), -1, {});
    const core::Sizes stored{kRows, kRowInts}, stored_strides{kRowInts, 1}, offsets{0, 1000}, sizes{kRows, kWanted};
    const core::Sizes strides{kWanted, 1};
    reader.add_box(number,
                   {0, 4, stored, stored_strides, offsets, sizes, reinterpret_cast<uintptr_t>(loaded.data()), strides});
    reader.read(2, Verify::kNone);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t column = 0; column < kWanted; ++column) {
        ASSERT_EQ(loaded[static_cast<size_t>(row * kWanted + column)], row * kRowInts + 1000 + column);
      }
    }
  }
}

TEST_F(Files, WhatTheCacheHoldsIsReadWholeOrNotAtAll) {
  std::string bytes = "0123456789";
  File file = File::create(path("digits"));
  iovec written{bytes.data(), bytes.size()};
  file.write_at({&written, 1}, 0);
  file.close();
  const File opened = File::open(path("digits"));
  std::string head(4, ' '), tail(3, ' ');
  const std::vector<iovec> pieces{{head.data(), 4}, {tail.data(), 3}};
  if (opened.read_cached_at(pieces, 2)) {
    EXPECT_EQ(head + tail, "2345678");
  }
  EXPECT_FALSE(opened.read_cached_at(pieces, 5));
}

TEST_F(Files, ManyShortPiecesAreWrittenWhole) {
  std::string bytes(5000, '\0');
  for (size_t index = 0; index < bytes.size(); ++index) bytes[index] = static_cast<char>(index % 251);
  std::vector<iovec> pieces;
  for (size_t index = 0; index < bytes.size(); ++index) pieces.push_back({&bytes[index], index % 3 == 0 ? 1u : 0u});
  std::string expected;
  for (size_t index = 0; index < bytes.size(); index += 3) expected += bytes[index];
  File file = File::create(path("pieces"));
  file.write_at(pieces, 7);
  file.close();
  EXPECT_EQ(read_file(path("pieces"), 1 << 20), std::string(7, '\0') + expected);
}

TEST_F(Files, ErrorsNameThePath) {
  try {
    File::open(path("nothing"));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), ENOENT);
    EXPECT_EQ(error.path(), path("nothing"));
  }
  File file = File::create(path("short"));
  char byte = 'x';
  iovec piece{&byte, 1};
  file.write_at({&piece, 1}, 0);
  file.close();
  char room[2];
  iovec more{room, 2};
  EXPECT_THROW(File::open(path("short")).read_at({&more, 1}, 0), IoError);
  RunReader reader;
  EXPECT_THROW(reader.add_file(File::open(path("short")), 2, {}), FormatError);
  const int64_t number = reader.add_file(File::open(path("short")), 1, {});
  EXPECT_THROW(reader.add_bytes(number, 0, 2, 0), FormatError);
  EXPECT_THROW(reader.add_bytes(number, INT64_MAX, 1, 0), FormatError);
  EXPECT_THROW(reader.add_bytes(number, -1, 1, 0), FormatError);
}

TEST_F(Files, AReadThatThrowsForgetsItsRuns) {
  std::string bytes(5000, 'x');
  File file = File::create(path("file"));
  iovec piece{bytes.data(), bytes.size()};
  file.write_at({&piece, 1}, 0);
  file.close();
  RunReader reader;
  const int64_t number = reader.add_file(File::open(path("file")), -1, {});
  std::string first(5000, '-'), second(10, '-');
  const auto add = [&](std::string& room) {
    reader.add_bytes(number, 0, static_cast<int64_t>(room.size()), reinterpret_cast<uintptr_t>(room.data()));
  };
  add(first);
  EXPECT_THROW(reader.read(0, Verify::kNone), std::invalid_argument);
  add(first);
  std::filesystem::resize_file(path("file"), 1000);
  EXPECT_THROW(reader.read(2, Verify::kNone), IoError);
  first.assign(5000, '-');
  add(second);
  reader.read(2, Verify::kNone);
  EXPECT_EQ(second, std::string(10, 'x'));
  EXPECT_EQ(first, std::string(5000, '-'));
}

TEST_F(Files, AFooterIsFoundByTheEndOfItsFile) {
  const auto write = [&](std::string content) {
    File file = File::create(path("file"));
    iovec piece{content.data(), content.size()};
    if (!content.empty()) file.write_at({&piece, 1}, 0);
    file.close();
    return File::open(path("file"));
  };
  const std::string records(250, 'r');
  const std::string footer = encode_footer({{7}, 3, 100, 250, {1, 2, 3}});
  const std::optional<FoundFooter> found = find_footer(write(records + footer));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->footer.save_id, (SaveId{7}));
  EXPECT_EQ(found->footer.rank, 3u);
  EXPECT_EQ(found->footer.covered_bytes, 250);
  EXPECT_EQ(found->num_bytes, static_cast<int64_t>(250 + footer.size()));
  EXPECT_EQ(found->digest, digest_of(footer));
  for (const std::string& other : {std::string(), std::string(5, 'r'), records, records + footer.substr(0, 40)}) {
    EXPECT_FALSE(find_footer(write(other)));
  }
  for (const int64_t offset : {int64_t{-1}, int64_t{249}, int64_t{1} << 60, std::numeric_limits<int64_t>::max()}) {
    ByteWriter trailer;
    trailer.number(offset).number(static_cast<uint64_t>(footer.size() - 24)).raw("TTETRAIL");
    EXPECT_THROW(find_footer(write(records + footer.substr(0, footer.size() - 24) + trailer.take())), FormatError);
  }
  EXPECT_THROW(find_footer(write(records.substr(1) + footer)), FormatError);
}

TEST_F(Files, ABlockThatIsDamagedIsNamed) {
  std::vector<char> bytes(100'000, 'a');
  RecordWriter writer(path("file"), {4096, 2, false});
  writer.add_record(key_of("bytes", {}), reinterpret_cast<uintptr_t>(bytes.data()), 100'000);
  const SavedFile saved = writer.finish({}, 0);
  std::string content = read_file(path("file"), 1 << 20);
  const Footer footer =
      parse_footer(std::string_view(content).substr(saved.footer_offset), "file", saved.footer_offset);
  content[9000] = 'b';
  File damaged = File::create(path("file"));
  iovec piece{content.data(), content.size()};
  damaged.write_at({&piece, 1}, 0);
  damaged.close();
  RunReader reader;
  const int64_t file = reader.add_file(File::open(path("file")), -1, {4096, footer.covered_bytes, footer.checksums});
  const auto damaged_blocks = [&](int64_t begin, int64_t num_bytes, Verify verify) {
    reader.add_bytes(file, begin, num_bytes, reinterpret_cast<uintptr_t>(bytes.data()));
    return reader.read(2, verify).size();
  };
  EXPECT_EQ(damaged_blocks(0, 100'000, Verify::kAll), 1u);
  EXPECT_EQ(damaged_blocks(0, 100'000, Verify::kMostly), 1u);
  EXPECT_EQ(damaged_blocks(0, 100'000, Verify::kNone), 0u);
  EXPECT_EQ(damaged_blocks(8192, 1, Verify::kAll), 1u);
  EXPECT_EQ(damaged_blocks(8192, 2048, Verify::kMostly), 1u);
  EXPECT_EQ(damaged_blocks(8192, 2047, Verify::kMostly), 0u);
  EXPECT_EQ(damaged_blocks(0, 8192, Verify::kAll), 0u);
}

// Elements of memory at random strides, to places of the file that may lie between each other: what each byte must be.
struct RandomBox {
  core::Sizes sizes, strides, file_strides;
  int64_t offset = 0;
};

std::vector<RandomBox> random_boxes(std::mt19937& random) {
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random); };
  const int64_t rows = pick(1, 5), columns = pick(1, 7), depth = pick(1, 4);
  const core::Sizes file_strides{columns * depth, depth, 1};
  const core::Sizes strides{pick(1, 3), 40, 400};
  const int64_t cut = pick(0, columns);
  std::vector<RandomBox> boxes{{{rows, cut, depth}, strides, file_strides, 0},
                               {{rows, columns - cut, depth}, strides, file_strides, cut * depth}};
  if (pick(0, 1) == 1) {  // a loop that does not step over the one inside of it: 0 4 8, 3 7 11, ...
    for (const int64_t first : {0, 1, 2})
      boxes.push_back({{2, 3}, {9, 3}, {3, 4}, rows * columns * depth + 12 * first});
  }
  return boxes;
}

TEST_F(Files, RunWriterPutsEveryByteInItsPlaceAndTouchesNoOther) {
  std::mt19937 random(29);
  std::vector<int32_t> memory(4000);
  std::iota(memory.begin(), memory.end(), 1);
  for (int round = 0; round < 200; ++round) {
    const std::vector<RandomBox> boxes = random_boxes(random);
    constexpr int64_t kElements = 300, kBytes = kElements * 4;
    std::vector<int32_t> expected(kElements, -7);
    RunWriter direct, sender, receiver;
    for (const char* name : {"direct", "packed"}) {
      File file = File::create(path(name));
      iovec piece{expected.data(), kBytes};
      file.write_at({&piece, 1}, 0);
      file.close();
    }
    direct.add_file(File::open_for_writing(path("direct")), path("direct"), kBytes);
    sender.add_file(std::nullopt, path("packed"), kBytes);
    receiver.add_file(File::open_for_writing(path("packed")), path("packed"), kBytes);
    for (const RandomBox& box : boxes) {
      const RunWriter::Box added{
          box.sizes, 4, reinterpret_cast<uintptr_t>(memory.data()), box.strides, box.offset * 4, box.file_strides};
      direct.add_box(0, added);
      sender.add_box(0, added);
      core::RunList runs;
      runs.append_box(box.sizes, {0, box.strides}, {box.offset * 4, box.file_strides}, 4);
      for (const core::Run& run : runs.enumerate()) {
        for (int64_t byte = 0; byte < run.num_bytes; byte += 4) {
          expected[static_cast<size_t>((run.dst_bytes + byte) / 4)] =
              memory[static_cast<size_t>((run.src_bytes + byte) / 4)];
        }
      }
    }
    const RunWriter::Packed packed = sender.pack(std::vector<int64_t>{1}, 2);
    EXPECT_EQ(sender.queued_bytes(), 0);
    EXPECT_EQ(packed.counts[0], (std::pair<int64_t, int64_t>(0, 0)));
    const auto data = reinterpret_cast<uintptr_t>(packed.data.data());
    const auto num_bytes = static_cast<int64_t>(packed.data.size());
    std::vector<int64_t> wrong = packed.runs;
    EXPECT_THROW(receiver.add_packed(wrong, data, num_bytes - 1), std::invalid_argument);
    EXPECT_THROW(receiver.add_packed(wrong, data, num_bytes + 1), std::invalid_argument);
    if (!wrong.empty()) {
      wrong[2] = -wrong[2];
      EXPECT_THROW(receiver.add_packed(wrong, data, num_bytes), std::invalid_argument);
      wrong[2] = packed.runs[2];
      wrong[0] = 9;
      EXPECT_THROW(receiver.add_packed(wrong, data, num_bytes), std::invalid_argument);
    }
    receiver.add_packed(packed.runs, data, num_bytes);
    for (RunWriter* writer : {&direct, &receiver}) {
      writer->write(2, true);
      writer->finish(1, true);
    }
    const std::string wanted(reinterpret_cast<const char*>(expected.data()), kBytes);
    EXPECT_EQ(read_file(path("direct"), kBytes), wanted) << round;
    EXPECT_EQ(read_file(path("packed"), kBytes), wanted) << round;
    EXPECT_THROW(sender.add_packed(packed.runs, data, num_bytes), std::invalid_argument);
  }
}

TEST_F(Files, RunWriterRefusesWhatDoesNotLieInTheFile) {
  File::create(path("file")).close();
  RunWriter writer;
  writer.add_file(File::open_for_writing(path("file")), path("file"), 16);
  const core::Sizes sizes{5}, strides{1};
  EXPECT_THROW(writer.add_box(0, {sizes, 4, 0, strides, 0, strides}), std::invalid_argument);
  EXPECT_THROW(writer.add_box(0, {sizes, 4, 0, strides, -4, strides}), std::invalid_argument);
}

}  // namespace
}  // namespace torchtitan_ext::storage
