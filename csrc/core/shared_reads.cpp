#include "core/shared_reads.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>

#include "core/boxes.h"
#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

// Of a part that one rank reads. At least a block that has a checksum: a block in two parts is read by half in one of
// them, which verifies it.
constexpr int64_t kMostPartBytes = int64_t{8} << 20;
constexpr int64_t kFewestPartBytes = int64_t{1} << 20;
// What a rank reads in one round, at least where there is so much, and at most.
constexpr int64_t kFewestRoundBytes = int64_t{4} << 20;
constexpr int64_t kMostRoundBytes = int64_t{256} << 20;
// Overlapping boxes that would fall into more pieces than this times their number are read by each rank.
constexpr size_t kMostPiecesPerBox = 16;

struct Message {
  std::vector<ShareTag> tags;
  std::vector<WantedRead> reads;
};

Message decode_wanted(std::string_view bytes) {
  WireReader in(bytes, "wanted reads");
  Message message;
  message.tags.resize(in.get_count("tags", 4));
  for (ShareTag& tag : message.tags) {
    tag.name = in.get_string("name of a tag");
    tag.device = in.get_string("device");
    tag.item_bytes = static_cast<int64_t>(in.get_index("bytes of an element", 1 << 10));
    if (tag.item_bytes == 0) in.fail("bytes of an element", "an element has none");
    const size_t flags = in.get_index("flags of a tag", 4);
    tag.is_cut = (flags & 1) != 0;
    tag.is_overwritten = (flags & 2) != 0;
  }
  message.reads.resize(in.get_count("reads", 6));
  uint64_t item = 0, key = 0;
  for (WantedRead& read : message.reads) {
    read.item = item += in.get("item");
    read.tag = in.get_index("tag", message.tags.size());
    read.key = key += static_cast<uint64_t>(in.get_signed("key"));
    read.chunk = in.get("chunk");
    read.offsets = in.get_sizes("offsets of a read");
    read.sizes = in.get_sizes("sizes of a read");
    if (read.sizes.size() != read.offsets.size()) in.fail("sizes of a read", "they are not as many as its offsets");
    for (size_t dim = 0; dim < read.sizes.size(); ++dim) {
      if (read.sizes[dim] < 0 || read.offsets[dim] < 0) in.fail("sizes of a read", "a size or an offset is negative");
    }
  }
  in.finish();
  return message;
}

}  // namespace

std::string encode_wanted(const std::vector<ShareTag>& tags, const std::vector<WantedRead>& reads) {
  WireWriter out;
  out.put(tags.size());
  for (const ShareTag& tag : tags) {
    out.put_string(tag.name);
    out.put_string(tag.device);
    out.put(static_cast<uint64_t>(tag.item_bytes));
    out.put((tag.is_cut ? 1 : 0) + (tag.is_overwritten ? 2 : 0));
  }
  out.put(reads.size());
  uint64_t item = 0, key = 0;
  for (const WantedRead& read : reads) {
    out.put(read.item - std::exchange(item, read.item));
    out.put(read.tag);
    out.put_signed(static_cast<int64_t>(read.key - std::exchange(key, read.key)));
    out.put(read.chunk);
    out.put_sizes(read.offsets);
    out.put_sizes(read.sizes);
  }
  return out.take();
}

SharePlan::SharePlan(const std::vector<std::string_view>& wanted, std::vector<int64_t> own_bytes,
                     std::vector<uint32_t> hosts)
    : loads_(std::move(hosts), std::move(own_bytes)) {
  TTE_CHECK(loads_.num_ranks() == wanted.size(), "SharePlan", "got ", wanted.size(), " messages and the hosts of ",
            loads_.num_ranks(), " ranks");
  std::map<std::string_view, uint32_t> party_of;
  std::vector<Message> messages;
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    wanted_bytes_ = checked_add(wanted_bytes_, loads_.rank_bytes()[rank]);
    const auto [found, is_new] = party_of.try_emplace(wanted[rank], static_cast<uint32_t>(parties_.size()));
    if (is_new) {
      parties_.push_back({});
      messages.push_back(decode_wanted(wanted[rank]));
    }
    parties_[found->second].ranks.push_back(static_cast<int64_t>(rank));
  }

  // What wants the same chunk in the same way.
  using Place = std::tuple<uint32_t, uint64_t, uint64_t>;  // tag, key, chunk
  std::map<ShareTag, uint32_t> tag_of;
  std::vector<std::tuple<Place, uint32_t, const Sizes*>> placed;  // with the position in wants_
  for (uint32_t party = 0; party < parties_.size(); ++party) {
    std::vector<uint32_t> tags;
    for (const ShareTag& tag : messages[party].tags) {
      const auto [found, is_new] = tag_of.try_emplace(tag, static_cast<uint32_t>(tags_.size()));
      if (is_new) tags_.push_back(tag);
      tags.push_back(found->second);
    }
    for (const WantedRead& read : messages[party].reads) {
      if (num_elements(read.sizes) == 0) continue;
      placed.emplace_back(Place{tags[read.tag], read.key, read.chunk}, static_cast<uint32_t>(wants_.size()),
                          &read.sizes);
      wants_.push_back({party, read.item, read.offsets});
    }
  }
  std::ranges::stable_sort(placed, {}, [](const auto& one) { return std::get<0>(one); });
  std::vector<std::pair<Sizes, uint32_t>> group;
  for (size_t first = 0; first < placed.size();) {
    size_t last = first;
    group.clear();
    for (; last < placed.size() && std::get<0>(placed[last]) == std::get<0>(placed[first]); ++last) {
      group.emplace_back(*std::get<2>(placed[last]), std::get<1>(placed[last]));
    }
    add_group(std::get<0>(std::get<0>(placed[first])), group);
    first = last;
  }
  // In the order of the files, as far as the first of the ranks that want them goes through these.
  std::ranges::sort(pieces_, {}, [this](const Piece& piece) {
    const Want& first = wants_[piece.wants.front()];
    return std::tuple(parties_[first.party].ranks.front(), first.item, std::cref(piece.offsets).get());
  });
}

void SharePlan::add_group(uint32_t tag, std::span<const std::pair<Sizes, uint32_t>> sizes_of_wants) {
  std::map<std::pair<Sizes, Sizes>, std::vector<uint32_t>> wants_of;  // by offsets and sizes
  const size_t num_dims = sizes_of_wants.front().first.size();
  for (const auto& [sizes, want] : sizes_of_wants) {
    TTE_CHECK(sizes.size() == num_dims, "SharePlan", "ranks want boxes of ", num_dims, " and ", sizes.size(),
              " dims of one chunk");
    wants_of[{wants_[want].offsets, sizes}].push_back(want);
  }
  std::vector<Box> boxes;
  std::vector<const std::vector<uint32_t>*> wants;
  for (const auto& [box, wanting] : wants_of) {
    boxes.push_back({box.first, box.second});
    wants.push_back(&wanting);
  }
  const auto bytes_of = [&](const Sizes& sizes) { return checked_mul(num_elements(sizes), tags_[tag].item_bytes); };
  for (const std::vector<uint32_t>& together : overlapping_groups(boxes)) {
    std::vector<Box> of_group;
    size_t num_wanting = 0;
    for (const uint32_t box : together) {
      num_wanting += ranks_of(*wants[box]).size();
      of_group.push_back(boxes[box]);
    }
    std::optional<std::vector<Cell>> cells = partition(of_group, kMostPiecesPerBox * together.size());
    // Where whole records are read for a part of them, parts must not become more than the reads that they replace.
    const bool is_too_fine = !cells || (!tags_[tag].is_cut && cells->size() > num_wanting);
    if (num_wanting < 2 || is_too_fine) {
      for (const uint32_t box : together) {
        const int64_t num_bytes = bytes_of(Sizes(boxes[box].sizes.begin(), boxes[box].sizes.end()));
        for (const int64_t rank : ranks_of(*wants[box])) {
          loads_.add(rank, num_bytes);
          wanted_bytes_ = checked_add(wanted_bytes_, num_bytes);
        }
      }
      continue;
    }
    for (Cell& cell : *cells) {
      Piece piece{tag, std::move(cell.box.offsets), std::move(cell.box.sizes), 0, {}};
      piece.num_bytes = bytes_of(piece.sizes);
      for (const uint32_t holder : cell.holders) {
        const std::vector<uint32_t>& wanting = *wants[together[holder]];
        piece.wants.insert(piece.wants.end(), wanting.begin(), wanting.end());
      }
      std::ranges::sort(piece.wants);
      add_piece(std::move(piece));
    }
  }
}

void SharePlan::add_piece(Piece piece) {
  const auto num_ranks = static_cast<int64_t>(ranks_of(piece.wants).size());
  const int64_t in_all = checked_mul(piece.num_bytes, num_ranks);
  wanted_bytes_ = checked_add(wanted_bytes_, in_all);
  if (num_ranks > 1) {
    repeated_bytes_ += in_all;
    shared_bytes_ += piece.num_bytes;
  }
  pieces_.push_back(std::move(piece));
}

// One per want: a rank that wants the same box for two items stands there twice.
std::vector<int64_t> SharePlan::ranks_of(const std::vector<uint32_t>& wants) const {
  std::vector<int64_t> ranks;
  for (const uint32_t want : wants) {
    const std::vector<int64_t>& of_party = parties_[wants_[want].party].ranks;
    ranks.insert(ranks.end(), of_party.begin(), of_party.end());
  }
  return ranks;
}

void SharePlan::assign(int64_t most_rounds) {
  std::map<std::pair<std::vector<int64_t>, bool>, Sharers> all_sharers;
  std::vector<Sharers*> sharers_of;
  for (const Piece& piece : pieces_) {
    std::vector<int64_t> ranks = ranks_of(piece.wants);
    Sharers& sharers = all_sharers[{ranks, tags_[piece.tag].is_overwritten}];
    sharers.ranks = std::move(ranks);
    sharers.num_bytes += piece.num_bytes;
    sharers_of.push_back(&sharers);
    if (sharers.ranks.size() == 1) {  // nobody else can read it
      loads_.add(sharers.ranks.front(), piece.num_bytes);
    }
  }
  num_rounds_ = count_rounds(most_rounds);
  std::vector<Assigned> assigned;
  for (size_t position = 0; position < pieces_.size(); ++position) {
    const Piece& piece = pieces_[position];
    const ShareTag& tag = tags_[piece.tag];
    Sharers& sharers = *sharers_of[position];
    const Chunk whole{piece.offsets, piece.sizes, {}};
    if (!tag.is_cut || sharers.ranks.size() == 1) {
      deal(piece, whole, sharers, assigned);
      continue;
    }
    const BoxParts parts(whole, part_bytes(sharers) / tag.item_bytes);
    for (int64_t part = 0; part < parts.size(); ++part) deal(piece, parts.at(part), sharers, assigned);
  }
  // The rounds of each reader hold about as much each, in the order of its files.
  std::vector<int64_t> in_all(loads_.num_ranks(), 0), done(loads_.num_ranks(), 0);
  for (const Assigned& one : assigned) in_all[static_cast<size_t>(one.reader)] += one.num_bytes;
  for (Assigned& one : assigned) {
    const auto reader = static_cast<size_t>(one.reader);
    const double before = static_cast<double>(done[reader]) / static_cast<double>(in_all[reader]);
    done[reader] += one.num_bytes;
    // What is overwritten comes before what overwrites it.
    const bool is_first = tags_[one.piece->tag].is_overwritten;
    const auto in_order = static_cast<int64_t>(before * static_cast<double>(num_rounds_));
    one.round = is_first ? 0 : std::min(num_rounds_ - 1, in_order);
  }
  encode_parts(assigned);
}

// The rounds for what the busiest rank reads if all is dealt out evenly.
int64_t SharePlan::count_rounds(int64_t most_rounds) const {
  if (loads_.num_ranks() == 0 || most_rounds <= 1) return 1;
  const int64_t most_bytes = *std::ranges::max_element(loads_.rank_bytes());
  const int64_t num_bytes = most_bytes + shared_bytes_ / static_cast<int64_t>(loads_.num_ranks());
  return std::max({int64_t{1}, std::min(most_rounds, num_bytes / kFewestRoundBytes), num_bytes / kMostRoundBytes});
}

// How much of the pieces one rank reads at a time: so that each has something to read in each round.
int64_t SharePlan::part_bytes(const Sharers& sharers) const {
  const int64_t num_parts = 2 * static_cast<int64_t>(sharers.ranks.size()) * num_rounds_;
  return std::clamp(sharers.num_bytes / num_parts, kFewestPartBytes, kMostPartBytes);
}

void SharePlan::deal(const Piece& piece, Chunk part, Sharers& sharers, std::vector<Assigned>& assigned) {
  const int64_t num_bytes = checked_mul(num_elements(part.sizes), tags_[piece.tag].item_bytes);
  if (sharers.reader < 0 || sharers.part_bytes + num_bytes > part_bytes(sharers)) {
    sharers.part_bytes = 0;
    sharers.reader = sharers.ranks[loads_.best(sharers.ranks)];
  }
  sharers.part_bytes += num_bytes;
  if (sharers.ranks.size() > 1) loads_.add(sharers.reader, num_bytes);
  assigned.push_back({&piece, std::move(part.offsets), std::move(part.sizes), num_bytes, sharers.reader});
}

namespace {

// A row of `SharedPart`, and the round that it belongs to.
struct RowInRound {
  int64_t round = 0;
  SharedPart::Row row;
};

void put_rows(WireWriter& out, const std::vector<RowInRound>& rows) {
  out.put(rows.size());
  int64_t item = 0;
  for (const RowInRound& one : rows) {
    out.put(static_cast<uint64_t>(one.round));
    out.put_signed(static_cast<int64_t>(one.row.item) - std::exchange(item, static_cast<int64_t>(one.row.item)));
    out.put(one.row.device);
    out.put_sizes(one.row.offsets);
    out.put_sizes(one.row.sizes);
    out.put_sizes(one.row.peers);
  }
}

}  // namespace

void SharePlan::encode_parts(const std::vector<Assigned>& assigned) {
  std::vector<std::vector<RowInRound>> reads(loads_.num_ranks()), receives(loads_.num_ranks());
  std::map<std::string, uint32_t> device_of;
  for (const Assigned& one : assigned) {
    const ShareTag& tag = tags_[one.piece->tag];
    const auto [device, is_new] = device_of.try_emplace(tag.device, static_cast<uint32_t>(devices_.size()));
    if (is_new) devices_.push_back(tag.device);
    const auto row_of = [&](const Want& want) {
      SharedPart::Row row{want.item, device->second, one.offsets, one.sizes, {}};
      for (size_t dim = 0; dim < row.offsets.size(); ++dim) row.offsets[dim] -= want.offsets[dim];
      return row;
    };
    // The first of the reader's items is read, all others are filled from there.
    std::vector<int64_t> peers;
    const Want* read = nullptr;
    for (const uint32_t number : one.piece->wants) {
      const Want& want = wants_[number];
      for (const int64_t rank : parties_[want.party].ranks) {
        const auto position = static_cast<size_t>(rank);
        if (rank == one.reader && read == nullptr) {
          read = &want;
        } else if (tag.is_overwritten) {
          reads[position].push_back({num_rounds_, row_of(want)});  // no round: nothing to read
        } else {
          receives[position].push_back({one.round, row_of(want)});
          receives[position].back().row.peers = {one.reader};
          peers.push_back(rank);
          int64_t& between = bytes_between_[{one.reader, rank}];
          between = checked_add(between, one.num_bytes);
        }
      }
    }
    if (read != nullptr) {
      std::vector<RowInRound>& of_reader = reads[static_cast<size_t>(one.reader)];
      of_reader.push_back({one.round, row_of(*read)});
      of_reader.back().row.peers = std::move(peers);
    }
  }
  for (size_t rank = 0; rank < reads.size(); ++rank) {
    WireWriter out;
    out.put(static_cast<uint64_t>(num_rounds_));
    put_rows(out, reads[rank]);
    put_rows(out, receives[rank]);
    part_messages_.push_back(out.take());
  }
}

SharedPart::SharedPart(std::string_view message) {
  WireReader in(message, "shared reads");
  rounds_.resize(in.get_index("rounds", size_t{1} << 20));
  for (const bool is_read : {true, false}) {
    const size_t num_rows = in.get_count("rows", 6);
    int64_t item = 0;
    for (size_t number = 0; number < num_rows; ++number) {
      const size_t round = in.get_index("round", rounds_.size() + 1);
      Row row;
      row.item = static_cast<uint64_t>(item += in.get_signed("item"));
      row.device = static_cast<uint32_t>(in.get("device"));
      row.offsets = in.get_sizes("offsets of a part");
      row.sizes = in.get_sizes("sizes of a part");
      row.peers = in.get_sizes("ranks");
      items_.push_back(row.item);
      if (round == rounds_.size()) continue;  // another rank reads what this one overwrites
      (is_read ? rounds_[round].reads : rounds_[round].receives).push_back(std::move(row));
    }
  }
  in.finish();
  std::ranges::sort(items_);
  items_.erase(std::unique(items_.begin(), items_.end()), items_.end());
}

SharedPart::Exchange SharedPart::exchange(size_t round, uint32_t device) const {
  Exchange exchange;
  const auto add = [device](const std::vector<Row>& rows, std::vector<size_t>& tensors, std::vector<int64_t>& table) {
    std::map<int64_t, std::vector<int64_t>> of_peer;
    for (size_t position = 0; position < rows.size(); ++position) {
      const Row& row = rows[position];
      if (row.device != device || row.peers.empty()) continue;
      const auto num_dims = static_cast<int64_t>(row.sizes.size());
      for (const int64_t peer : row.peers) {
        std::vector<int64_t>& entries = of_peer[peer];
        entries.insert(entries.end(), {peer, static_cast<int64_t>(tensors.size()), -1, num_dims});
        entries.insert(entries.end(), row.sizes.size(), 0);
        entries.insert(entries.end(), row.sizes.begin(), row.sizes.end());
      }
      tensors.push_back(position);
    }
    for (const auto& [peer, entries] : of_peer) table.insert(table.end(), entries.begin(), entries.end());
  };
  add(rounds_.at(round).reads, exchange.sources, exchange.sends);
  add(rounds_.at(round).receives, exchange.targets, exchange.receives);
  return exchange;
}

}  // namespace torchtitan_ext::core
