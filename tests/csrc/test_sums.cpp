#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/sums.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Box = SumTable::Box;
using Part = SumTable::Part;

const Box kFirst = std::pair{Sizes{0}, Sizes{4}};
const Box kSecond = std::pair{Sizes{4}, Sizes{3}};

SumTable table_of(const std::string& replica, const std::map<Box, uint64_t>& sums) {
  SumTable table;
  table.add_key("w", Part{"torch.float32", {7}, replica, sums});
  return table;
}

SumTable merged(const std::vector<SumTable>& tables) {
  std::vector<const SumTable*> of_ranks;
  for (const SumTable& table : tables) of_ranks.push_back(&table);
  return SumTable::merge(of_ranks);
}

std::vector<uint64_t> sums_of(const std::vector<Part>& replicas) {
  std::vector<uint64_t> sums;
  for (const Part& whole : replicas) sums.push_back(whole.sums.at(std::nullopt));
  return sums;
}

TEST(SumTable, AddsUpWhatTheHeaderShows) {
  const SumTable all = merged({table_of("a", {{{}, 3}}), table_of("a", {{{}, 4}}), table_of("", {{{}, 7}}),
                               table_of("b", {{kFirst, 5}}), table_of("b", {{kFirst, 6}, {kSecond, 2}})});
  EXPECT_EQ(sums_of(all.replicas("w")), (std::vector<uint64_t>{7, 7, 7, 8}));
  EXPECT_EQ(all.differing({{"w", 7}}), (std::vector<std::string>{"w"}));
  EXPECT_EQ(all.replicas("w")[0].shape, Sizes{7});
  EXPECT_THROW(all.replicas("other"), std::out_of_range);
}

TEST(SumTable, CountsModulo64Bits) {
  const SumTable all = merged({table_of("a", {{{}, ~uint64_t{0}}}), table_of("a", {{{}, 3}})});
  EXPECT_EQ(sums_of(all.replicas("w")), (std::vector<uint64_t>{2}));
  EXPECT_TRUE(all.differing({{"w", 2}}).empty());
  EXPECT_TRUE(all.differing({{"other", 1}}).empty());
}

// A rank that holds empty boxes only sees what the others hold; a tensor without elements has the sum 0.
TEST(SumTable, CountsRanksWithoutElements) {
  EXPECT_EQ(sums_of(merged({table_of("b", {}), table_of("b", {{kFirst, 5}})}).replicas("w")),
            (std::vector<uint64_t>{5, 5}));
  EXPECT_EQ(sums_of(merged({table_of("b", {})}).replicas("w")), (std::vector<uint64_t>{0}));
}

// What a rank sees of a key, element by element.
struct JointTable {
  static constexpr int64_t kElements = 24;

  explicit JointTable(uint64_t seed) : random(seed) {
    for (int64_t element = 0; element < kElements; ++element) values.push_back(random());
    // Cuts of the 1-d tensor into boxes.
    for (int64_t begin = 0; begin < kElements;) {
      const int64_t size = std::min<int64_t>(kElements - begin, 1 + static_cast<int64_t>(random() % 9));
      boxes.emplace_back(Sizes{begin}, Sizes{size});
      begin += size;
    }
  }

  uint64_t sum(const std::vector<uint64_t>& held, const std::pair<Sizes, Sizes>& box) const {
    uint64_t total = 0;
    for (int64_t at = 0; at < box.second[0]; ++at) total += held[static_cast<size_t>(box.first[0] + at)];
    return total;
  }

  std::mt19937_64 random;
  std::vector<uint64_t> values;  // what the hash of each element should be
  std::vector<std::pair<Sizes, Sizes>> boxes;
};

TEST(SumTable, AddsUpLikeElementsDo) {
  for (uint64_t seed = 0; seed < 2'000; ++seed) {
    JointTable joint(seed);
    auto& random = joint.random;
    const size_t num_ranks = 1 + random() % 6;
    const size_t num_replicas = 1 + random() % 2;
    std::vector<SumTable> tables;
    // Of sharded replicas the elements, by replica; of boxes the elements that each rank holds, and what it sees.
    std::map<std::string, std::vector<uint64_t>> elements_of_replica;
    std::vector<std::map<int64_t, uint64_t>> own(num_ranks);
    std::map<int64_t, uint64_t> first_held;
    std::vector<std::string> replica_of;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<uint64_t> held = joint.values;
      if (random() % 3 == 0) held[random() % held.size()] += 1;  // a flipped bit
      std::map<Box, uint64_t> sums;
      std::string replica = rank % 3 == 2   ? ""
                            : rank % 2 == 0 ? "boxes"
                                            : "shards" + std::to_string(rank % num_replicas);
      replica_of.push_back(replica.empty() ? "rank" + std::to_string(rank) : replica);
      if (replica == "boxes") {
        for (const auto& box : joint.boxes) {
          if (random() % 2 == 0) continue;
          sums[box] = joint.sum(held, box);
          for (int64_t at = box.first[0]; at < box.first[0] + box.second[0]; ++at) {
            own[rank][at] = held[static_cast<size_t>(at)];
            first_held.emplace(at, held[static_cast<size_t>(at)]);
          }
        }
      } else {
        std::vector<uint64_t>& of_replica = elements_of_replica[replica_of.back()];
        uint64_t total = 0;
        for (const uint64_t value : held) total += value, of_replica.push_back(value);
        sums[std::nullopt] = total;
      }
      tables.push_back(table_of(replica, sums));
    }
    std::vector<uint64_t> expected;
    std::map<std::string, size_t> seen;
    std::vector<std::vector<uint64_t>> groups;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      const auto [found, is_new] = seen.try_emplace(replica_of[rank], groups.size());
      if (is_new) groups.emplace_back();
      uint64_t total = 0;
      if (replica_of[rank] == "boxes") {
        std::map<int64_t, uint64_t> seen_by_rank = first_held;
        for (const auto& [at, value] : own[rank]) seen_by_rank[at] = value;
        for (const auto& [at, value] : seen_by_rank) total += value;
      } else if (is_new) {
        for (const uint64_t value : elements_of_replica[replica_of[rank]]) total += value;
      } else {
        continue;
      }
      groups[found->second].push_back(total);
    }
    for (const auto& group : groups) expected.insert(expected.end(), group.begin(), group.end());
    const SumTable all = merged(tables);
    ASSERT_EQ(sums_of(all.replicas("w")), expected) << seed;
    for (const uint64_t wanted : {expected.front(), expected.back(), expected.front() + 1}) {
      bool differs = false;
      for (const uint64_t total : expected) differs |= total != wanted;
      ASSERT_EQ(all.differing({{"w", wanted}}).size(), differs ? 1 : 0) << seed;
    }
  }
}

SumTable random_table(std::mt19937_64& random) {
  SumTable table;
  for (uint64_t key = random() % 6; key > 0; --key) {
    Part part{key % 2 == 0 ? "" : "torch.int8", Sizes(random() % 3, 5), std::string(random() % 3, 'r'), {}};
    if (random() % 2 == 0) part.sums[std::nullopt] = random();
    for (int64_t box = 0; box < static_cast<int64_t>(random() % 4); ++box) {
      part.sums[std::pair{Sizes{box, -box}, Sizes{1, 2}}] = random() >> (random() % 64);
    }
    table.add_key(std::string("key\0", 4) + std::to_string(key), part);
  }
  return table;
}

TEST(SumTable, DecodesWhatItEncoded) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    const SumTable table = random_table(random);
    const std::string bytes = table.encode();
    const SumTable again = SumTable::decode(bytes);
    ASSERT_EQ(again.keys(), table.keys());
    for (const std::string& key : table.keys()) {
      EXPECT_EQ(again.part(key).dtype, table.part(key).dtype);
      EXPECT_EQ(again.part(key).shape, table.part(key).shape);
      EXPECT_EQ(again.part(key).replica, table.part(key).replica);
      EXPECT_EQ(again.part(key).sums, table.part(key).sums);
    }
    std::string other = bytes;
    for (int change = 0; change < 20 && !bytes.empty(); ++change) {
      other[random() % other.size()] = static_cast<char>(random());
      try {
        SumTable::decode(std::string_view(other).substr(0, random() % (other.size() + 1)));
      } catch (const WireError&) {  // or it is another table
      }
    }
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
