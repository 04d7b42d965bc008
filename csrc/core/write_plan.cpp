#include "core/write_plan.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

enum Mode : uint8_t { kNothing, kEveryKey, kSomeKeys, kStatedBoxes, kPiece, kNumModes };

// A page: records of fewer bytes begin anywhere in a file, and cost more than they take from a rank.
constexpr int64_t kLeastPieceBytes = 4096;

// Holders that differ by less than this part of what a rank writes on average are left so: each piece is one more chunk.
constexpr int64_t kToleratedPart = 8;

// So many rows for each piece: with fewer, pieces of whole rows would be uneven again.
constexpr int64_t kRowsPerPiece = 8;

int64_t num_bytes_of(const HeldShard& shard, int64_t itemsize) {
  int64_t total = 0;
  for (const Chunk& box : shard.boxes) total = checked_add(total, checked_mul(num_elements(box.sizes), itemsize));
  return total;
}

std::vector<uint32_t> one_host_each(size_t num_ranks) {
  std::vector<uint32_t> hosts(num_ranks);
  std::iota(hosts.begin(), hosts.end(), 0u);
  return hosts;
}

}  // namespace

const std::vector<HeldShard>& WritePlan::written_shards(const KeyClass& of_keys) {
  static const std::vector<HeldShard> kNone;
  return of_keys.replicas.empty() ? kNone : of_keys.replicas.front().shards;
}

WritePlan::WritePlan(const JointTable& joint, bool lowest_only, const std::vector<uint32_t>& lowest_keys,
                     std::vector<uint32_t> hosts, const std::vector<uint32_t>& equal_keys, bool may_divide)
    : joint_(joint),
      loads_(hosts.empty() ? one_host_each(joint.num_ranks()) : std::move(hosts)),
      batches_(joint.num_ranks()),
      position_in_class_(joint.num_keys()) {
  TTE_CHECK(loads_.num_ranks() == joint.num_ranks(), "WritePlan", "got the hosts of ", loads_.num_ranks(),
            " ranks, expected ", joint.num_ranks());
  std::vector<Choice> open;
  std::deque<std::vector<int64_t>> ranks_of_all_meshes;
  // By class: those that any holder may write, on the first mesh and on all meshes.
  std::vector<std::vector<uint32_t>> free_keys(joint.classes().size());
  std::vector<std::vector<uint32_t>> shared_keys(joint.classes().size());
  for (uint32_t index = 0; index < joint.classes().size(); ++index) {
    const KeyClass& of_keys = joint.classes()[index];
    const Kind& kind = joint.kind_of(of_keys);
    std::vector<uint32_t> settled;
    for (uint32_t position = 0; position < of_keys.keys.size(); ++position) {
      const uint32_t key = of_keys.keys[position];
      position_in_class_[key] = position;
      const bool is_lowest = lowest_only || std::binary_search(lowest_keys.begin(), lowest_keys.end(), key);
      const bool is_shared = std::binary_search(equal_keys.begin(), equal_keys.end(), key);
      (is_lowest ? settled : is_shared ? shared_keys[index] : free_keys[index]).push_back(position);
    }
    const auto on_all_meshes =
        shared_keys[index].empty() ? std::vector<std::vector<const HeldShard*>>() : equal_shards(of_keys);
    const std::vector<HeldShard>& shards = written_shards(of_keys);
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      const std::vector<int64_t>& ranks = shards[shard].ranks;
      const int64_t num_bytes = num_bytes_of(shards[shard], kind.itemsize);
      if (!settled.empty()) assign(index, shard, settled, {ranks.front()}, num_bytes);
      const auto give = [&](const std::vector<uint32_t>& keys, const std::vector<int64_t>& holders) {
        if (keys.empty()) return;
        if (holders.size() == 1) {
          assign(index, shard, keys, holders, num_bytes);
        } else {
          open.push_back({num_bytes, index, shard, &keys, &holders});
        }
      };
      give(free_keys[index], ranks);
      if (shared_keys[index].empty()) continue;
      std::vector<int64_t>& all_ranks = ranks_of_all_meshes.emplace_back();
      for (const HeldShard* held : on_all_meshes[shard]) {
        all_ranks.insert(all_ranks.end(), held->ranks.begin(), held->ranks.end());
      }
      give(shared_keys[index], all_ranks);
    }
    if (kind.type == EntryType::kObject) {
      std::vector<uint32_t> all(of_keys.keys.size());
      std::iota(all.begin(), all.end(), 0u);
      assign(index, 0, std::move(all), {of_keys.members.front().rank}, 0);
    }
  }
  std::stable_sort(open.begin(), open.end(),
                   [](const Choice& a, const Choice& b) { return a.num_bytes > b.num_bytes; });
  for (const Choice& choice : open) {
    assign(choice.of_class, choice.shard, *choice.keys, *choice.ranks, choice.num_bytes);
  }
  if (may_divide) divide_uneven(open);
  number_chunks();
  for (const Section& section : joint.sections()) section_plans_.push_back(plan_section(section));
}

std::vector<Chunk> WritePlan::written_boxes(uint32_t of_class) const {
  std::vector<Chunk> boxes;
  const std::vector<HeldShard>& shards = written_shards(joint_.classes()[of_class]);
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const auto divided = pieces_.find({of_class, shard});
    const std::vector<Chunk>& own = divided == pieces_.end() ? shards[shard].boxes : divided->second;
    boxes.insert(boxes.end(), own.begin(), own.end());
  }
  return boxes;
}

void WritePlan::number_chunks() {
  for (uint32_t of_class = 0; of_class < joint_.classes().size(); ++of_class) {
    size_t next = 0;
    std::vector<size_t>& first = first_chunks_.emplace_back();
    const std::vector<HeldShard>& shards = written_shards(joint_.classes()[of_class]);
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      const auto divided = pieces_.find({of_class, shard});
      first.push_back(next);
      next += divided == pieces_.end() ? shards[shard].boxes.size() : divided->second.size();
    }
  }
}

void WritePlan::divide_uneven(const std::vector<Choice>& choices) {
  int64_t total = 0;
  for (const int64_t num_bytes : load_bytes()) total = checked_add(total, num_bytes);
  const int64_t mean = load_bytes().empty() ? 0 : total / static_cast<int64_t>(load_bytes().size());
  const int64_t tolerated = std::max(2 * kLeastPieceBytes, mean / kToleratedPart);
  for (const Choice& choice : choices) {
    if (choice.num_bytes <= tolerated) break;  // the largest come first, and smaller ones are the balance's grain
    const KeyClass& of_keys = joint_.classes()[choice.of_class];
    const bool is_one_box = written_shards(of_keys)[choice.shard].boxes.size() == 1;
    if (joint_.kind_of(of_keys).type != EntryType::kTensor || !is_one_box) continue;
    if (choice.keys->size() < of_keys.keys.size()) continue;  // other keys of the class have their own writers
    std::vector<std::pair<int64_t, int64_t>> holders;         // bytes, rank
    int64_t most = 0;
    for (const int64_t rank : *choice.ranks) {
      const std::vector<Batch>& batches = batches_[static_cast<size_t>(rank)];
      const int64_t num_bytes = loads_.bytes_of(rank);
      const bool writes = std::any_of(batches.begin(), batches.end(), [&choice](const Batch& batch) {
        return batch.of_class == choice.of_class && batch.shard == choice.shard;
      });
      if (writes) most = std::max(most, num_bytes);
      holders.emplace_back(num_bytes, rank);
    }
    if (most - std::min_element(holders.begin(), holders.end())->first > tolerated) {
      divide(choice, std::move(holders), mean);
    }
  }
}

// Takes a shard from its writers, and fills its holders up to the mean with pieces of it, from the one with the fewest
// bytes on; all of them to one level where there is more. Leaves the shard whole where that would not relieve any writer.
void WritePlan::divide(const Choice& choice, std::vector<std::pair<int64_t, int64_t>> holders, int64_t mean_bytes) {
  const auto num_keys = static_cast<int64_t>(choice.keys->size());
  const auto batch_of = [this, &choice](int64_t rank) {
    std::vector<Batch>& batches = batches_[static_cast<size_t>(rank)];
    return std::find_if(batches.begin(), batches.end(), [&choice](const Batch& batch) {
      return batch.of_class == choice.of_class && batch.shard == choice.shard;
    });
  };
  const auto taken_bytes = [this, &choice, &batch_of, num_keys](int64_t rank) {
    const auto own = batch_of(rank);
    if (own == batches_[static_cast<size_t>(rank)].end()) return int64_t{0};
    return choice.num_bytes * (own->keys.empty() ? num_keys : static_cast<int64_t>(own->keys.size()));
  };
  int64_t most = 0;
  for (auto& [num_bytes, rank] : holders) {
    const int64_t taken = taken_bytes(rank);
    if (taken > 0) most = std::max(most, num_bytes);
    num_bytes -= taken;
  }
  std::sort(holders.begin(), holders.end());
  holders.erase(std::unique(holders.begin(), holders.end()), holders.end());

  const int64_t whole = checked_mul(choice.num_bytes, num_keys);
  int64_t level = mean_bytes;
  int64_t below = whole;  // with what the holders have that are filled
  for (size_t count = 1; count <= holders.size(); ++count) {
    below = checked_add(below, holders[count - 1].first);
    const int64_t filled = below / static_cast<int64_t>(count) + 1;
    if (count < holders.size() && filled > holders[count].first) continue;
    level = std::max(level, filled);
    break;
  }
  struct Share {
    int64_t rank;
    int64_t held_bytes;  // of other shards
    int64_t num_bytes;
  };
  std::vector<Share> shares;
  int64_t rest = whole;
  for (const auto& [num_bytes, rank] : holders) {
    const int64_t room = std::min(level - num_bytes, rest);
    if (room < kLeastPieceBytes * num_keys) break;
    shares.push_back({rank, num_bytes, room});
    rest -= room;
  }
  if (shares.size() < 2) return;
  const auto num_shares = static_cast<int64_t>(shares.size());
  std::sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) { return a.rank < b.rank; });

  const Chunk& box = written_shards(joint_.classes()[choice.of_class])[choice.shard].boxes.front();
  // The first dim that is long enough: the rows of a piece then follow each other in memory.
  const auto is_long = [num_shares](int64_t size) { return size >= kRowsPerPiece * num_shares; };
  auto dim = std::find_if(box.sizes.begin(), box.sizes.end(), is_long);
  if (dim == box.sizes.end()) dim = std::max_element(box.sizes.begin(), box.sizes.end());
  const auto axis = static_cast<size_t>(dim - box.sizes.begin());
  const int64_t row_bytes = whole / *dim;
  struct Rows {
    int64_t rank, begin, end;
  };
  std::vector<Rows> rows;
  int64_t row = 0;
  int64_t end_bytes = 0;
  for (const Share& share : shares) {
    end_bytes = checked_add(end_bytes, share.num_bytes + rest / num_shares + 1);
    const bool is_last = share.rank == shares.back().rank;
    const int64_t end = is_last ? *dim : std::min(*dim, (end_bytes + row_bytes / 2) / row_bytes);
    if (share.held_bytes + (end - row) * row_bytes >= most) return;
    if (end > row) rows.push_back({share.rank, row, end});
    row = end;
  }
  for (const auto& [num_bytes, rank] : holders) {
    const int64_t taken = taken_bytes(rank);
    if (taken == 0) continue;
    batches_[static_cast<size_t>(rank)].erase(batch_of(rank));
    loads_.add(rank, -taken);
  }
  std::vector<Chunk>& pieces = pieces_[{choice.of_class, choice.shard}];
  for (const Rows& of_rank : rows) {
    Chunk piece = box;
    piece.offsets[axis] += of_rank.begin;
    piece.sizes[axis] = of_rank.end - of_rank.begin;
    batches_[static_cast<size_t>(of_rank.rank)].push_back({choice.of_class, choice.shard, {}, pieces.size()});
    loads_.add(of_rank.rank, row_bytes * (of_rank.end - of_rank.begin));
    pieces.push_back(std::move(piece));
  }
}

std::vector<uint32_t> WritePlan::keys_of_several_boxes() const {
  std::vector<uint32_t> keys;
  for (const KeyClass& of_keys : joint_.classes()) {
    const std::vector<HeldShard>& shards = written_shards(of_keys);
    const auto has_several = [](const HeldShard& shard) { return shard.boxes.size() > 1; };
    if (std::any_of(shards.begin(), shards.end(), has_several))
      keys.insert(keys.end(), of_keys.keys.begin(), of_keys.keys.end());
  }
  // Boxes that tensors state themselves are a shard each.
  for (const std::vector<Batch>& of_rank : batches_) {
    std::map<uint32_t, size_t> num_boxes;
    for (const Batch& batch : of_rank) {
      const KeyClass& of_keys = joint_.classes()[batch.of_class];
      if (joint_.kind_of(of_keys).type != EntryType::kBoxes || ++num_boxes[batch.of_class] != 2) continue;
      keys.insert(keys.end(), of_keys.keys.begin(), of_keys.keys.end());
    }
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

void WritePlan::assign(uint32_t of_class, size_t shard, std::vector<uint32_t> keys, const std::vector<int64_t>& ranks,
                       int64_t num_bytes) {
  const size_t num_keys = joint_.classes()[of_class].keys.size();
  const auto put = [&](int64_t rank, std::vector<uint32_t> own) {
    loads_.add(rank, checked_mul(num_bytes, static_cast<int64_t>(own.size())));
    if (own.size() == num_keys) own.clear();
    batches_[static_cast<size_t>(rank)].push_back({of_class, shard, std::move(own), std::nullopt});
  };
  if (ranks.size() == 1) {
    put(ranks[0], std::move(keys));
    return;
  }
  Dealer dealer(loads_, ranks);
  std::map<int64_t, std::vector<uint32_t>> keys_of_rank;
  for (const uint32_t key : keys) keys_of_rank[dealer.take(num_bytes)].push_back(key);
  for (auto& [rank, own] : keys_of_rank) put(rank, std::move(own));
}

WritePlan::SectionPlan WritePlan::plan_section(const Section& section) const {
  SectionPlan plan;
  const size_t num_kinds = section.columns.kinds.size();
  std::map<uint32_t, uint32_t> local_number;
  std::vector<std::map<uint32_t, size_t>> counts(num_kinds);
  std::vector<uint32_t> local_class(section.keys.size(), 0);  // plus 1; 0 for a key that is not held
  for (size_t key = 0; key < section.keys.size(); ++key) {
    const uint32_t of_class = joint_.class_of(section.keys[key]);
    if (section.ranks.empty() || section.columns.kinds[section.columns.kind_of[key]].type == EntryType::kNone) continue;
    const auto [found, is_new] = local_number.try_emplace(of_class, static_cast<uint32_t>(plan.classes.size()));
    if (is_new) {
      plan.classes.push_back(of_class);
      plan.local_positions.emplace_back(joint_.classes()[of_class].keys.size(), 0);
    }
    local_class[key] = found->second + 1;
    ++counts[section.columns.kind_of[key]][found->second + 1];
  }
  std::vector<uint32_t> usual(num_kinds, 0);
  WireWriter out;
  out.put(plan.classes.size());
  for (size_t kind = 0; kind < num_kinds; ++kind) {
    size_t most = 0;
    for (const auto& [number, count] : counts[kind]) {
      if (count > most) usual[kind] = number;
      most = std::max(most, count);
    }
    out.put(usual[kind]);
  }
  std::vector<uint32_t> seen(plan.classes.size(), 0);
  std::vector<size_t> unusual;
  for (size_t key = 0; key < section.keys.size(); ++key) {
    if (local_class[key] != usual[section.columns.kind_of[key]]) unusual.push_back(key);
    if (local_class[key] == 0) continue;
    const uint32_t number = local_class[key] - 1;
    plan.local_positions[number][position_in_class_[section.keys[key]]] = seen[number]++;
  }
  out.put(unusual.size());
  for (const size_t key : unusual) {
    out.put(key);
    out.put(local_class[key]);
  }
  plan.bytes = out.take();
  return plan;
}

std::string WritePlan::decision(int64_t rank) const {
  std::map<uint32_t, std::vector<const Batch*>> batches;
  for (const Batch& batch : batches_[static_cast<size_t>(rank)]) batches[batch.of_class].push_back(&batch);
  WireWriter out;
  for (const size_t section : joint_.sections_of(rank)) {
    const SectionPlan& plan = section_plans_[section];
    out.put_string(plan.bytes);
    for (size_t number = 0; number < plan.classes.size(); ++number) {
      const KeyClass& of_keys = joint_.classes()[plan.classes[number]];
      const auto found = batches.find(plan.classes[number]);
      if (found == batches.end()) {
        out.put(kNothing);
        continue;
      }
      const Batch& first = *found->second.front();
      if (joint_.kind_of(of_keys).type == EntryType::kBoxes) {
        out.put(kStatedBoxes);
        out.put(found->second.size());
        for (const Batch* batch : found->second) {
          const Chunk& box = written_shards(of_keys)[batch->shard].boxes.front();
          out.put(first_chunks_[plan.classes[number]][batch->shard]);
          out.put_sizes(box.offsets);
          out.put_sizes(box.sizes);
        }
        continue;
      }
      if (first.piece) {
        const Chunk& box = pieces_.at({first.of_class, first.shard})[*first.piece];
        out.put(kPiece);
        put_steps(of_keys.replicas.front().steps, out);
        out.put(first_chunks_[first.of_class][first.shard] + *first.piece);
        out.put_sizes(box.offsets);
        out.put_sizes(box.sizes);
        continue;
      }
      std::vector<uint32_t> keys;
      for (const Batch* batch : found->second) keys.insert(keys.end(), batch->keys.begin(), batch->keys.end());
      for (uint32_t& key : keys) key = plan.local_positions[number][key];
      std::sort(keys.begin(), keys.end());
      out.put(keys.empty() ? kEveryKey : kSomeKeys);
      put_steps(of_keys.replicas.empty() ? std::vector<ShardStep>() : of_keys.replicas.front().steps, out);
      out.put(of_keys.replicas.empty() ? 0 : first_chunks_[plan.classes[number]][first.shard]);
      if (keys.empty()) continue;
      out.put(keys.size());
      for (size_t index = 0; index < keys.size(); ++index) out.put(keys[index] - (index == 0 ? 0 : keys[index - 1]));
    }
  }
  return out.take();
}

std::vector<ClassWrites> read_decision(std::string_view bytes, const std::vector<std::vector<uint32_t>>& kind_of) {
  WireReader in(bytes, "decision");
  std::vector<ClassWrites> result;
  for (size_t section = 0; section < kind_of.size(); ++section) {
    const std::string_view plan_bytes = in.get_string("classes of keys");
    WireReader plan(plan_bytes, "decision");
    const size_t num_classes = plan.get_count("classes");
    const auto max_kind = std::max_element(kind_of[section].begin(), kind_of[section].end());
    const size_t num_kinds = max_kind == kind_of[section].end() ? 0 : size_t{*max_kind} + 1;
    std::vector<size_t> usual(num_kinds);
    for (size_t& number : usual) number = plan.get_index("class of a kind", num_classes + 1);
    std::vector<size_t> number_of(kind_of[section].size());
    for (size_t key = 0; key < number_of.size(); ++key) number_of[key] = usual[kind_of[section][key]];
    const size_t num_unusual = plan.get_count("unusual keys", 2);
    for (size_t index = 0; index < num_unusual; ++index) {
      const size_t key = plan.get_index("unusual key", number_of.size());
      number_of[key] = plan.get_index("class of a key", num_classes + 1);
    }
    plan.finish();
    std::vector<std::vector<uint32_t>> keys_of(num_classes);
    for (uint32_t key = 0; key < number_of.size(); ++key) {
      if (number_of[key] > 0) keys_of[number_of[key] - 1].push_back(key);
    }
    for (size_t number = 0; number < num_classes; ++number) {
      const size_t mode = in.get_index("mode", kNumModes);
      if (mode == kNothing) continue;
      ClassWrites& writes = result.emplace_back();
      writes.section = section;
      if (mode == kStatedBoxes) {
        writes.keys = std::move(keys_of[number]);
        const size_t num_boxes = in.get_count("boxes", 3);
        for (size_t box = 0; box < num_boxes; ++box) {
          const uint64_t position = in.get("position of a box");
          Sizes offsets = in.get_sizes("offsets of a box");
          writes.boxes.push_back({position, {std::move(offsets), in.get_sizes("sizes of a box"), {}}});
        }
        continue;
      }
      writes.steps = get_steps(in);
      if (mode == kPiece) {
        writes.keys = std::move(keys_of[number]);
        const uint64_t position = in.get("position of a piece");
        Sizes offsets = in.get_sizes("offsets of a piece");
        writes.boxes.push_back({position, {std::move(offsets), in.get_sizes("sizes of a piece"), {}}});
        continue;
      }
      writes.first_chunk = in.get("first chunk");
      if (mode == kEveryKey) {
        writes.keys = std::move(keys_of[number]);
        continue;
      }
      const size_t num_keys = in.get_count("keys");
      size_t position = 0;
      for (size_t index = 0; index < num_keys; ++index) {
        position += in.get_index("key", keys_of[number].size());
        if (position >= keys_of[number].size()) in.fail("key", "it is not among the keys of its class");
        writes.keys.push_back(keys_of[number][position]);
      }
    }
  }
  in.finish();
  return result;
}

}  // namespace torchtitan_ext::core
