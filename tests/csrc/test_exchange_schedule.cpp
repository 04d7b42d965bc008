#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>
#include <random>

#include "core/exchange_schedule.h"

namespace torchtitan_ext::core {
namespace {

using Sizes = std::vector<int64_t>;

std::vector<ExchangeBox> read(const Sizes& table, const std::vector<Sizes>& shapes) {
  const std::vector<std::span<const int64_t>> views(shapes.begin(), shapes.end());
  return read_exchange_boxes(table, views, 3, "where");
}

std::string refusal(const Sizes& table, const std::vector<Sizes>& shapes) {
  try {
    read(table, shapes);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST(ReadExchangeBoxes, Boxes) {
  const Sizes table = {0, 1, -1, 2, 3, 0, 1, 4, 2, 0, 6, 0};
  const std::vector<ExchangeBox> boxes = read(table, {{}, {4, 4}});
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_EQ(boxes[0].peer, 0);
  EXPECT_EQ(boxes[0].tensor, 1u);
  EXPECT_EQ(boxes[0].dtype, -1);
  EXPECT_TRUE(std::ranges::equal(boxes[0].offsets, Sizes{3, 0}));
  EXPECT_TRUE(std::ranges::equal(boxes[0].sizes, Sizes{1, 4}));
  EXPECT_EQ(boxes[1].peer, 2);
  EXPECT_EQ(boxes[1].dtype, 6);
  EXPECT_TRUE(boxes[1].sizes.empty());
}

TEST(ReadExchangeBoxes, Refusals) {
  const std::vector<std::pair<Sizes, std::string>> cases = {
      {{0, 0, -1}, "where: the table ends within box 0"},
      {{0, 0, -1, 1, 0}, "where: the table ends within box 0"},
      {{3, 0, -1, 1, 0, 1}, "where: box 0 has peer 3, expected a rank of the group, 0 to 2"},
      {{-1, 0, -1, 1, 0, 1}, "where: box 0 has peer -1, expected a rank of the group, 0 to 2"},
      {{1, 0, -1, 1, 0, 1, 0, 0, -1, 1, 0, 1}, "where: box 1 has peer 0, the one before it 1; sort them by peer"},
      {{0, 1, -1, 1, 0, 1}, "where: box 0 is of tensor 1, expected a position in a list of 1"},
      {{0, 0, -1, 2, 0, 0, 1, 1}, "where: box 0 has 2 dims, its tensor has 1"},
      {{0, 0, -1, 1, 3, 3}, "where: box 0 begins at 3 and has 3 of the 5 elements of dim 0"},
      {{0, 0, -1, 1, -1, 3}, "where: box 0 begins at -1 and has 3 of the 5 elements of dim 0"},
      {{0, 0, -1, 1, INT64_MAX, INT64_MAX}, "of the 5 elements of dim 0"},
  };
  for (const auto& [table, text] : cases) EXPECT_NE(refusal(table, {{5}}).find(text), std::string::npos) << text;
}

TEST(ScheduleExchange, ExampleOfTheHeader) {
  const std::vector<PeerBytes> both = {{0, 7}, {1, 100}, {1, 128}, {2, 90}, {2, 128}};
  const ExchangeSchedule schedule = schedule_exchange(0, 3, both, both, 128, 128);
  ASSERT_EQ(schedule.sends.size(), 2u);
  EXPECT_EQ(schedule.sends[0].peer, 1);
  EXPECT_EQ(schedule.sends[1].peer, 2);
  // To rank 1 and from rank 2, twice; then the other way round.
  const auto step = [](size_t to, size_t from, size_t flight) {
    return ExchangeStep{PairFlight{to, flight}, PairFlight{from, flight}};
  };
  EXPECT_EQ(schedule.steps, (std::vector{step(0, 1, 0), step(0, 1, 1), step(1, 0, 0), step(1, 0, 1)}));
  // Positions in the whole list.
  EXPECT_EQ(schedule.sends[1].schedule.segments[0], (Segment{4, 0, 128, 0}));
  EXPECT_EQ(schedule.sends[1].schedule.segments[1], (Segment{3, 0, 90, 0}));
}

// Random amounts between random ranks.
struct Ranks {
  explicit Ranks(unsigned seed) : random(seed) {
    const size_t num_ranks = 1 + random() % 6;
    sends.resize(num_ranks);
    receives.resize(num_ranks);
    for (size_t from = 0; from < num_ranks; ++from) {
      for (size_t to = 0; to < num_ranks; ++to) {
        for (size_t count = random() % 3 == 0 ? 0 : random() % 6; count-- > 0;) {
          const int64_t num_bytes = random() % (random() % 4 == 0 ? 3000 : 100);
          sends[from].push_back({static_cast<int64_t>(to), num_bytes});
          receives[to].push_back({static_cast<int64_t>(from), num_bytes});
        }
      }
    }
  }

  std::vector<ExchangeSchedule> schedules() {
    const int64_t flight = 64 * (1 + random() % 10), direct = random() % 400;
    std::vector<ExchangeSchedule> all;
    for (size_t rank = 0; rank < sends.size(); ++rank) {
      all.push_back(schedule_exchange(rank, sends.size(), sends[rank], receives[rank], flight, direct));
    }
    return all;
  }

  std::mt19937 random;
  std::vector<std::vector<PeerBytes>> sends, receives;
};

TEST(ScheduleExchange, BothEndsMakeTheSameMessages) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    const std::vector<ExchangeSchedule> all = Ranks(seed).schedules();
    size_t num_pairs = 0, num_received = 0;
    for (size_t from = 0; from < all.size(); ++from) {
      for (const PairSchedule& sent : all[from].sends) {
        ASSERT_NE(sent.peer, static_cast<int64_t>(from));
        const auto& pairs = all[sent.peer].receives;
        const auto received = std::ranges::find(pairs, static_cast<int64_t>(from), &PairSchedule::peer);
        ASSERT_NE(received, pairs.end());
        EXPECT_EQ(sent.schedule.messages, received->schedule.messages);
        EXPECT_EQ(sent.schedule.flights, received->schedule.flights);
        ++num_pairs;
      }
      num_received += all[from].receives.size();
    }
    EXPECT_EQ(num_pairs, num_received);
  }
}

// Each rank has at most three steps under way and waits for the oldest one; a message moves when both ends have posted it.
TEST(ScheduleExchange, NobodyWaitsInACircle) {
  constexpr size_t kWindow = 3;
  for (unsigned seed = 0; seed < 300; ++seed) {
    const std::vector<ExchangeSchedule> all = Ranks(seed).schedules();
    std::vector<size_t> finished(all.size(), 0);
    const auto is_posted = [&](const ExchangeSchedule& schedule, size_t done, const PairFlight& flight, auto side) {
      const size_t last = std::min(done + kWindow, schedule.steps.size());
      for (size_t step = 0; step < last; ++step) {
        if (schedule.steps[step].*side == flight) return true;
      }
      return false;
    };
    const auto position = [](const std::vector<PairSchedule>& pairs, int64_t peer) {
      return static_cast<size_t>(std::ranges::find(pairs, peer, &PairSchedule::peer) - pairs.begin());
    };
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (size_t rank = 0; rank < all.size(); ++rank) {
        if (finished[rank] == all[rank].steps.size()) continue;
        const ExchangeStep& step = all[rank].steps[finished[rank]];
        bool is_done = true;
        if (step.send) {
          const size_t peer = all[rank].sends[step.send->pair].peer;
          const PairFlight there{position(all[peer].receives, rank), step.send->flight};
          is_done &= is_posted(all[peer], finished[peer], there, &ExchangeStep::receive);
        }
        if (step.receive) {
          const size_t peer = all[rank].receives[step.receive->pair].peer;
          const PairFlight there{position(all[peer].sends, rank), step.receive->flight};
          is_done &= is_posted(all[peer], finished[peer], there, &ExchangeStep::send);
        }
        if (is_done) {
          ++finished[rank];
          has_moved = true;
        }
      }
    }
    for (size_t rank = 0; rank < all.size(); ++rank) EXPECT_EQ(finished[rank], all[rank].steps.size());
  }
}

uint64_t sum_of_hashes(const Ranks& ranks) {
  uint64_t sum = 0;
  for (size_t rank = 0; rank < ranks.sends.size(); ++rank) {
    for (const uint64_t hash : hash_pairs(rank, ranks.sends.size(), ranks.sends[rank], true)) sum += hash;
    for (const uint64_t hash : hash_pairs(rank, ranks.sends.size(), ranks.receives[rank], false)) sum -= hash;
  }
  return sum;
}

TEST(HashPairs, AddUpToZeroWhereBothEndsAgree) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    Ranks ranks(seed);
    EXPECT_EQ(sum_of_hashes(ranks), 0u);
    const size_t rank = ranks.random() % ranks.sends.size();
    if (ranks.sends[rank].empty()) continue;
    PeerBytes& box = ranks.sends[rank][ranks.random() % ranks.sends[rank].size()];
    box.num_bytes += 1;
    EXPECT_NE(sum_of_hashes(ranks), 0u);
    box.num_bytes -= 1;
    ranks.sends[rank].pop_back();
    EXPECT_NE(sum_of_hashes(ranks), 0u);
  }
}

TEST(HashPairs, TheOrderCounts) {
  const std::vector<PeerBytes> one = {{0, 3}, {0, 5}}, other = {{0, 5}, {0, 3}}, none;
  EXPECT_NE(hash_pairs(1, 2, one, true), hash_pairs(1, 2, other, true));
  EXPECT_EQ(hash_pairs(1, 2, one, true)[0], hash_pairs(0, 2, std::vector<PeerBytes>{{1, 3}, {1, 5}}, false)[1]);
  EXPECT_EQ(hash_pairs(1, 2, none, true), (std::vector<uint64_t>{0, 0}));
}

TEST(DecideMeeting, AllRanksComeOnceWhereSomeSendFromADevice) {
  constexpr int64_t kCuda = 1, kOther = 13;
  const RankWire sends{true, kCuda, true}, idle{false, kCuda, true}, fresh{false, kCuda, false};
  EXPECT_FALSE(decide_meeting({}).is_needed);
  // Nobody sends from a device: a rank that has one, or none, or has not met, makes no difference.
  const RankWire host{false, -1, false};
  EXPECT_FALSE(decide_meeting(std::vector{host, fresh}).is_needed);
  // A rank that has nothing to send comes too, until all have met.
  EXPECT_TRUE(decide_meeting(std::vector{sends, fresh}).is_needed);
  EXPECT_TRUE(decide_meeting(std::vector{fresh, RankWire{true, kCuda, false}}).is_needed);
  EXPECT_FALSE(decide_meeting(std::vector{sends, idle, idle}).is_needed);
  // A rank without a device of that kind cannot come.
  EXPECT_EQ(decide_meeting(std::vector{host, sends, idle, RankWire{false, kOther, false}}).ranks_without,
            (std::vector<int64_t>{0, 3}));
  EXPECT_TRUE(decide_meeting(std::vector{sends, fresh}).ranks_without.empty());
}

}  // namespace
}  // namespace torchtitan_ext::core
