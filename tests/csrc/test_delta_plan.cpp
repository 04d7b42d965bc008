#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/delta_plan.h"
#include "core/sums.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Boxes = std::vector<DeltaBox>;

DeltaBox rows(int64_t first, int64_t last) { return {{first, 0}, {last - first, 2}}; }

struct Held {
  std::string key;
  Boxes boxes;
  std::string replica;
  uint64_t sum = 0;
  Sizes shape{6, 2};
  std::string dtype = "torch.float32";
};

// A rank that holds these shards and has changed all of each, with `before` twice and `replaced` thrice their sums.
DeltaOffer offer_of(const std::vector<Held>& held, const std::vector<std::string>& elsewhere = {}) {
  DeltaOffer offer;
  for (const std::string& key : elsewhere) offer.add_elsewhere(key);
  int64_t tensor = 0;
  for (const Held& one : held) {
    const auto table = [&](uint64_t times) {
      SumTable sums;
      sums.add_key(one.key, {one.dtype, one.shape, one.replica, {{std::nullopt, times * one.sum}}});
      return sums;
    };
    offer.add_held(one.key, one.boxes, std::nullopt, table(2), table(3), table(1));
    for (const DeltaBox& box : one.boxes) offer.add_part({tensor, box, 10, {40}});
    ++tensor;
  }
  return offer;
}

DeltaPlan planned(const std::vector<DeltaOffer>& offers) {
  // As they arrive.
  std::vector<DeltaOffer> received;
  for (const DeltaOffer& offer : offers) received.push_back(DeltaOffer::decode(offer.encode()));
  std::vector<const DeltaOffer*> all;
  for (const DeltaOffer& offer : received) all.push_back(&offer);
  return plan_delta(all, {"float32", "int64"});
}

std::vector<std::pair<size_t, size_t>> writers_of(const DeltaPlan& plan) {
  std::vector<std::pair<size_t, size_t>> writers;
  for (const DeltaPlan::Write& write : plan.writes) writers.emplace_back(write.rank, write.part);
  return writers;
}

using Writers = std::vector<std::pair<size_t, size_t>>;

TEST(DeltaPlan, WritesWhatTheHeaderShows) {
  const DeltaPlan plan = planned({offer_of({{"w", {rows(0, 3)}, "a", 5}}), offer_of({{"w", {rows(3, 6)}, "a", 7}}),
                                  offer_of({{"w", {rows(0, 3)}, "b", 5}}), DeltaOffer()});
  EXPECT_TRUE(plan.faults.empty() && plan.nowhere.empty());
  EXPECT_EQ(writers_of(plan), (Writers{{0, 0}, {1, 0}}));
  EXPECT_EQ(plan.writes[1].number, 1U);
  EXPECT_EQ(plan.writes[1].key, "w");
  EXPECT_EQ(plan.writes[1].lengths, Sizes{40});
  ASSERT_EQ(plan.totals.size(), 1U);
  const DeltaPlan::Total& total = plan.totals[0];
  EXPECT_EQ(std::tie(total.key, total.dtype, total.shape, total.count),
            std::make_tuple("w", "float32", Sizes{6, 2}, 20));
  EXPECT_EQ(total.sums, (DeltaSums{24, 36, 12}));
  EXPECT_EQ(total.boxes, (std::vector<SumTable::Box>{rows(0, 3), rows(3, 6)}));
}

TEST(DeltaPlan, WritesTheFirstWholeReplicaWhereBoxesOverlap) {
  const DeltaPlan plan = planned({offer_of({{"w", {rows(0, 4)}, "cut", 1}}), offer_of({{"w", {rows(0, 3)}, "a", 5}}),
                                  offer_of({{"w", {rows(0, 6)}, "", 12}}), offer_of({{"w", {rows(3, 6)}, "a", 7}})});
  EXPECT_TRUE(plan.faults.empty());
  EXPECT_EQ(writers_of(plan), (Writers{{1, 0}, {3, 0}}));
  const DeltaPlan other = planned({offer_of({{"w", {rows(0, 3)}, "a", 5}}), offer_of({{"w", {rows(0, 6)}, "", 13}}),
                                   offer_of({{"w", {rows(3, 6)}, "a", 7}})});
  ASSERT_EQ(other.faults.size(), 1U);
  EXPECT_STREQ(other.faults[0].kind, "replicas_differ");
}

TEST(DeltaPlan, TellsWhyATensorIsNotWritten) {
  const std::vector<Held> of_first{{"gap", {rows(0, 3)}, "", 1},
                                   {"shape", {rows(0, 6)}, "", 1},
                                   {"dtype", {rows(0, 6)}, "", 1, {6, 2}, "torch.quint8"},
                                   {"sums", {rows(0, 6)}, "", 1},
                                   {"good", {rows(0, 6)}, "", 1}};
  const DeltaPlan plan =
      planned({offer_of(of_first, {"lost", "other"}), offer_of({{"shape", {rows(0, 6)}, "", 1, {6, 3}},
                                                                {"sums", {rows(0, 6)}, "", 2},
                                                                {"gap", {rows(0, 3)}, "", 1},
                                                                {"other", {rows(0, 6)}, "", 1}},
                                                               {"lost", "far"})});
  EXPECT_EQ(plan.keys, (std::vector<std::string>{"gap", "shape", "dtype", "sums", "good", "other"}));
  EXPECT_EQ(plan.nowhere, (std::vector<std::string>{"lost", "far"}));
  ASSERT_EQ(plan.faults.size(), 4U);
  EXPECT_STREQ(plan.faults[0].kind, "incomplete_cover");
  EXPECT_EQ(plan.faults[0].detail, "leave out [3, 0]");
  EXPECT_EQ(plan.faults[0].ranks, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(plan.faults[1].detail,
            "is float32 of shape (6, 2) on rank 0, float32 of shape (6, 3) on rank 1; give changes of snapshots of one "
            "state");
  EXPECT_EQ(plan.faults[2].detail, "is quint8, which files of changes do not have; leave it out of the snapshot");
  EXPECT_EQ(plan.faults[3].detail,
            "has replicas that differ, before or after; tte.sync_module_states makes them equal");
  EXPECT_EQ(plan.faults[3].key, "sums");
  EXPECT_EQ(writers_of(plan), (Writers{{0, 4}, {1, 3}}));
}

TEST(DeltaPlan, KnowsTheBoxesThatAValueStates) {
  const SumTable::Box first = rows(0, 3), second = rows(3, 6);
  SumTable sums;
  sums.add_key("w", {"torch.int64", {6, 2}, "", {{first, 4}}});
  DeltaOffer offer;
  offer.add_held("w", {rows(3, 6)}, second, sums, sums, sums);  // an equal box of another tensor has its sum
  offer.add_held("w", {rows(0, 3)}, first, sums, sums, sums);
  ASSERT_EQ(offer.pieces().size(), 1U);
  EXPECT_EQ(offer.pieces()[0].tensor, 1);
  EXPECT_EQ(offer.pieces()[0].sums, (DeltaSums{4, 4, 4}));
}

// Ranks hold rows of a column in any way; a slow oracle counts who has what.
TEST(DeltaPlan, WritesEachElementOnce) {
  std::mt19937_64 random(9);
  int num_written = 0;
  for (int round = 0; round < 2000; ++round) {
    const int64_t num_rows = 1 + static_cast<int64_t>(random() % 5);
    std::vector<DeltaOffer> offers;
    std::vector<std::map<std::string, Boxes>> boxes_of_ranks;
    for (uint64_t rank = 0, num_ranks = 1 + random() % 5; rank < num_ranks; ++rank) {
      std::vector<Held> held;
      boxes_of_ranks.emplace_back();
      for (const std::string key : {"x", "y"}) {
        if (random() % 4 == 0) continue;
        const auto first = static_cast<int64_t>(random() % static_cast<uint64_t>(num_rows));
        const int64_t last = first + 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(num_rows - first));
        const Boxes boxes = random() % 3 == 0 ? Boxes{rows(0, num_rows)} : Boxes{rows(first, last)};
        held.push_back({key, boxes, random() % 2 == 0 ? "a" : "", 0, {num_rows, 2}});
        boxes_of_ranks.back()[key] = boxes;
      }
      offers.push_back(offer_of(held));
    }
    const DeltaPlan plan = planned(offers);
    std::set<std::string> written;
    for (const DeltaPlan::Total& total : plan.totals) {
      written.insert(total.key);
      std::vector<int> counts(static_cast<size_t>(num_rows));
      for (const SumTable::Box& box : total.boxes) {
        for (int64_t row = 0; row < box->second[0]; ++row) ++counts[static_cast<size_t>(box->first[0] + row)];
      }
      EXPECT_EQ(counts, std::vector<int>(static_cast<size_t>(num_rows), 1));
      EXPECT_EQ(total.count, 10 * static_cast<int64_t>(total.boxes.size()));
      ++num_written;
    }
    std::map<std::string, size_t> next;
    for (const DeltaPlan::Write& write : plan.writes) {
      EXPECT_TRUE(written.contains(write.key));
      EXPECT_EQ(write.number, next[write.key]++);
      EXPECT_EQ(*write.box, boxes_of_ranks[write.rank][write.key][0]);
    }
    for (const DeltaPlan::Fault& fault : plan.faults) {
      // No rank alone and not all distinct boxes together have each row once.
      std::set<DeltaBox> distinct;
      for (const auto& of_rank : boxes_of_ranks) {
        const auto found = of_rank.find(fault.key);
        if (found == of_rank.end()) continue;
        distinct.insert(found->second[0]);
      }
      int64_t sum = 0;
      for (const DeltaBox& box : distinct) sum += box.second[0];
      std::set<int64_t> covered;
      for (const DeltaBox& box : distinct) {
        for (int64_t row = 0; row < box.second[0]; ++row) covered.insert(box.first[0] + row);
      }
      EXPECT_FALSE(sum == num_rows && static_cast<int64_t>(covered.size()) == num_rows);
    }
  }
  EXPECT_GT(num_written, 500);
}

TEST(DeltaOffer, RefusesCutMessages) {
  const std::string bytes = offer_of({{"w", {rows(0, 3)}, "a", 5}, {"v", {rows(0, 6)}, "", 1}}, {"elsewhere"}).encode();
  EXPECT_EQ(DeltaOffer::decode(bytes).encode(), bytes);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(DeltaOffer::decode(std::string_view(bytes).substr(0, length)), WireError);
  }
  EXPECT_THROW(DeltaOffer::decode(bytes + "x"), WireError);
  std::mt19937_64 random(13);
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    try {
      DeltaOffer::decode(damaged);
    } catch (const WireError&) {
    }
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
