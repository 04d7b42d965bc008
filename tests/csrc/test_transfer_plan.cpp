#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "core/transfer_plan.h"
#include "core/wire.h"
#include "world_messages.h"

namespace torchtitan_ext::core {
namespace {

constexpr int64_t kNothing = -1;

// One rank's tensors of one side: per key a contiguous local tensor of element numbers; one per box where boxes are
// stated.
struct Memory {
  std::vector<std::vector<int64_t>> elements;
  std::vector<Sizes> shapes;
  std::vector<int64_t> first_tensor;  // per key
};

// A state in one layout: what ranks send as tables, and what they hold.
struct State {
  JointTable joint;
  std::vector<Memory> memory;  // per rank
};

int64_t linear(std::span<const int64_t> index, std::span<const int64_t> shape) {
  int64_t position = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) position = position * shape[dim] + index[dim];
  return position;
}

template <typename Visit>
void for_each_index(const Sizes& sizes, const Visit& visit) {
  if (num_elements(sizes) == 0) return;
  Sizes index(sizes.size(), 0);
  while (true) {
    visit(index);
    size_t dim = sizes.size();
    while (dim > 0 && ++index[dim - 1] == sizes[dim - 1]) index[--dim] = 0;
    if (dim == 0) return;
  }
}

Sizes plus(const Sizes& left, const Sizes& right) {
  Sizes sum = left;
  for (size_t dim = 0; dim < sum.size(); ++dim) sum[dim] += right[dim];
  return sum;
}

void add_tensor(Memory& memory, const Sizes& shape) {
  memory.shapes.push_back(shape);
  memory.elements.emplace_back(static_cast<size_t>(num_elements(shape)), kNothing);
}

// Keys `names` of kind `kind` on a mesh; ranks outside it hold nothing. `fill` writes each element's global number.
State state_of(int64_t num_ranks, const MeshForm& mesh, int64_t origin, const Kind& kind,
               const std::vector<std::string>& names, bool fill) {
  std::vector<std::pair<std::string, uint32_t>> keys;
  for (const std::string& name : names) keys.emplace_back(name, 0);
  const KeyColumns columns = make_columns({mesh}, {kind}, keys);
  const KeyColumns none = make_columns({}, {}, {});
  State state;
  const size_t full = state.joint.add_section(encode_columns(columns));
  const size_t empty = state.joint.add_section(encode_columns(none));
  std::map<int64_t, Sizes> coordinates;
  for_each_index(mesh.shape, [&](const Sizes& at) { coordinates[rank_at(mesh, origin, at)] = at; });
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    Memory& memory = state.memory.emplace_back();
    const auto found = coordinates.find(rank);
    if (found == coordinates.end()) {
      state.joint.add_rank({empty}, encode_part(make_part(none, {})));
      continue;
    }
    state.joint.add_rank({full}, encode_part(make_part(columns, found->second, origin)));
    const auto steps = read_placements(kind.placements, mesh.shape, Reading::kNested);
    const Shard shard = shard_at({kind.shape, mesh.shape, steps}, found->second);
    for (size_t key = 0; key < names.size(); ++key) {
      memory.first_tensor.push_back(static_cast<int64_t>(memory.shapes.size()));
      add_tensor(memory, shard.sizes);
      if (!fill) continue;
      for (const Chunk& chunk : shard.chunks) {
        for_each_index(chunk.sizes, [&](const Sizes& at) {
          const int64_t global = linear(plus(chunk.offsets, at), kind.shape);
          const int64_t local = linear(plus(chunk.local_offsets, at), shard.sizes);
          memory.elements.back()[static_cast<size_t>(local)] =
              global + static_cast<int64_t>(key) * num_elements(kind.shape);
        });
      }
    }
  }
  state.joint.agree(false);
  for (const KeyClass& of_keys : state.joint.classes()) EXPECT_FALSE(of_keys.trouble);
  return state;
}

// A layout of a tensor on one of the meshes, in FSDP2's order.
std::pair<MeshForm, Kind> random_layout(std::mt19937& random, const Sizes& shape) {
  const std::vector<MeshForm> meshes = {strided_mesh({8}, {1}),       strided_mesh({4, 2}, {2, 1}),
                                        strided_mesh({2, 2}, {2, 1}), strided_mesh({2, 2, 2}, {4, 2, 1}),
                                        strided_mesh({3}, {1}),       {{2, 2}, false, {7, 1, 3, 5}, false, {}}};
  const MeshForm& mesh = meshes[random() % meshes.size()];
  std::vector<Placement> placements(mesh.shape.size());
  for (Placement& placement : placements) placement.dim = static_cast<int64_t>(random() % 3) - 1;
  // An axis that shares its dim with axes further right pays for them.
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].dim < 0) continue;
    for (size_t other = axis + 1; other < placements.size(); ++other) {
      if (placements[other].dim == placements[axis].dim) placements[axis].split_factor *= mesh.shape[other];
    }
  }
  return {mesh, sharded(shape, placements)};
}

std::vector<uint32_t> same_names(const JointTable& source, const JointTable& target) {
  std::map<std::string_view, uint32_t> numbers;
  for (uint32_t key = 0; key < source.num_keys(); ++key) numbers[source.name(key)] = key;
  std::vector<uint32_t> source_of;
  for (uint32_t key = 0; key < target.num_keys(); ++key) source_of.push_back(numbers.at(target.name(key)));
  return source_of;
}

// The elements of a box in the rank's tensor, in the order in which they travel.
struct BoxElements {
  size_t tensor = 0;
  std::vector<int64_t> positions;
};

BoxElements elements_of(const Memory& memory, const BoxTable& table, int64_t tensor, const Sizes& offsets,
                        const Sizes& sizes) {
  const int64_t view_number = tensor - static_cast<int64_t>(memory.shapes.size());
  const BoxTable::View* view = view_number < 0 ? nullptr : &table.views.at(static_cast<size_t>(view_number));
  BoxElements found{static_cast<size_t>(view == nullptr ? tensor : view->tensor), {}};
  for_each_index(sizes, [&](const Sizes& at) {
    Sizes local = view == nullptr ? plus(offsets, at) : view->view.offsets;
    for (size_t dim = 0; view != nullptr && dim < at.size(); ++dim) {
      const ViewStep& step = view->view.steps.at(dim);
      local.at(step.dim) += at[dim] * step.elements;
    }
    for (size_t dim = 0; dim < local.size(); ++dim) EXPECT_LT(local[dim], memory.shapes[found.tensor][dim]);
    found.positions.push_back(linear(local, memory.shapes[found.tensor]));
  });
  return found;
}

std::map<int64_t, std::deque<BoxElements>> boxes_by_peer(const Memory& memory, const std::string& told) {
  const BoxTable table = expand_transfers(told, memory.first_tensor, static_cast<int64_t>(memory.shapes.size()));
  std::map<int64_t, std::deque<BoxElements>> result;
  for (size_t at = 0; at < table.entries.size();) {
    const int64_t peer = table.entries[at];
    const auto dims = static_cast<size_t>(table.entries[at + 3]);
    const auto* values = table.entries.data() + at + 4;
    const Sizes offsets(values, values + dims), sizes(values + dims, values + 2 * dims);
    result[peer].push_back(elements_of(memory, table, table.entries[at + 1], offsets, sizes));
    at += 4 + 2 * dims;
  }
  return result;
}

// Moves elements as the ranks would, and counts how often each target element is written.
void exchange(const TransferPlan& plan, State& source, State& target) {
  std::map<std::pair<int64_t, int64_t>, std::deque<std::vector<int64_t>>> sent;
  const auto num_ranks = static_cast<int64_t>(source.memory.size());
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const Memory& memory = source.memory[static_cast<size_t>(rank)];
    for (const auto& [peer, boxes] : boxes_by_peer(memory, plan.sends(rank))) {
      for (const BoxElements& box : boxes) {
        std::vector<int64_t>& elements = sent[{rank, peer}].emplace_back();
        for (const int64_t position : box.positions) {
          elements.push_back(memory.elements[box.tensor].at(static_cast<size_t>(position)));
        }
      }
    }
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    Memory& memory = target.memory[static_cast<size_t>(rank)];
    for (const auto& [peer, boxes] : boxes_by_peer(memory, plan.receives(rank))) {
      for (const BoxElements& box : boxes) {
        auto& queue = sent[{peer, rank}];
        ASSERT_FALSE(queue.empty());
        const std::vector<int64_t> elements = queue.front();
        queue.pop_front();
        ASSERT_EQ(elements.size(), box.positions.size());
        for (size_t next = 0; next < elements.size(); ++next) {
          const auto local = static_cast<size_t>(box.positions[next]);
          EXPECT_EQ(memory.elements[box.tensor].at(local), kNothing) << "written twice";
          memory.elements[box.tensor][local] = elements[next];
        }
      }
    }
  }
  for (const auto& [ranks, queue] : sent) EXPECT_TRUE(queue.empty()) << ranks.first << " -> " << ranks.second;
}

std::vector<uint32_t> one_host_each(int64_t num_ranks) {
  std::vector<uint32_t> hosts(static_cast<size_t>(num_ranks));
  std::iota(hosts.begin(), hosts.end(), 0u);
  return hosts;
}

JointTable world_of_boxes(const std::vector<std::vector<Chunk>>& boxes_of_ranks, const Sizes& shape) {
  const KeyColumns columns = make_columns({}, {stated_boxes(shape)}, {{"w", 0}});
  JointTable joint;
  const size_t section = joint.add_section(encode_columns(columns));
  for (const std::vector<Chunk>& boxes : boxes_of_ranks) {
    RankPart part = make_part(columns, {});
    part.boxes = {{0, boxes}};
    joint.add_rank({section}, encode_part(part));
  }
  joint.agree(false);
  return joint;
}

TEST(TransferPlan, FillsEveryElementOnceWhateverTheTwoLayouts) {
  std::mt19937 random(26);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  constexpr int64_t kRanks = 8;
  for (int trial = 0; trial < 500; ++trial) {
    const Sizes shape = {1 + below(11), 1 + below(7)};
    const auto [source_mesh, source_kind] = random_layout(random, shape);
    const auto [target_mesh, target_kind] = random_layout(random, shape);
    const int64_t source_origin = source_mesh.is_strided && num_elements(source_mesh.shape) <= 4 ? below(5) : 0;
    const int64_t target_origin = target_mesh.is_strided && num_elements(target_mesh.shape) <= 4 ? below(5) : 0;
    State source = state_of(kRanks, source_mesh, source_origin, source_kind, {"a", "b"}, true);
    State target = state_of(kRanks, target_mesh, target_origin, target_kind, {"b", "a"}, false);
    if (::testing::Test::HasFailure()) return;
    const auto pairs = pair_keys(source.joint, target.joint, same_names(source.joint, target.joint));
    const TransferPlan plan(source.joint, target.joint, pairs, one_host_each(kRanks));
    exchange(plan, source, target);
    const State expected = state_of(kRanks, target_mesh, target_origin, target_kind, {"b", "a"}, true);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const Memory& made = target.memory[rank];
      for (size_t tensor = 0; tensor < made.elements.size(); ++tensor) {
        // "b" is the second key of the source, and the first of the target.
        const int64_t shift = (tensor == 0 ? 1 : -1) * num_elements(shape);
        std::vector<int64_t> wanted = expected.memory[rank].elements[tensor];
        for (int64_t& element : wanted) element += shift;
        EXPECT_EQ(made.elements[tensor], wanted) << "trial " << trial << ", rank " << rank;
      }
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(TransferPlan, CopiesThatAreDistrustedAreNotTaken) {
  const Kind everywhere = sharded({8}, {{-1, 1}});
  const State source = state_of(4, strided_mesh({3}, {1}), 0, everywhere, {"v", "w"}, true);
  const State target = state_of(4, strided_mesh({4}, {1}), 0, everywhere, {"v", "w"}, false);
  const auto pairs = pair_keys(source.joint, target.joint, {0, 1}, {}, {{1, {0}}});
  ASSERT_EQ(pairs.size(), 2u);
  const TransferPlan plan(source.joint, target.joint, pairs, one_host_each(4));
  // "v" from rank to itself; rank 0 takes "w" from another one.
  EXPECT_EQ(plan.bytes_between().at({0, 0}), 32);
  EXPECT_EQ(plan.bytes_between().at({1, 1}), 64);
  EXPECT_EQ(plan.bytes_between().at({1, 0}), 32);
}

TEST(TransferPlan, TakesFromItselfThenFromItsHostThenFromTheLeastLoaded) {
  const Kind everywhere = sharded({8}, {{-1, 1}});
  const State source = state_of(8, strided_mesh({4}, {1}), 0, everywhere, {"w"}, true);
  const State target = state_of(8, strided_mesh({6}, {1}), 2, everywhere, {"w"}, false);
  const auto pairs = pair_keys(source.joint, target.joint, same_names(source.joint, target.joint));
  // Ranks 0 to 3 hold, 2 to 7 want; 1 and 4 are on one host.
  const TransferPlan plan(source.joint, target.joint, pairs, {0, 1, 2, 3, 1, 5, 6, 7});
  const std::map<std::pair<int64_t, int64_t>, int64_t> expected = {{{2, 2}, 32}, {{3, 3}, 32}, {{1, 4}, 32},
                                                                   {{0, 5}, 32}, {{2, 6}, 32}, {{3, 7}, 32}};
  EXPECT_EQ(plan.bytes_between(), expected);
}

TEST(TransferPlan, BoxesThatTensorsStateAreTensorsOfTheirOwn) {
  const JointTable source = world_of_boxes({{{{0}, {0}, {}}, {{0}, {3}, {}}}, {{{3}, {5}, {}}}}, {8});
  const JointTable target = world_of_boxes({{{{2}, {2}, {}}}, {{{0}, {1}, {}}, {{7}, {1}, {}}}}, {8});
  const TransferPlan plan(source, target, pair_keys(source, target, {0}), {0, 1});
  // Rank 0: its second box begins at 0. Element 2 to itself, 0 to rank 1.
  const std::vector<int64_t> sends = {0, 11, -1, 1, 2, 1, 1, 11, -1, 1, 0, 1};
  EXPECT_EQ(expand_transfers(plan.sends(0), {10}, 20).entries, sends);
  const std::vector<int64_t> receives = {0, 10, -1, 1, 0, 1, 1, 11, -1, 1, 0, 1};
  EXPECT_EQ(expand_transfers(plan.receives(1), {10}, 20).entries, receives);
}

// A tensor that is made of two others, each of them of several keys of one class: parts, transposed, side by side.
TensorMap random_map(std::mt19937& random, const Sizes& shape, uint32_t first, uint32_t second) {
  const TensorMap whole = TensorMap::whole(first, shape);
  TensorMap part = TensorMap::whole(second, shape);
  if (random() % 2 == 0) {
    const int64_t rows = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(shape[0]));
    part = part.sliced(Sizes{shape[0] - rows, 0}, Sizes{rows, shape[1]});
  }
  TensorMap joined = TensorMap::concatenated(std::vector<const TensorMap*>{&whole, &part}, 0);
  if (random() % 2 == 0) joined = joined.permuted(Sizes{1, 0});
  if (random() % 2 == 0) {
    const int64_t total = num_elements(joined.shape);
    const int64_t rows = total % 3 == 0 ? 3 : total % 2 == 0 ? 2 : 1;
    joined = joined.reshaped({rows, -1});
    if (random() % 2 == 0) joined = joined.permuted(Sizes{1, 0});
  }
  return joined;
}

TEST(TransferPlan, MapsMoveElementsToTheirPlaces) {
  std::mt19937 random(7);
  int num_views = 0, num_decided = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const Sizes shape = {1 + static_cast<int64_t>(random() % 9), 1 + static_cast<int64_t>(random() % 7)};
    const auto [source_mesh, source_kind] = random_layout(random, shape);
    State source = state_of(8, source_mesh, 0, source_kind, {"a", "b", "c", "d"}, true);
    const TensorMap map = random_map(random, shape, 0, 1);
    TensorMap other = map;
    for (MapPiece& piece : other.pieces) piece.source += 2;
    const auto [target_mesh, target_kind] = random_layout(random, map.shape);
    State target = state_of(8, target_mesh, 0, target_kind, {"m", "n"}, false);
    const auto is_decided = [](const State& state) {
      return std::ranges::all_of(state.joint.classes(), [](const KeyClass& one) { return !one.trouble; });
    };
    if (!is_decided(source) || !is_decided(target)) continue;
    ++num_decided;
    const auto pairs = pair_keys(source.joint, target.joint, {JointTable::kNoClass, JointTable::kNoClass},
                                 {{0, map, -1}, {1, other, -1}});
    ASSERT_EQ(pairs.size(), 1u) << "equal maps over keys of equal classes";
    const TransferPlan plan(source.joint, target.joint, pairs, one_host_each(8));
    for (int64_t rank = 0; rank < 8; ++rank) {
      const Memory& memory = target.memory[static_cast<size_t>(rank)];
      num_views += !expand_transfers(plan.receives(rank), memory.first_tensor, 2).views.empty();
    }
    exchange(plan, source, target);
    State expected = state_of(8, target_mesh, 0, target_kind, {"m", "n"}, true);
    const auto elements = enumerate(map);
    const int64_t per_source = num_elements(shape), per_target = num_elements(map.shape);
    for (size_t rank = 0; rank < 8; ++rank) {
      for (std::vector<int64_t>& tensor : expected.memory[rank].elements) {
        for (int64_t& element : tensor) {
          const auto [number, position] = elements[static_cast<size_t>(element % per_target)];
          element = position + (number + 2 * (element / per_target)) * per_source;
        }
      }
      ASSERT_EQ(target.memory[rank].elements, expected.memory[rank].elements) << "trial " << trial << ", rank " << rank;
    }
  }
  EXPECT_GT(num_decided, 200);
  EXPECT_GT(num_views, 200);
}

TEST(TransferPlan, KeysOfOtherMapsAreOtherPairs) {
  const Kind everywhere = sharded({2, 3}, {{-1, 1}});
  const State source = state_of(2, strided_mesh({2}, {1}), 0, everywhere, {"a", "b"}, true);
  const State target = state_of(2, strided_mesh({2}, {1}), 0, everywhere, {"m", "n", "o"}, false);
  const TensorMap plain = TensorMap::whole(0, {2, 3});
  const TensorMap turned = plain.permuted(Sizes{1, 0}).reshaped({2, 3});
  const std::vector<uint32_t> none(3, JointTable::kNoClass);
  EXPECT_EQ(pair_keys(source.joint, target.joint, none, {{0, plain, -1}, {1, turned, -1}, {2, plain, -1}}).size(), 2u);
  EXPECT_EQ(pair_keys(source.joint, target.joint, none, {{0, plain, -1}, {1, plain, 15}, {2, plain, 15}}).size(), 2u);
  EXPECT_EQ(pair_keys(source.joint, target.joint, {0, JointTable::kNoClass, 1}, {{1, plain, -1}}).size(), 2u);
}

TEST(TransferPlan, MessagesThatDoNotFitAreRefused) {
  const JointTable joint = world_of_boxes({{{{0}, {8}, {}}}}, {8});
  const TransferPlan plan(joint, joint, pair_keys(joint, joint, {0}), {0});
  const std::string& sends = plan.sends(0);
  EXPECT_THROW(expand_transfers(sends, {-1}, 20), WireError);
  EXPECT_THROW(expand_transfers(sends, {}, 20), WireError);
  for (size_t length = 1; length < sends.size(); ++length) {
    EXPECT_THROW(expand_transfers(std::string_view(sends).substr(0, length), {0}, 20), WireError) << length;
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
