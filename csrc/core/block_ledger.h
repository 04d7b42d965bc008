// Which blocks of files a load has touched and verified, over several reads and several ranks, so that each block of
// which anything is read is verified once.
//
// A read notes in its rank's ledger what it does with each block. A block of which a rank reads little is left for later:
// the ranks send their ledgers to the coordinator, and it gives each block that was touched somewhere and verified nowhere
// to one rank that touched it.
//
//   blocks of a file     0 1 2 3 4
//   ledger of rank 0     v v t . .      v: verified, t: touched, .: untouched
//   ledger of rank 1     . . t t v
//   dealt out            2 to rank 0, 3 to rank 1
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace torchtitan_ext::core {

enum class BlockState : uint8_t {
  kUntouched,
  kTouched,
  kElsewhere,  // touched, and another rank verifies it
  kVerified,
};

// The states of a file's blocks. Threads of several loads may note and read them at once.
class BlockStates {
 public:
  explicit BlockStates(size_t num_blocks) : states_(num_blocks) {}

  size_t size() const { return states_.size(); }
  BlockState at(size_t block) const { return states_.at(block).load(); }
  // A state that is higher already stays.
  void raise(size_t block, BlockState state) {
    BlockState now = states_.at(block).load();
    while (now < state && !states_[block].compare_exchange_weak(now, state)) {
    }
  }
  void replace(size_t block, BlockState state, BlockState by) { states_.at(block).compare_exchange_strong(state, by); }

 private:
  std::vector<std::atomic<BlockState>> states_;  // untouched at first
};

// Blocks [first, last) of a file.
struct BlockRange {
  std::string file;
  int64_t first = 0;
  int64_t last = 0;

  bool operator==(const BlockRange&) const = default;
};

// Several threads may use it at once.
class BlockLedger {
 public:
  // The states of a file by its name. A new file has `num_blocks` untouched ones; the same file has them for ever.
  std::shared_ptr<BlockStates> file(const std::string& name, size_t num_blocks);

  // Touched blocks that were not verified, in the order of files and blocks.
  std::vector<BlockRange> unverified() const;

  // Notes which of the touched blocks this rank verifies; the other touched ones are verified by other ranks.
  void take_part(const std::vector<BlockRange>& part);

  // For `deal_blocks`. Ranks that read the same copy of a checkpoint give the same `copy`.
  std::string message(std::string_view copy) const;

 private:
  std::map<std::string, std::shared_ptr<BlockStates>> files() const;

  mutable std::mutex mutex_;  // of the map
  std::map<std::string, std::shared_ptr<BlockStates>> files_;
};

// What each rank has to verify, given the ledgers of all ranks. A block goes to a rank that touched it and that has the
// fewest so far, and a stretch of neighbours to the same rank. Throws WireError.
std::vector<std::vector<BlockRange>> deal_blocks(const std::vector<std::string_view>& messages);

}  // namespace torchtitan_ext::core
