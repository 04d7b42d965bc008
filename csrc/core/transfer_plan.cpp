#include "core/transfer_plan.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/flow.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

// A box that a rank states.
struct PlacedBox {
  Chunk box;
  uint32_t chunk = 0;  // of a tensor that states its boxes: the position of this one
  int64_t rank = 0;
};

// The boxes that a rank stated for keys of a class, as boxes of tensors of their own.
std::vector<PlacedBox> stated_boxes(const KeyClass& of_keys, size_t member) {
  std::vector<PlacedBox> placed;
  const std::vector<Chunk>& stated = *of_keys.stated.at(member);
  for (uint32_t position = 0; position < stated.size(); ++position) {
    Chunk box = stated[position];
    box.local_offsets.assign(box.sizes.size(), 0);
    if (!is_empty(box.sizes)) placed.push_back({std::move(box), position, of_keys.members[member].rank});
  }
  return placed;
}

std::vector<Supply> supplies_of(const JointTable& joint, const KeyClass& of_keys) {
  std::vector<Supply> supplies;
  if (joint.kind_of(of_keys).type == EntryType::kBoxes) {
    std::map<std::pair<Sizes, Sizes>, size_t> positions;
    for (size_t member = 0; member < of_keys.members.size(); ++member) {
      for (PlacedBox& placed : stated_boxes(of_keys, member)) {
        const auto [found, is_new] = positions.try_emplace({placed.box.offsets, placed.box.sizes}, supplies.size());
        if (is_new) supplies.push_back({placed.box, {}, {}});
        Supply& supply = supplies[found->second];
        if (!supply.ranks.empty() && supply.ranks.back() == placed.rank) continue;  // stated twice
        supply.ranks.push_back(placed.rank);
        supply.chunks.push_back(placed.chunk);
      }
    }
    return supplies;
  }
  // The first replica, and whoever else holds the same shards in the same places.
  for (const std::vector<const HeldShard*>& equal : equal_shards(of_keys)) {
    const HeldShard& first = *equal.front();
    const std::vector<HeldShard>& shards = of_keys.replicas.front().shards;
    if (&first < shards.data() || &first >= shards.data() + shards.size()) continue;
    std::vector<int64_t> ranks;
    for (const HeldShard* held : equal) {
      if (held->boxes == first.boxes) ranks.insert(ranks.end(), held->ranks.begin(), held->ranks.end());
    }
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    for (const Chunk& box : first.boxes) {
      if (!is_empty(box.sizes)) supplies.push_back({box, ranks, std::vector<uint32_t>(ranks.size(), 0)});
    }
  }
  return supplies;
}

std::vector<Demand> demands_of(const JointTable& joint, const KeyClass& of_keys) {
  std::vector<Demand> demands;
  if (joint.kind_of(of_keys).type == EntryType::kBoxes) {
    for (size_t member = 0; member < of_keys.members.size(); ++member) {
      Demand demand{{}, {}, {of_keys.members[member].rank}};
      for (PlacedBox& placed : stated_boxes(of_keys, member)) {
        demand.boxes.push_back(std::move(placed.box));
        demand.chunks.push_back(placed.chunk);
      }
      demands.push_back(std::move(demand));
    }
    return demands;
  }
  for (const Replica& replica : of_keys.replicas) {
    for (const HeldShard& held : replica.shards) {
      Demand demand{{}, {}, held.ranks};
      std::ranges::copy_if(held.boxes, std::back_inserter(demand.boxes),
                           [](const Chunk& box) { return !is_empty(box.sizes); });
      demand.chunks.assign(demand.boxes.size(), 0);
      demands.push_back(std::move(demand));
    }
  }
  return demands;
}

}  // namespace

std::vector<TransferPair> pair_keys(const JointTable& source, const JointTable& target,
                                    const std::vector<uint32_t>& source_of, const std::vector<MappedKey>& mapped,
                                    const std::map<uint32_t, std::vector<int64_t>>& distrusted) {
  TTE_CHECK(source_of.size() == target.num_keys(), "pair_keys", "got ", source_of.size(), " source keys, expected ",
            target.num_keys());
  std::vector<const MappedKey*> map_of(source_of.size(), nullptr);
  for (const MappedKey& one : mapped) map_of.at(one.key) = &one;
  std::vector<TransferPair> pairs;
  // Positions of pairs: several where maps differ.
  std::map<std::tuple<uint32_t, int64_t, std::vector<PairSource>>, std::vector<size_t>> alike;
  for (uint32_t key = 0; key < source_of.size(); ++key) {
    if (source_of[key] == JointTable::kNoClass && map_of[key] == nullptr) continue;
    TransferPair pair{{}, target.class_of(key), -1, {}, {key}, nullptr};
    TTE_CHECK(pair.target_class != JointTable::kNoClass, "pair_keys", "no rank holds ", std::string(target.name(key)));
    if (map_of[key] == nullptr) {
      pair.source_keys = {source_of[key]};
    } else {
      TensorMap map = map_of[key]->map;
      for (MapPiece& piece : map.pieces) {
        if (piece.source == kFill) continue;
        const auto found = std::ranges::find(pair.source_keys, piece.source);
        const auto number = static_cast<uint32_t>(found - pair.source_keys.begin());
        if (found == pair.source_keys.end()) pair.source_keys.push_back(piece.source);
        piece.source = number;
      }
      pair.cast_to = map_of[key]->cast_to;
      pair.map = std::make_shared<const TensorMap>(std::move(map));
    }
    for (const uint32_t of : pair.source_keys) {
      const auto doubt = distrusted.find(of);
      pair.sources.push_back({source.class_of(of), doubt == distrusted.end() ? std::vector<int64_t>() : doubt->second});
      TTE_CHECK(pair.sources.back().key_class != JointTable::kNoClass, "pair_keys", "no rank holds ",
                std::string(source.name(of)));
    }
    std::vector<size_t>& positions = alike[{pair.target_class, pair.cast_to, pair.sources}];
    const auto same = std::ranges::find_if(positions, [&](size_t position) {
      const TransferPair& other = pairs[position];
      if (!pair.map || !other.map) return pair.map == other.map;
      return pair.map->pieces == other.map->pieces;
    });
    if (same == positions.end()) {
      positions.push_back(pairs.size());
      pairs.push_back(std::move(pair));
      continue;
    }
    TransferPair& found = pairs[*same];
    found.source_keys.insert(found.source_keys.end(), pair.source_keys.begin(), pair.source_keys.end());
    found.target_keys.push_back(key);
  }
  return pairs;
}

namespace {

void put_view(WireWriter& out, const BoxView& view, const Sizes& sizes) {
  out.put_sizes(view.offsets);
  out.put_sizes(sizes);
  out.put(view.steps.size());
  for (const ViewStep& step : view.steps) {
    out.put(step.dim);
    out.put(static_cast<uint64_t>(step.elements));
  }
}

// Whether it is no box of the tensor; a view of one element has no steps either.
bool is_view(const BoxView& view, const Sizes& sizes) {
  return !view.steps.empty() || view.offsets.size() != sizes.size();
}

void get_view(WireReader& in, BoxView& view, Sizes& sizes) {
  view.offsets = in.get_sizes("offsets of a box");
  sizes = in.get_sizes("sizes of a box");
  view.steps.resize(in.get_count("steps", 2));
  for (ViewStep& step : view.steps) {
    step.dim = static_cast<uint32_t>(in.get_index("dim of a step", view.offsets.size()));
    step.elements = static_cast<int64_t>(in.get("elements of a step"));
  }
  if (is_view(view, sizes) && view.steps.size() != sizes.size()) in.fail("steps", "they are not as many as its sizes");
}

// The tensor at a position of a rank's table.
int64_t tensor_at(const WireReader& in, const std::vector<int64_t>& first_tensor, int64_t position) {
  const bool is_known = position >= 0 && position < static_cast<int64_t>(first_tensor.size());
  const int64_t tensor = is_known ? first_tensor[static_cast<size_t>(position)] : -1;
  if (tensor < 0) in.fail("position of a key", "this rank has no tensor there");
  return tensor;
}

}  // namespace

// What ranks are told of one table: of the pair that is planned, and of those before it.
struct TransferPlan::Side {
  const JointTable& joint;
  std::vector<std::string>& told;
  std::vector<WireWriter> boxes;  // per rank, of this pair
  std::vector<size_t> num_boxes;
  // Per list of sections: the positions in a rank's table of keys of the joint one; then of the keys of this pair, encoded.
  std::map<std::vector<size_t>, std::vector<uint32_t>> positions;
  std::map<std::vector<size_t>, std::string> keys_of_pair;

  Side(const JointTable& of, std::vector<std::string>& to)
      : joint(of), told(to), boxes(of.num_ranks()), num_boxes(of.num_ranks(), 0) {}

  void add_box(int64_t rank, int64_t peer, uint32_t source, uint32_t chunk, const BoxView& view, const Sizes& sizes) {
    WireWriter& out = boxes[static_cast<size_t>(rank)];
    out.put(static_cast<uint64_t>(peer));
    out.put(source);
    out.put(chunk);
    put_view(out, view, sizes);
    ++num_boxes[static_cast<size_t>(rank)];
  }

  void add_fill(int64_t rank, uint32_t chunk, const MapFill& fill) {
    WireWriter& out = boxes[static_cast<size_t>(rank)];
    out.put(chunk);
    put_view(out, fill.dst, fill.sizes);
    out.put(std::bit_cast<uint64_t>(fill.value));
    ++num_boxes[static_cast<size_t>(rank)];
  }

  // `keys_each`: how many of the keys belong together.
  void finish_pair(const std::vector<uint32_t>& keys, size_t keys_each, int64_t item_bytes, int64_t cast_to,
                   bool is_changed) {
    keys_of_pair.clear();
    for (size_t rank = 0; rank < boxes.size(); ++rank) {
      if (num_boxes[rank] == 0) continue;
      WireWriter out;
      out.put(static_cast<uint64_t>(item_bytes));
      out.put_signed(cast_to);
      out.put(is_changed ? 1 : 0);
      out.put(keys_each);
      out.append(encoded_keys(static_cast<int64_t>(rank), keys));
      out.put(num_boxes[rank]);
      out.append(boxes[rank].take());
      told[rank] += out.take();
      boxes[rank] = WireWriter();
      num_boxes[rank] = 0;
    }
  }

  const std::string& encoded_keys(int64_t rank, const std::vector<uint32_t>& keys) {
    const std::vector<size_t>& sections = joint.sections_of(rank);
    const auto [found, is_new] = keys_of_pair.try_emplace(sections);
    if (!is_new) return found->second;
    const std::vector<uint32_t>& position_of = positions_in(sections);
    WireWriter out;
    out.put(keys.size());
    int64_t before = 0;
    for (const uint32_t key : keys) {
      out.put_signed(int64_t{position_of[key]} - before);
      before = position_of[key];
    }
    return found->second = out.take();
  }

  const std::vector<uint32_t>& positions_in(const std::vector<size_t>& sections) {
    const auto [found, is_new] = positions.try_emplace(sections);
    if (!is_new) return found->second;
    found->second.assign(joint.num_keys(), 0);
    uint32_t position = 0;
    for (const size_t section : sections) {
      for (const uint32_t key : joint.sections()[section].keys) found->second[key] = position++;
    }
    return found->second;
  }
};

TransferPlan::TransferPlan(const JointTable& source, const JointTable& target, std::vector<TransferPair> pairs,
                           std::vector<uint32_t> hosts)
    : source_(source),
      target_(target),
      sent_(std::move(hosts)),
      sends_(source.num_ranks()),
      receives_(source.num_ranks()),
      fills_(source.num_ranks()) {
  TTE_CHECK(source.num_ranks() == target.num_ranks() && sent_.num_ranks() == source.num_ranks(), "TransferPlan",
            "the source has ", source.num_ranks(), " ranks, the target ", target.num_ranks(),
            ", and there are hosts of ", sent_.num_ranks());
  Side source_side(source_, sends_);
  Side target_side(target_, receives_);
  Side filled_side(target_, fills_);
  for (const TransferPair& pair : pairs) plan_pair(pair, source_side, target_side, filled_side);
}

void TransferPlan::plan_pair(const TransferPair& pair, Side& source_side, Side& target_side, Side& filled_side) {
  const KeyClass& to = target_.classes().at(pair.target_class);
  const std::vector<Demand> demands = demands_of(target_, to);
  const int64_t item_bytes = target_.kind_of(to).itemsize;
  const int64_t key_bytes = checked_mul(item_bytes, static_cast<int64_t>(pair.target_keys.size()));
  std::vector<MappedSupplies> sources;
  for (const PairSource& one : pair.sources) {
    const KeyClass& from = source_.classes().at(one.key_class);
    std::vector<Supply> held = supplies_of(source_, from);
    if (!one.distrusted.empty()) held = without_ranks(std::move(held), one.distrusted);
    sources.push_back({source_.kind_of(from).shape, std::move(held)});
  }
  const Flow flow = pair.map ? plan_mapped_flow(*pair.map, sources, demands, key_bytes, sent_)
                             : plan_flow(sources.front().supplies, demands, key_bytes, sent_);
  for (const Move& move : flow.moves) {
    int64_t& between = bytes_between_[{move.src_rank, move.dst_rank}];
    between = checked_add(between, checked_mul(num_elements(move.sizes), key_bytes));
    source_side.add_box(move.src_rank, move.dst_rank, move.source, move.src_chunk, move.src, move.sizes);
    target_side.add_box(move.dst_rank, move.src_rank, 0, move.dst_chunk, move.dst, move.sizes);
  }
  for (const Filled& filled : flow.filled) {
    for (const int64_t wanting : demands[filled.demand].ranks) {
      filled_side.add_fill(wanting, filled.chunk, filled.fill);
    }
  }
  const bool is_changed = pair.map || pair.cast_to >= 0;
  source_side.finish_pair(pair.source_keys, pair.sources.size(), item_bytes, pair.cast_to, is_changed);
  target_side.finish_pair(pair.target_keys, 1, item_bytes, -1, is_changed);
  filled_side.finish_pair(pair.target_keys, 1, item_bytes, -1, is_changed);
}

namespace {

std::vector<int64_t> get_positions(WireReader& in) {
  std::vector<int64_t> positions(in.get_count("keys"));
  int64_t position = 0;
  for (int64_t& one : positions) one = position += in.get_signed("position of a key");
  return positions;
}

// What stands before the boxes of a pair; see Side::finish_pair.
struct PairHead {
  int64_t item_bytes = 0;
  int64_t cast_to = -1;
  bool is_changed = false;
  size_t keys_each = 1;
  std::vector<int64_t> positions;
};

PairHead get_head(WireReader& in) {
  PairHead head;
  head.item_bytes = static_cast<int64_t>(in.get("bytes of an element"));
  head.cast_to = in.get_signed("dtype");
  head.is_changed = in.get_index("change on the way", 2) == 1;
  head.keys_each = in.get("keys that belong together");
  head.positions = get_positions(in);
  if (head.keys_each == 0 || head.positions.size() % head.keys_each != 0) {
    in.fail("keys that belong together", "they are not");
  }
  return head;
}

}  // namespace

std::vector<std::pair<int64_t, MapFill>> expand_fills(std::string_view bytes,
                                                      const std::vector<int64_t>& first_tensor) {
  WireReader in(bytes, "filled boxes");
  std::vector<std::pair<int64_t, MapFill>> fills;
  while (in.num_left() > 0) {
    const PairHead head = get_head(in);
    std::vector<std::pair<int64_t, MapFill>> of_key(in.get_count("boxes", 5));
    for (auto& [chunk, fill] : of_key) {
      chunk = static_cast<int64_t>(in.get("box of a tensor"));
      get_view(in, fill.dst, fill.sizes);
      fill.value = std::bit_cast<double>(in.get("value"));
    }
    for (const int64_t position : head.positions) {
      for (const auto& [chunk, fill] : of_key) {
        fills.emplace_back(tensor_at(in, first_tensor, position) + chunk, fill);
      }
    }
  }
  return fills;
}

BoxTable expand_transfers(std::string_view bytes, const std::vector<int64_t>& first_tensor, int64_t num_tensors) {
  struct Box {
    int64_t peer;
    size_t source;
    int64_t chunk;
    Sizes sizes;
    BoxView view;
  };
  WireReader in(bytes, "transfers");
  std::map<int64_t, std::vector<int64_t>> of_peer;
  std::map<int64_t, std::vector<bool>> are_changed;
  BoxTable table;
  while (in.num_left() > 0) {
    const auto& [item_bytes, cast_to, is_changed, keys_each, positions] = get_head(in);
    std::vector<Box> boxes;
    const size_t num_boxes = in.get_count("boxes", 6);
    for (size_t index = 0; index < num_boxes; ++index) {
      Box box;
      box.peer = static_cast<int64_t>(in.get("peer"));
      box.source = in.get_index("source of a map", keys_each);
      box.chunk = static_cast<int64_t>(in.get("box of a tensor"));
      get_view(in, box.view, box.sizes);
      boxes.push_back(std::move(box));
    }
    for (size_t first = 0; first < positions.size(); first += keys_each) {
      for (const Box& box : boxes) {
        int64_t tensor = tensor_at(in, first_tensor, positions[first + box.source]) + box.chunk;
        Sizes offsets = box.view.offsets;
        if (is_view(box.view, box.sizes)) {
          table.views.push_back({tensor, box.sizes, box.view});
          tensor = num_tensors + static_cast<int64_t>(table.views.size()) - 1;
          offsets.assign(box.sizes.size(), 0);
        }
        std::vector<int64_t>& entries = of_peer[box.peer];
        entries.insert(entries.end(), {box.peer, tensor, cast_to, static_cast<int64_t>(box.sizes.size())});
        entries.insert(entries.end(), offsets.begin(), offsets.end());
        entries.insert(entries.end(), box.sizes.begin(), box.sizes.end());
        are_changed[box.peer].push_back(is_changed);
        table.bytes_of_peer[box.peer] += checked_mul(num_elements(box.sizes), item_bytes);
      }
    }
  }
  int64_t row = 0;
  for (const auto& [peer, entries] : of_peer) {
    table.entries.insert(table.entries.end(), entries.begin(), entries.end());
    for (const bool is_changed : are_changed.at(peer)) {
      if (is_changed) table.changed.push_back(row);
      ++row;
    }
  }
  return table;
}

}  // namespace torchtitan_ext::core
