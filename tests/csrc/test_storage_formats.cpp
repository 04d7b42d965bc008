// The parsers of what lies on disk: they read back what was written, and of damaged bytes they make an error or
// something that holds together, never a read outside of the bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <random>
#include <string>

#include "storage/bytes.h"
#include "storage/digest.h"
#include "storage/footer.h"
#include "storage/index.h"
#include "storage/sections.h"
#include "storage/tensor_pickle.h"
#include "storage/tensor_record.h"

namespace torchtitan_ext::storage {
namespace {

int num_fuzz_cases() {
  const char* factor = std::getenv("TTE_SOAK");
  return 10'000 * (factor != nullptr ? std::max(1, std::atoi(factor)) : 1);
}

// Flips bits, sets bytes, cuts, repeats and drops parts.
std::string damage(std::string bytes, std::mt19937_64& random) {
  const auto below = [&](size_t end) { return end == 0 ? size_t{0} : static_cast<size_t>(random() % end); };
  const size_t num_changes = 1 + below(4);
  for (size_t change = 0; change < num_changes && !bytes.empty(); ++change) {
    const size_t at = below(bytes.size());
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random());
        break;
      case 2:
        bytes[at] = below(2) == 0 ? '\xff' : '\0';
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(40)));
        break;
      default:
        bytes.erase(at, below(40));
    }
  }
  return bytes;
}

// Changes that the digest would hide from the parser behind it are sealed again.
std::string reseal(std::string bytes) {
  if (bytes.size() < 40) return bytes;
  ByteWriter size;
  size.number(static_cast<uint64_t>(bytes.size()));
  bytes.replace(24, 8, size.bytes());
  ByteWriter digest;
  digest.number(digest_of(std::string_view(bytes).substr(0, bytes.size() - 8)));
  return bytes.replace(bytes.size() - 8, 8, digest.bytes());
}

Index small_index() {
  std::vector<SavedRecord> records;
  for (int64_t position = 0; position < 5; ++position) {
    SavedRecord record;
    record.fqn = "layers." + std::to_string(position) + ".weight";
    record.is_tensor = position != 0;
    record.has_offsets = position != 0;
    record.index_hint = position;
    record.dtype = position == 0 ? "" : position == 1 ? "bfloat16" : "float32";
    record.sizes = position == 0 ? core::Sizes{} : core::Sizes{position, 3};
    record.offsets = core::Sizes(record.sizes.size(), position);
    record.offset = position * 1000;
    record.num_bytes = 1000;
    record.data_offset = position * 1000 + (record.is_tensor ? 64 : 0);
    records.push_back(record);
  }
  Index index;
  index.save_id = {1, 2, 3};
  index.metadata_bytes = 77;
  index.metadata_digest = 99;
  index.notes = {{"world_size", "2"}, {"torch", "2.13.0"}};
  index.files = {{"__0_0.distcp", 0, 6000, 5000, 5, encode_records(records)},
                 {"__1_0.distcp", 1, 6001, 5000, 6, encode_records({})}};
  return index;
}

TEST(Digest, OfPiecesIsThatOfTheWhole) {
  const std::string bytes(5000, 'x');
  Digest digest;
  for (size_t at = 0; at < bytes.size(); at += 700) digest.add(bytes.data() + at, std::min<size_t>(700, 5000 - at));
  EXPECT_EQ(digest.value(), digest_of(bytes));
  EXPECT_EQ(digest_of(""), 0x2d06800538d394c2u);  // XXH3's own test vector
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) {
    EXPECT_EQ(kAvx2Digest.of(bytes.data(), bytes.size()), kBaselineDigest.of(bytes.data(), bytes.size()));
  }
#endif
}

TEST(Index, ReadsBackWhatWasWritten) {
  const Index index = small_index();
  const std::string bytes = encode_index(index);
  const Index read = parse_index(bytes, "index");
  EXPECT_EQ(read.save_id, index.save_id);
  EXPECT_EQ(read.notes, index.notes);
  ASSERT_EQ(read.files.size(), 2u);
  EXPECT_EQ(encode_index(read), bytes);
  const std::vector<SavedRecord> records = parse_records(read.files[0].records, 5000, "file");
  ASSERT_EQ(records.size(), 5u);
  EXPECT_EQ(records[1].dtype, "bfloat16");
  EXPECT_EQ(records[4].sizes, (core::Sizes{4, 3}));
  EXPECT_EQ(records[4].data_offset, 4064);
  EXPECT_FALSE(records[0].has_offsets);
}

TEST(Index, FilesOfOtherSavesHaveIdsOfTheirOwn) {
  Index index = small_index();
  const std::string plain = encode_index(index);
  index.files[1].save_id = SaveId{9, 8, 7};
  const std::string bytes = encode_index(index);
  const Index read = parse_index(bytes, "index");
  EXPECT_FALSE(read.files[0].save_id);
  EXPECT_EQ(read.files[1].save_id, (SaveId{9, 8, 7}));
  EXPECT_EQ(read.files[1].name, "__1_0.distcp");
  EXPECT_EQ(encode_index(read), bytes);
  index.files[1].save_id.reset();
  EXPECT_EQ(encode_index(index), plain);
}

TEST(Index, RefusesWhatDoesNotFit) {
  const auto refusal_of = [](Index index) -> std::string {
    try {
      parse_index(encode_index(index), "index");
    } catch (const FormatError& error) {
      return error.what();
    }
    return "";
  };
  Index index = small_index();
  for (const char* name : {"", ".", "..", "/etc/passwd", "a/b", "../x"}) {
    index.files[0].name = name;
    EXPECT_NE(refusal_of(index).find("leads out of the directory"), std::string::npos) << name;
  }
  index = small_index();
  index.files[0].footer_offset = 4999;  // the last record ends at 5000
  EXPECT_NE(refusal_of(index).find("outside of the 4999 bytes of records"), std::string::npos);
  index = small_index();
  index.files[0].footer_offset = 7000;
  EXPECT_NE(refusal_of(index).find("its footer at 7000"), std::string::npos);
}

TEST(Index, PlacesNearTheEndOfInt64AreOutside) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  for (const int64_t offset : {kLeast, int64_t{-1}, int64_t{0}, kMost}) {
    for (const int64_t num_bytes : {kLeast, int64_t{-1}, kMost}) {
      for (const int64_t data_offset : {kLeast, int64_t{0}, kMost}) {
        SavedRecord record;
        record.is_tensor = true;
        record.offset = offset;
        record.num_bytes = num_bytes;
        record.data_offset = data_offset;
        EXPECT_THROW(parse_records(encode_records({record}), 5000, "file"), FormatError);
      }
    }
  }
}

TEST(Index, ElementsStayInTheirRecord) {
  SavedRecord record{.fqn = "w", .is_tensor = true, .dtype = "float32", .sizes = {4}, .offset = 64, .num_bytes = 32};
  record.data_offset = 80;  // 16 bytes are left of the record
  const auto is_accepted = [&] {
    record.offsets.assign(record.sizes.size(), 0);
    try {
      return parse_records(encode_records({record}), 1'000, "index").size() == 1;
    } catch (const FormatError& error) {
      EXPECT_NE(std::string(error.what()).find("reach out of its record"), std::string::npos);
      return false;
    }
  };
  EXPECT_TRUE(is_accepted());
  for (const core::Sizes& sizes : {core::Sizes{5}, {2, 3}, {int64_t{1} << 62, 4}, {int64_t{1} << 62, 1 << 30}}) {
    record.sizes = sizes;
    EXPECT_FALSE(is_accepted());
  }
  for (const core::Sizes& sizes : {core::Sizes{0, int64_t{1} << 62}, {4, 1}, {}}) {
    record.sizes = sizes;
    EXPECT_TRUE(is_accepted());
  }
  record.sizes = {4};
  record.dtype = "float64";
  EXPECT_FALSE(is_accepted());
}

TEST(Index, DamagedBytesAreAnError) {
  Index small = small_index();
  small.files[1].save_id = SaveId{9, 8, 7};
  const std::string bytes = encode_index(small);
  std::mt19937_64 random(1);
  int num_accepted = 0;
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    std::string damaged = damage(bytes, random);
    const bool is_resealed = round % 2 == 0;
    if (is_resealed) damaged = reseal(damaged);
    if (damaged == bytes) continue;
    try {
      const Index index = parse_index(damaged, "index");
      EXPECT_TRUE(is_resealed);  // a digest lets nothing pass
      for (const SavedFile& file : index.files) {
        EXPECT_LE(file.footer_offset, file.num_bytes);
        for (const SavedRecord& record : parse_records(file.records, file.footer_offset, "file")) {
          EXPECT_LE(record.offset + record.num_bytes, file.footer_offset);
        }
      }
      ++num_accepted;
    } catch (const FormatError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("index", 0), 0u);
    }
  }
  EXPECT_GT(num_accepted, 0);  // or the parser behind the digest has not been reached
}

TEST(Footer, ReadsBackWhatWasWritten) {
  const Footer footer{{7}, 3, 100, 250, {1, 2, 3}};
  const Footer read = parse_footer(encode_footer(footer), "file", 250);
  EXPECT_EQ(read.save_id, footer.save_id);
  EXPECT_EQ(read.rank, 3u);
  EXPECT_EQ(read.block_bytes, 100u);
  EXPECT_EQ(read.checksums, footer.checksums);
}

TEST(Footer, DamagedBytesAreAnError) {
  const std::string bytes = encode_footer({{7}, 3, 100, 250, {1, 2, 3}});
  std::mt19937_64 random(2);
  int num_accepted = 0;
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    std::string damaged = damage(bytes, random);
    const bool is_resealed = round % 2 == 0 && damaged.size() > 64;
    if (is_resealed) {
      const std::string sealed = reseal(damaged.substr(0, damaged.size() - 24));
      ByteWriter trailer;
      trailer.number(int64_t{250}).number(static_cast<uint64_t>(sealed.size())).raw("TTETRAIL");
      damaged = sealed + trailer.take();
    }
    if (damaged == bytes) continue;
    try {
      const Footer footer = parse_footer(damaged, "file", 250);
      EXPECT_TRUE(is_resealed);
      EXPECT_EQ(footer.covered_bytes, 250);
      EXPECT_EQ(footer.checksums.size(), (250u + footer.block_bytes - 1) / footer.block_bytes);
      ++num_accepted;
    } catch (const FormatError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("file", 0), 0u);
    }
  }
  EXPECT_GT(num_accepted, 0);
}

// A crafted end of a file calls all of it the footer: refused by its head, before memory is taken for it.
TEST(Footer, IsReadOnlyWhereItCanBeOne) {
  const std::string path = testing::TempDir() + "/sparse_footer";
  const auto write = [&](int64_t num_bytes, int64_t offset, const std::string& head, int64_t said) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.seekp(offset);
    file << head;
    file.seekp(num_bytes - 24);
    file << ByteWriter().number(offset).number(said).raw("TTETRAIL").take();
  };
  constexpr int64_t kTebibyte = int64_t{1} << 40;
  const auto refusal_of = [&]() -> std::string {
    try {
      find_footer(File::open(path));
    } catch (const FormatError& error) {
      return error.what();
    }
    return "";
  };
  write(kTebibyte, 0, "", kTebibyte - 24);
  EXPECT_NE(refusal_of().find("is not TTEFOOTR"), std::string::npos) << refusal_of();
  // A head that says the same size: more than the checksums of what lies before it.
  const std::string head = seal("TTEFOOTR", {}).substr(0, 24) + ByteWriter().number(kTebibyte - 24).take();
  write(kTebibyte, 0, head, kTebibyte - 24);
  EXPECT_NE(refusal_of().find("says that it has"), std::string::npos) << refusal_of();
  write(kTebibyte, 1 << 20, head, kTebibyte - 24 - (1 << 20));
  EXPECT_NE(refusal_of().find("says that it has"), std::string::npos) << refusal_of();
  std::remove(path.c_str());
}

const ElementType kFloat{"FloatStorage", "", 4};
const ElementType kFloat8{"UntypedStorage", "float8_e4m3fn", 1};

std::optional<StoredTensor> find_in(const std::string& record) {
  return find_tensor(
      [&](int64_t offset, int64_t num_bytes) {
        return std::string_view(record).substr(static_cast<size_t>(offset), static_cast<size_t>(num_bytes));
      },
      static_cast<int64_t>(record.size()), "record");
}

std::string record_of(const ElementType& type, const core::Sizes& sizes, int64_t offset, int64_t alignment) {
  const RecordFrame frame = frame_tensor(type, sizes, offset, alignment);
  EXPECT_EQ((offset + static_cast<int64_t>(frame.head.size())) % alignment, 0);
  return frame.head + std::string(static_cast<size_t>(core::num_elements(sizes) * type.item_bytes), 'd') + frame.tail;
}

TEST(TensorRecord, IsFoundAgain) {
  for (const ElementType& type : {kFloat, kFloat8}) {
    for (const core::Sizes& sizes : {core::Sizes{}, {0}, {3}, {2, 300}, {70000, 1}, {2, 1, 0, 4, 5}}) {
      for (const int64_t offset : {0, 1, 4097}) {
        const std::string record = record_of(type, sizes, offset, offset == 1 ? 64 : 4096);
        const std::optional<StoredTensor> tensor = find_in(record);
        ASSERT_TRUE(tensor);
        EXPECT_EQ(tensor->type.storage_class, type.storage_class);
        EXPECT_EQ(tensor->type.dtype, type.dtype);
        EXPECT_EQ(tensor->sizes, sizes);
        EXPECT_EQ(tensor->data_bytes, core::num_elements(sizes) * type.item_bytes);
        if (tensor->data_bytes > 0) {
          EXPECT_EQ(record[static_cast<size_t>(tensor->data_offset)], 'd');
          EXPECT_EQ(record.find('d', static_cast<size_t>(tensor->data_offset)),
                    static_cast<size_t>(tensor->data_offset));
        }
      }
    }
  }
}

TEST(TensorRecord, DamagedBytesAreAnErrorOrStayInside) {
  const std::string bytes = record_of(kFloat, {3, 5}, 0, 64);
  std::mt19937_64 random(3);
  int num_errors = 0;
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    const std::string damaged = damage(bytes, random);
    try {
      const std::optional<StoredTensor> tensor = find_in(damaged);
      if (!tensor) continue;
      EXPECT_GE(tensor->data_offset, 0);
      EXPECT_GE(tensor->data_bytes, 0);
      EXPECT_LE(tensor->data_offset + tensor->data_bytes, static_cast<int64_t>(damaged.size()));
    } catch (const FormatError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("record: byte ", 0), 0u);
      ++num_errors;
    }
  }
  EXPECT_GT(num_errors, 0);
}

TEST(TensorPickle, OtherPicklesMatchNothing) {
  const std::string pickle = pickle_tensor(kFloat, core::Sizes{2, 3, 4, 5});
  ASSERT_TRUE(match_tensor_pickle(pickle));
  for (size_t length = 0; length < pickle.size(); ++length) {
    EXPECT_FALSE(match_tensor_pickle(std::string_view(pickle).substr(0, length))) << length;
  }
  std::mt19937_64 random(4);
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    const std::optional<PickledTensor> found = match_tensor_pickle(damage(pickle, random));
    if (!found) continue;
    EXPECT_EQ(found->tensor.sizes.size(), found->tensor.strides.size());
    EXPECT_TRUE(std::ranges::all_of(found->tensor.sizes, [](int64_t size) { return size >= 0; }));
  }
}

}  // namespace
}  // namespace torchtitan_ext::storage
