// Metadata as columns: what is written reads back, from a pickle and from an index's tables, and of damaged bytes the
// parsers make an error or columns whose numbers hold together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>

#include "core/metadata_pickle.h"
#include "core/metadata_summary.h"
#include "storage/bytes.h"
#include "storage/errors.h"
#include "storage/metadata_tables.h"

namespace torchtitan_ext {
namespace {

using core::MetadataColumns;
using core::SavedChunk;
using core::SavedKey;
using core::SavedPart;

int num_fuzz_cases() {
  const char* factor = std::getenv("TTE_SOAK");
  return 10'000 * (factor != nullptr ? std::max(1, std::atoi(factor)) : 1);
}

std::string damage(std::string bytes, std::mt19937_64& random) {
  const size_t num_changes = 1 + random() % 4;
  for (size_t change = 0; change < num_changes && !bytes.empty(); ++change) {
    const size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        break;
      case 1:
        bytes[at] = static_cast<char>(random());
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 40));
        break;
      default:
        bytes.erase(at, random() % 40);
    }
  }
  return bytes;
}

MetadataColumns small_columns() {
  MetadataColumns columns;
  const auto name = [&](const char* text) { return columns.names.add(text); };
  const auto sizes = [&](const std::vector<int64_t>& numbers) { return columns.sizes.add(numbers); };
  const uint32_t list = columns.add_chunk_list({{sizes({0, 0}), sizes({2, 4})}, {sizes({2, 0}), sizes({1, 4})}});
  for (const char* fqn : {"a.weight", "b.weight"}) {
    columns.add_key({.fqn = name(fqn),
                     .is_tensor = true,
                     .sizes = sizes({3, 4}),
                     .dtype = name("float32"),
                     .layout = name("torch.strided"),
                     .memory_format = 1,
                     .requires_grad = true,
                     .chunk_list = list});
    for (int64_t chunk = 0; chunk < 2; ++chunk) {
      SavedPart part{.fqn = name(fqn), .offsets = sizes({2 * chunk, 0}), .path = name("__0_0.distcp")};
      part.index = chunk;
      part.offset_bytes = 70'000 * chunk;
      part.length_bytes = int64_t{1} << 40;
      columns.add_part(part);
    }
  }
  columns.add_key({.fqn = name("step")});
  SavedPart step{
      .fqn = name("step"), .path = name("__1_0.distcp"), .transforms = columns.add_transforms({name("zip")})};
  columns.add_part(step);
  columns.index_parts();
  return columns;
}

std::string pickle_of(const MetadataColumns& columns) {
  const auto write_planner_data = [](core::PickleWriter& out) {
    out.begin(core::PlainKind::kDict, 2);
    out.text("step");
    out.begin(core::PlainKind::kTuple, 2);
    out.text("optimizer");
    out.number(0.5);
    out.end(core::PlainKind::kTuple, 2);
    out.end(core::PlainKind::kDict, 2);
  };
  const auto write_storage_meta = [](core::PickleWriter& out) {
    out.text("checkpoint_id");
    core::write_path(out, "/run/step-1");
  };
  return core::write_metadata(columns, {write_planner_data, write_storage_meta, "1.0.0"});
}

// All that the columns say, so that numbers which lead nowhere are met.
std::string description_of(const MetadataColumns& columns) {
  std::string text;
  const auto add_sizes = [&](uint32_t number) {
    for (const int64_t size : columns.sizes[number]) text += std::to_string(size) + ",";
    text += " ";
  };
  for (const core::SavedKey& key : columns.keys()) {
    text += columns.names[key.fqn] + " ";
    if (!key.is_tensor) continue;
    add_sizes(key.sizes);
    text += columns.names[key.dtype] + columns.names[key.layout] + std::to_string(key.memory_format);
    text += key.requires_grad ? "g" : "-";
    text += key.pin_memory ? "p" : "-";
    for (const core::SavedChunk& chunk : columns.chunk_lists()[key.chunk_list]) {
      add_sizes(chunk.offsets);
      add_sizes(chunk.sizes);
    }
  }
  for (const SavedPart& part : columns.parts()) {
    text += "\n" + columns.names[part.fqn] + " " + columns.names[part.path] + " ";
    if (part.offsets != SavedPart::kNone) add_sizes(part.offsets);
    text +=
        std::to_string(part.index) + " " + std::to_string(part.offset_bytes) + "+" + std::to_string(part.length_bytes);
    if (part.transforms == SavedPart::kNone) continue;
    for (const uint32_t name : columns.transforms()[part.transforms]) text += " " + columns.names[name];
  }
  return text;
}

MetadataColumns read_back(const std::string& pickle) {
  const core::PickleGraph graph(pickle);
  MetadataColumns columns;
  const core::PlainMetadata plain = core::read_metadata(graph, columns);
  EXPECT_TRUE(plain.version.size() <= pickle.size());
  return columns;
}

TEST(MetadataPickle, ReadsBackWhatWasWritten) {
  const MetadataColumns columns = small_columns();
  const MetadataColumns read = read_back(pickle_of(columns));
  EXPECT_EQ(description_of(read), description_of(columns));
  EXPECT_EQ(read.find_key("b.weight"), 1u);
  EXPECT_EQ(read.find_part("b.weight", std::vector<int64_t>{2, 0}), 3u);
  EXPECT_EQ(read.find_part("step", std::nullopt), 4u);
  EXPECT_EQ(read.find_part("step", std::vector<int64_t>{}), core::HashedNumbers::kNone);
  EXPECT_EQ(read.find_key("c"), core::HashedNumbers::kNone);
  EXPECT_EQ(pickle_of(read), pickle_of(columns));
}

TEST(MetadataColumns, TheLastOfEqualPartsCountsInThePlaceOfTheFirst) {
  MetadataColumns columns = small_columns();
  SavedPart again = columns.parts()[1];
  again.offset_bytes = 9;
  columns.add_part(again);
  columns.index_parts();
  ASSERT_EQ(columns.parts().size(), 5u);
  EXPECT_EQ(columns.parts()[1].offset_bytes, 9);
}

TEST(MetadataColumns, KeysAloneAreACopyOfTheirOwn) {
  const MetadataColumns columns = small_columns();
  MetadataColumns copy = columns.keys_only();
  EXPECT_TRUE(copy.parts().empty());
  ASSERT_EQ(copy.keys().size(), columns.keys().size());
  for (size_t number = 0; number < copy.keys().size(); ++number) {
    const core::SavedKey &key = copy.keys()[number], &other = columns.keys()[number];
    EXPECT_EQ(copy.names[key.fqn], columns.names[other.fqn]);
    EXPECT_EQ(key.is_tensor, other.is_tensor);
    if (!key.is_tensor) continue;
    EXPECT_TRUE(std::ranges::equal(copy.sizes[key.sizes], columns.sizes[other.sizes]));
    EXPECT_EQ(copy.names[key.dtype], columns.names[other.dtype]);
    EXPECT_EQ(copy.names[key.layout], columns.names[other.layout]);
    EXPECT_EQ(key.requires_grad, other.requires_grad);
    const auto &chunks = copy.chunk_lists()[key.chunk_list], &others = columns.chunk_lists()[other.chunk_list];
    ASSERT_EQ(chunks.size(), others.size());
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      EXPECT_TRUE(std::ranges::equal(copy.sizes[chunks[chunk].offsets], columns.sizes[others[chunk].offsets]));
      EXPECT_TRUE(std::ranges::equal(copy.sizes[chunks[chunk].sizes], columns.sizes[others[chunk].sizes]));
    }
  }
  const size_t num_parts = columns.parts().size();
  copy.add_part({.fqn = copy.keys().front().fqn, .path = copy.names.add("file")});
  copy.index_parts();
  EXPECT_EQ(columns.parts().size(), num_parts);
}

TEST(MetadataSummary, PartsPerKeyAndFile) {
  const MetadataColumns columns = small_columns();
  const std::vector<core::PartSum> keys = core::sum_parts_by_key(columns);
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_EQ(keys[1].num_parts, 2);
  EXPECT_EQ(keys[1].num_bytes, int64_t{2} << 40);
  EXPECT_EQ(keys[2].num_bytes, 0);
  const std::vector<core::FileSum> files = core::sum_parts_by_file(columns);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(columns.names[files[0].path], "__0_0.distcp");
  EXPECT_EQ(files[0].sum.num_parts, 4);
  EXPECT_EQ(files[0].sum.end, 70'000 + (int64_t{1} << 40));
  EXPECT_TRUE(core::find_unplaced(columns, 9).empty());
}

TEST(MetadataSummary, ChunksWithoutAPart) {
  MetadataColumns columns = small_columns();
  core::SavedKey third = columns.keys()[0];
  third.fqn = columns.names.add("c.weight");
  columns.add_key(third);
  columns.add_key({.fqn = columns.names.add("epoch")});
  const std::vector<core::UnplacedChunk> found = core::find_unplaced(columns, 9);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].key, 3u);
  EXPECT_EQ(found[2].offsets, SavedPart::kNone);
  EXPECT_EQ(core::find_unplaced(columns, 1).size(), 1u);
}

TEST(MetadataColumns, ManyPartsAreFound) {
  MetadataColumns columns;
  const uint32_t path = columns.names.add("__0_0.distcp");
  for (int64_t number = 0; number < 50'000; ++number) {
    SavedPart part{.fqn = columns.names.add("layers." + std::to_string(number % 100)),
                   .offsets = columns.sizes.add(std::vector<int64_t>{number / 100, 0}),
                   .path = path};
    part.offset_bytes = number;
    columns.add_part(part);
    if (number % 7'000 == 0) columns.index_parts();
  }
  columns.index_parts();
  for (int64_t number = 0; number < 50'000; number += 11) {
    const uint32_t found =
        columns.find_part("layers." + std::to_string(number % 100), std::vector<int64_t>{number / 100, 0});
    ASSERT_LT(found, columns.parts().size());
    EXPECT_EQ(columns.parts()[found].offset_bytes, number);
  }
  EXPECT_EQ(columns.find_part("layers.7", std::vector<int64_t>{500, 0}), core::HashedNumbers::kNone);
}

TEST(PickleGraph, NothingReachesBelowAMark) {
  const auto refusal_of = [](std::string_view operations) -> std::string {
    try {
      core::PickleGraph graph(operations);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  using namespace std::string_view_literals;
  EXPECT_EQ(refusal_of("\x80\002](K\001e."sv), "");  // a list, its member above a mark
  EXPECT_NE(refusal_of("\x80\002](K\001ae."sv).find("appends to"), std::string::npos);
  EXPECT_NE(refusal_of("\x80\002](K\001(K\002ee."sv).find("appends to"), std::string::npos);
  EXPECT_NE(refusal_of("\x80\002}(K\001K\002su."sv).find("sets a key"), std::string::npos);
  EXPECT_NE(refusal_of("\x80\002K\001(q\000t."sv).find("remembers"), std::string::npos);
}

TEST(MetadataPickle, DamagedBytesAreAnErrorOrHoldTogether) {
  const std::string bytes = pickle_of(small_columns());
  std::mt19937_64 random(11);
  int num_read = 0;
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    const std::string damaged = damage(bytes, random);
    try {
      const MetadataColumns columns = read_back(damaged);
      ++num_read;
      EXPECT_LE(columns.parts().size(), damaged.size());
      for (const SavedPart& part : columns.parts()) EXPECT_FALSE(core::leads_outside(columns.names[part.path]));
      EXPECT_EQ(description_of(read_back(pickle_of(columns))), description_of(columns));
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      EXPECT_TRUE(what.starts_with("pickle: at byte ") || what.starts_with(".metadata: ")) << what;
    }
  }
  EXPECT_GT(num_read, 0);
}

// As version 0.2 wrote them.
void encode_columns(const MetadataColumns& columns, storage::ByteWriter& out) {
  out.number(static_cast<uint64_t>(columns.names.size()));
  for (size_t number = 0; number < columns.names.size(); ++number) {
    out.text(columns.names[static_cast<uint32_t>(number)]);
  }
  out.number(static_cast<uint64_t>(columns.sizes.size()));
  for (size_t number = 0; number < columns.sizes.size(); ++number) {
    const auto sizes = columns.sizes[static_cast<uint32_t>(number)];
    out.number(static_cast<uint8_t>(sizes.size()));
    for (const int64_t size : sizes) out.number(size);
  }
  out.number(static_cast<uint64_t>(columns.chunk_lists().size()));
  for (const auto& chunks : columns.chunk_lists()) {
    out.number(static_cast<uint64_t>(chunks.size()));
    for (const SavedChunk& chunk : chunks) out.number(chunk.offsets).number(chunk.sizes);
  }
  out.number(static_cast<uint64_t>(columns.keys().size()));
  for (const SavedKey& key : columns.keys()) {
    const auto flags =
        static_cast<uint8_t>((key.is_tensor ? 1 : 0) | (key.requires_grad ? 2 : 0) | (key.pin_memory ? 4 : 0));
    out.number(key.fqn).number(flags);
    if (!key.is_tensor) continue;
    out.number(key.sizes).number(key.dtype).number(key.layout);
    out.number(static_cast<uint8_t>(key.memory_format)).number(key.chunk_list);
  }
}

TEST(MetadataTables, ReadBackAndDamaged) {
  MetadataColumns columns = small_columns();
  storage::ByteWriter out;
  encode_columns(columns, out);
  const std::string bytes = out.take();
  const auto read = [](const std::string& encoded) {
    storage::ByteReader reader(encoded, "tables");
    return storage::parse_columns(reader);
  };
  const std::string described = description_of(columns);
  EXPECT_EQ(description_of(read(bytes)), described.substr(0, described.find('\n')));
  std::mt19937_64 random(12);
  int num_read = 0;
  for (int round = 0; round < num_fuzz_cases(); ++round) {
    try {
      description_of(read(damage(bytes, random)));
      ++num_read;
    } catch (const storage::FormatError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("tables: byte ")) << error.what();
    }
  }
  EXPECT_GT(num_read, 0);
}

TEST(LeadsOutside, OfPaths) {
  for (const char* path : {"", "/x", "..", "../x", "a/..", "a/../b", "/"})
    EXPECT_TRUE(core::leads_outside(path)) << path;
  EXPECT_TRUE(core::leads_outside(std::string_view("a\0b", 3)));
  for (const char* path : {"x", "a/b", "..x", "x..", "a/...", ".x", "a/./b"})
    EXPECT_FALSE(core::leads_outside(path)) << path;
}

TEST(IsText, OfNames) {
  EXPECT_TRUE(core::is_text(""));
  EXPECT_TRUE(core::is_text("layers.0.w\xc3\xa9"));
  EXPECT_TRUE(core::is_text("\xed\x9f\xbf"));    // the last character before surrogates
  EXPECT_FALSE(core::is_text("a\xed\xa0\x80"));  // the first half of a pair
  EXPECT_TRUE(core::is_text("\xed"));
}

TEST(CanBeSizes, CountsBytesOfTheLargestElements) {
  constexpr int64_t kMost = (int64_t{1} << 59) - 1;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, {0, 0}, {kMost}, {0, kMost}, {1 << 29, 1 << 29}}) {
    EXPECT_TRUE(core::can_be_sizes(sizes));
  }
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{kMost + 1}, {0, kMost + 1}, {1 << 30, 1 << 29}}) {
    EXPECT_FALSE(core::can_be_sizes(sizes));
  }
}

}  // namespace
}  // namespace torchtitan_ext
