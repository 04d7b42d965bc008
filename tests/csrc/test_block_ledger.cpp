#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/block_ledger.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Block = std::pair<std::string, int64_t>;

std::vector<std::string_view> views(const std::vector<std::string>& messages) {
  return {messages.begin(), messages.end()};
}

void note(BlockStates& states, const std::vector<BlockState>& noted) {
  for (size_t block = 0; block < noted.size(); ++block) states.raise(block, noted[block]);
}

void touch_all(BlockStates& states) {
  for (size_t block = 0; block < states.size(); ++block) states.raise(block, BlockState::kTouched);
}

TEST(BlockLedger, GivesOutWhatNobodyVerified) {
  // The example of the header.
  BlockLedger first;
  BlockLedger second;
  using enum BlockState;
  note(*first.file("a", 5), {kVerified, kVerified, kTouched, kUntouched, kUntouched});
  note(*second.file("a", 5), {kUntouched, kUntouched, kTouched, kTouched, kVerified});
  EXPECT_EQ(first.unverified(), (std::vector<BlockRange>{{"a", 2, 3}}));
  const auto parts = deal_blocks(views({first.message("x"), second.message("x")}));
  EXPECT_EQ(parts[0], (std::vector<BlockRange>{{"a", 2, 3}}));
  EXPECT_EQ(parts[1], (std::vector<BlockRange>{{"a", 3, 4}}));
  // Copies of the file are verified each for itself.
  const auto of_copies = deal_blocks(views({first.message("x"), second.message("y")}));
  EXPECT_EQ(of_copies[1], (std::vector<BlockRange>{{"a", 2, 4}}));
}

TEST(BlockLedger, ADealCoversEachTouchedBlockOnce) {
  std::mt19937 draw(7);
  for (int round = 0; round < 2'000; ++round) {
    const size_t num_ranks = 1 + draw() % 6;
    std::map<std::string, size_t> files;
    for (size_t file = 0, count = 1 + draw() % 3; file < count; ++file) {
      files["f" + std::to_string(file)] = draw() % 60;
    }
    std::vector<std::string> messages;
    std::vector<std::string> copies;
    std::vector<std::set<Block>> touched(num_ranks);
    std::map<std::string, std::set<Block>> wanted;
    std::map<std::string, std::set<Block>> verified;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      copies.push_back(std::to_string(draw() % 2));
      BlockLedger ledger;
      for (const auto& [name, num_blocks] : files) {
        if (draw() % 4 == 0) continue;
        BlockStates& states = *ledger.file(name, num_blocks);
        const unsigned stay = 1 + draw() % 5;
        for (size_t block = 0; block < num_blocks; ++block) {
          states.raise(block,
                       block > 0 && draw() % stay != 0 ? states.at(block - 1) : static_cast<BlockState>(draw() % 3));
          const Block named{name, static_cast<int64_t>(block)};
          if (states.at(block) == BlockState::kVerified) verified[copies[rank]].insert(named);
          if (states.at(block) != BlockState::kTouched) continue;
          touched[rank].insert(named);
          wanted[copies[rank]].insert(named);
        }
      }
      size_t num_touched = 0;
      for (const BlockRange& range : ledger.unverified()) num_touched += static_cast<size_t>(range.last - range.first);
      EXPECT_EQ(num_touched, touched[rank].size());
      messages.push_back(ledger.message(copies[rank]));
    }
    const auto parts = deal_blocks(views(messages));
    ASSERT_EQ(parts.size(), num_ranks);
    std::map<std::string, std::set<Block>> dealt;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (const BlockRange& range : parts[rank]) {
        for (int64_t block = range.first; block < range.last; ++block) {
          EXPECT_TRUE(touched[rank].contains({range.file, block}));
          EXPECT_TRUE(dealt[copies[rank]].insert({range.file, block}).second);
        }
      }
    }
    for (const auto& [copy, blocks] : wanted) {
      std::set<Block> left;
      for (const Block& block : blocks) {
        if (!verified[copy].contains(block)) left.insert(block);
      }
      EXPECT_EQ(dealt[copy], left);
    }
  }
}

// Two loads note blocks of the same files while the message of one of them is made: TSan sees that nothing is torn.
TEST(BlockLedger, IsSharedByThreads) {
  constexpr size_t kBlocks = 2'000;
  BlockLedger ledger;
  const auto load = [&](BlockState state, size_t first) {
    for (const char* name : {"a", "b", "c"}) {
      const auto states = ledger.file(name, kBlocks);
      for (size_t block = first; block < kBlocks; block += 2) states->raise(block, BlockState::kTouched);
      for (size_t block = first; block < kBlocks; block += 2) states->raise(block, state);
    }
  };
  std::thread verifies(load, BlockState::kVerified, 0), touches(load, BlockState::kTouched, 1);
  for (int round = 0; round < 50; ++round) deal_blocks({ledger.message("")});
  verifies.join();
  touches.join();
  EXPECT_EQ(ledger.unverified().size(), 3 * kBlocks / 2);
}

TEST(BlockLedger, IsDealtOutEvenly) {
  std::vector<std::string> messages;
  for (int rank = 0; rank < 4; ++rank) {
    BlockLedger ledger;
    touch_all(*ledger.file("a", 1'000));
    messages.push_back(ledger.message(""));
  }
  for (const auto& part : deal_blocks(views(messages))) {
    int64_t num_blocks = 0;
    for (const BlockRange& range : part) num_blocks += range.last - range.first;
    EXPECT_NEAR(static_cast<double>(num_blocks), 250, 8);
  }
}

TEST(BlockLedger, DamagedMessagesAreRefused) {
  BlockLedger ledger;
  touch_all(*ledger.file("a", 9));
  const std::string message = ledger.message("x");
  for (size_t size = 0; size < message.size(); ++size) {
    EXPECT_THROW(deal_blocks({std::string_view(message).substr(0, size)}), WireError);
  }
  EXPECT_THROW(ledger.file("a", 8), std::invalid_argument);
}

}  // namespace
}  // namespace torchtitan_ext::core
