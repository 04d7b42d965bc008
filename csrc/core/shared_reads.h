// Which rank reads which part of a saved chunk, where several ranks want the same bytes, and whom it sends them to.
//
// Each rank tells the boxes of saved chunks that it wants. Where they overlap, they are cut into *pieces*: disjoint boxes,
// each wanted by the same ranks all over. One of these reads the piece into its own target, and the others get it from
// there, so that every byte is read once and no rank needs other memory than its targets.
//
//   rank 0 wants rows 0..6, rank 1 rows 4..10:   pieces 0..4 (rank 0), 4..6 (both), 6..10 (rank 1)
//
// Pieces that the same ranks want are dealt out in parts that lie side by side in the files, each to the best rank by
// `Loads`. A part is larger than the blocks that have checksums, so that nearly all blocks are read, and verified, whole.
//
// The exchange goes in rounds: ranks read the pieces of a round while those of the round before travel.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/chunk.h"
#include "core/loads.h"

namespace torchtitan_ext::core {

// What wanted boxes have in common. Only boxes of equal tags are shared.
struct ShareTag {
  std::string name;  // the checkpoint, and the dtype of the target
  std::string device;
  int64_t item_bytes = 1;
  bool is_cut = true;           // whether a part of a record can be read without the rest of it
  bool is_overwritten = false;  // by another item of the rank: reading it is enough, it is sent to no one

  auto operator<=>(const ShareTag&) const = default;
};

// A box of a saved chunk that a rank wants.
struct WantedRead {
  uint64_t item = 0;  // its position in the rank's plan; they increase
  uint64_t tag = 0;   // position among the rank's tags
  uint64_t key = 0;   // the saved key by its position, the same on all ranks, and the position of its chunk
  uint64_t chunk = 0;
  Sizes offsets;  // in the chunk
  Sizes sizes;
};

// The message of one rank to the coordinator.
std::string encode_wanted(const std::vector<ShareTag>& tags, const std::vector<WantedRead>& reads);

class SharePlan {
 public:
  // Args:
  //   wanted: the message of each rank;
  //   own_bytes: what each rank reads beside, and shares with no one;
  //   hosts: the number of each rank's host.
  // Throws WireError.
  SharePlan(const std::vector<std::string_view>& wanted, std::vector<int64_t> own_bytes, std::vector<uint32_t> hosts);

  // Bytes that ranks want, `own_bytes` included; of these what several ranks want, counted once for each; the same,
  // counted once.
  int64_t wanted_bytes() const { return wanted_bytes_; }
  int64_t repeated_bytes() const { return repeated_bytes_; }
  int64_t shared_bytes() const { return shared_bytes_; }

  // Decides who reads what, once, and in which of at most so many rounds.
  void assign(int64_t most_rounds);

  // After `assign`: the message to a rank, for `SharedPart`; the devices of what travels; bytes from rank to rank.
  const std::string& part_message(int64_t rank) const { return part_messages_.at(static_cast<size_t>(rank)); }
  const std::vector<std::string>& devices() const { return devices_; }
  const std::map<std::pair<int64_t, int64_t>, int64_t>& bytes_between() const { return bytes_between_; }

 private:
  // Ranks whose messages are equal.
  struct Party {
    std::vector<int64_t> ranks;
  };
  struct Want {
    uint32_t party = 0;
    uint64_t item = 0;
    Sizes offsets;  // of the item's box in its chunk
  };
  struct Piece {
    uint32_t tag = 0;
    Sizes offsets;  // in the chunk
    Sizes sizes;
    int64_t num_bytes = 0;
    std::vector<uint32_t> wants;  // positions in wants_, in increasing order of party and item
  };
  // A part of a piece, who reads it, and when.
  struct Assigned {
    const Piece* piece = nullptr;
    Sizes offsets;
    Sizes sizes;
    int64_t num_bytes = 0;
    int64_t reader = 0;
    int64_t round = 0;
  };
  // One group of ranks that want the same pieces.
  struct Sharers {
    std::vector<int64_t> ranks;
    int64_t num_bytes = 0;
    int64_t part_bytes = 0;  // of the part that is being dealt out
    int64_t reader = -1;
  };

  void add_group(uint32_t tag, std::span<const std::pair<Sizes, uint32_t>> sizes_of_wants);
  void add_piece(Piece piece);
  std::vector<int64_t> ranks_of(const std::vector<uint32_t>& wants) const;
  int64_t part_bytes(const Sharers& sharers) const;
  void deal(const Piece& piece, Chunk part, Sharers& sharers, std::vector<Assigned>& assigned);
  int64_t count_rounds(int64_t most_rounds) const;
  void encode_parts(const std::vector<Assigned>& assigned);

  Loads loads_;  // what each rank reads
  std::vector<Party> parties_;
  std::vector<ShareTag> tags_;
  std::vector<Want> wants_;
  std::vector<Piece> pieces_;
  int64_t wanted_bytes_ = 0;
  int64_t repeated_bytes_ = 0;
  int64_t shared_bytes_ = 0;
  int64_t num_rounds_ = 1;
  std::vector<std::string> part_messages_;
  std::vector<std::string> devices_;
  std::map<std::pair<int64_t, int64_t>, int64_t> bytes_between_;
};

// What one rank reads, sends and receives.
class SharedPart {
 public:
  // A part of an item.
  struct Row {
    uint64_t item = 0;
    uint32_t device = 0;
    Sizes offsets;  // in the item's box
    Sizes sizes;
    std::vector<int64_t> peers;  // those that it goes to, or the one that it comes from
  };
  struct Round {
    std::vector<Row> reads;
    std::vector<Row> receives;
  };
  // The tables of ops.exchange_runs_, and which rows of the round are its tensors.
  struct Exchange {
    std::vector<size_t> sources;
    std::vector<size_t> targets;
    std::vector<int64_t> sends;
    std::vector<int64_t> receives;
  };

  // Throws WireError.
  explicit SharedPart(std::string_view message);

  const std::vector<Round>& rounds() const { return rounds_; }
  // Items of which the rounds have all parts, in increasing order.
  const std::vector<uint64_t>& items() const { return items_; }
  Exchange exchange(size_t round, uint32_t device) const;

 private:
  std::vector<Round> rounds_;
  std::vector<uint64_t> items_;
};

}  // namespace torchtitan_ext::core
