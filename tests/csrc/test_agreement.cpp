#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "core/agreement.h"
#include "core/replica_digests.h"
#include "core/wire.h"
#include "core/write_plan.h"
#include "world_messages.h"

namespace torchtitan_ext::core {
namespace {

const std::vector<Placement> kRows = {{0, 2}, {0, 1}};         // FSDP2 over ColwiseParallel, tp 2
const std::vector<Placement> kReplicated = {{0, 1}, {-1, 1}};  // FSDP2 over SequenceParallel

// Eight ranks on dp 4 x tp 2 with two weights, a norm and a counter, which every rank of `with_extra` has one more of.
JointTable world_of(int64_t num_ranks, const std::vector<int64_t>& with_extra = {}) {
  const std::vector<MeshForm> meshes = {strided_mesh({num_ranks / 2, 2}, {2, 1})};
  const KeyColumns tensors =
      make_columns(meshes, {sharded({9, 3}, kRows), sharded({9}, kReplicated)}, {{"w1", 0}, {"norm", 1}, {"w2", 0}});
  const KeyColumns others = make_columns({}, {plain({}), object()}, {{"step", 0}, {"lr", 1}});
  const KeyColumns more = make_columns({}, {plain({}), object()}, {{"step", 0}, {"lr", 1}, {"extra", 1}});
  JointTable joint;
  const size_t first = joint.add_section(encode_columns(tensors));
  const size_t second = joint.add_section(encode_columns(others));
  const size_t third = joint.add_section(encode_columns(more));
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const bool has_more = std::find(with_extra.begin(), with_extra.end(), rank) != with_extra.end();
    joint.add_rank({first, has_more ? third : second}, encode_part(make_part(tensors, {rank / 2, rank % 2})));
  }
  joint.agree(true);
  return joint;
}

const KeyClass& class_of(const JointTable& joint, std::string_view name) {
  for (uint32_t key = 0; key < joint.num_keys(); ++key) {
    if (joint.name(key) == name) return joint.classes()[joint.class_of(key)];
  }
  throw std::out_of_range("no such key");
}

TEST(KeyColumns, ComeBackAsTheyWere) {
  KeyColumns columns = make_columns({strided_mesh({4, 2}, {2, 1}), {{3}, false, {5, 1, 7}, true, {"x"}}},
                                    {sharded({9, 3}, kRows), sharded({5}, {{0, 1}}, 1), stated_boxes({4}), object()},
                                    {{"a.b", 0}, {"a.c", 1}, {"boxes", 2}, {"", 3}});
  columns.forms = {{{{0, false}, {0, true}}}};
  columns.form_of[0] = 1;
  columns.kinds[1].has_order = true;
  columns.kinds[1].order = {{0, 0, 1}};
  const KeyColumns back = decode_columns(encode_columns(columns));
  EXPECT_EQ(encode_columns(back), encode_columns(columns));
  EXPECT_EQ(back.name(1), "a.c");
  RankPart part;
  part.standings = {{0, {3, 1}}, {0, {2}}};
  part.local_sizes = {{1, 3}, {2}, {}, {}};
  part.unusual = {{1, {3}}};
  part.boxes = {{2, {{{0}, {4}, {}}}}};
  EXPECT_EQ(encode_part(decode_part(encode_part(part), columns)), encode_part(part));
}

TEST(KeyColumns, SayWhereTheyAreBroken) {
  const std::string whole = encode_columns(make_columns({}, {object()}, {{"key", 0}}));
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THROW(decode_columns(std::string_view(whole).substr(0, length)), WireError);
  }
  EXPECT_THROW(decode_columns(whole + "x"), WireError);
  WireWriter out;  // a million keys in ten bytes
  for (const uint64_t value : {1u, 0u, 0u, 0u, 1'000'000u}) out.put(value);
  try {
    decode_columns(out.take());
    FAIL();
  } catch (const WireError& error) {
    EXPECT_STREQ(error.what(),
                 "key table: broken at byte 7 (keys): got a count of 1000000, and 0 bytes are left; "
                 "run the same version of torchtitan_ext on every rank");
  }
}

TEST(JointTable, KeysHeldAlikeAreOneClass) {
  const JointTable joint = world_of(8, {3});
  EXPECT_EQ(joint.classes().size(), 5u);  // weights, norm, step, lr, extra
  EXPECT_EQ(class_of(joint, "w1").keys, class_of(joint, "w2").keys);
  EXPECT_EQ(class_of(joint, "lr").members.size(), 8u);
  EXPECT_EQ(class_of(joint, "extra").members.size(), 1u);
  for (const KeyClass& of_keys : joint.classes()) EXPECT_FALSE(of_keys.trouble);
  EXPECT_EQ(class_of(joint, "w1").replicas.front().shards.size(), 7u);  // rank (3, 0) holds no row
  EXPECT_EQ(class_of(joint, "norm").replicas.front().shards[0].ranks, (std::vector<int64_t>{0, 1}));
}

TEST(JointTable, AKeyTwiceOnARankIsAnError) {
  JointTable joint;
  const std::string bytes = encode_columns(make_columns({}, {object()}, {{"a", 0}}));
  const size_t first = joint.add_section(bytes);
  const size_t second = joint.add_section(bytes);
  joint.add_rank({first, second}, encode_part({{}, {{}}, {}, {}}));
  EXPECT_THROW(joint.agree(true), WireError);
  EXPECT_THROW(joint.add_section(encode_columns(make_columns({}, {object()}, {{"b", 0}, {"b", 0}}))), WireError);
}

TEST(WritePlan, WritesEachKeyOnceAndBalancesReplicas) {
  const JointTable joint = world_of(64);
  const WritePlan plan(joint, false, {});
  std::map<std::string, int64_t> written_bytes;
  const std::vector<std::vector<uint32_t>> kind_of = {{0, 1, 0}, {0, 1}};
  int64_t num_objects = 0;
  for (int64_t rank = 0; rank < 64; ++rank) {
    for (const ClassWrites& writes : read_decision(plan.decision(rank), kind_of)) {
      for (const uint32_t key : writes.keys) {
        const bool is_object = writes.section == 1 && key == 1;
        EXPECT_TRUE(!is_object || rank == 0);
        num_objects += is_object;
      }
    }
  }
  EXPECT_EQ(num_objects, 1);
  const std::vector<int64_t>& loads = plan.load_bytes();
  EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), int64_t{0}), 4 * (2 * 27 + 9 + 1));
}

TEST(ReplicaDigests, NameTheKeyThatDiffers) {
  const JointTable joint = world_of(8);
  ReplicaDigests digests(joint);
  const std::string none = encode_digests({0, 1, 0}, 2, {"", "", ""});
  const size_t first = digests.add_message(0, none);
  const size_t usual = digests.add_message(1, encode_digests({0, 1}, 2, {"digest of step", "digest of lr"}));
  const size_t other = digests.add_message(1, encode_digests({0, 1}, 2, {"digest of step", "another"}));
  for (int64_t rank = 0; rank < 8; ++rank) digests.add_rank({first, rank == 5 ? other : usual});
  const auto found = digests.compare().differing;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(joint.name(found[0].key), "lr");
  EXPECT_EQ(found[0].first.rank, 0);
  EXPECT_EQ(found[0].second.rank, 5);
  EXPECT_EQ(found[0].second.digest, "another");
}

TEST(ReplicaDigests, ManyDifferentOnesTravelAsTheirBeginnings) {
  constexpr uint32_t kNumKeys = 100;
  std::vector<std::pair<std::string, uint32_t>> keys;
  std::vector<std::string> values;
  for (uint32_t key = 0; key < kNumKeys; ++key) {
    keys.emplace_back("key" + std::to_string(key), 0);
    values.push_back(std::to_string(1000 + key) + " and eleven more");
  }
  JointTable joint;
  const size_t section = joint.add_section(encode_columns(make_columns({}, {object()}, keys)));
  for (int rank = 0; rank < 2; ++rank) joint.add_rank({section}, encode_part({{}, {{}}, {}, {}}));
  joint.agree(true);
  const std::vector<uint32_t> kind_of(kNumKeys, 0);
  ReplicaDigests digests(joint);
  const std::string usual = encode_digests(kind_of, 1, {values.begin(), values.end()});
  EXPECT_LT(usual.size(), 6 * kNumKeys);
  values[42][0] = '2';
  const std::string other = encode_digests(kind_of, 1, {values.begin(), values.end()});
  digests.add_rank({digests.add_message(section, usual)});
  digests.add_rank({digests.add_message(section, other)});
  ASSERT_EQ(digests.compare().differing.size(), 1u);
  EXPECT_EQ(joint.name(digests.compare().differing[0].key), "key42");
}

// FSDP2 on dp 4 leaves two norms out of tp 2: ranks 0, 2, 4, 6 hold them on one mesh, ranks 1, 3, 5, 7 on another.
TEST(ReplicaDigests, TensorsOnSeveralMeshesAreComparedShardByShard) {
  const KeyColumns norms = make_columns({strided_mesh({4}, {2})}, {sharded({7}, {{0, 1}})}, {{"a", 0}, {"b", 0}});
  JointTable joint;
  const size_t section = joint.add_section(encode_columns(norms));
  for (int64_t rank = 0; rank < 8; ++rank) {
    joint.add_rank({section}, encode_part(make_part(norms, {rank / 2}, rank % 2)));
  }
  joint.agree(true);
  const auto compared = [&](int64_t drifted, const std::string& of_b) {
    ReplicaDigests digests(joint);
    for (int64_t rank = 0; rank < 8; ++rank) {
      const std::string usual = "16 bytes, shard " + std::to_string(rank / 2);
      const std::string message = encode_digests({0, 0}, 1, {usual, rank == drifted ? of_b : usual});
      digests.add_rank({digests.add_message(section, message)});
    }
    return digests.compare();
  };
  const ReplicaDigests::Comparison sound = compared(-1, "");
  EXPECT_TRUE(sound.differing.empty() && sound.uncompared.empty());
  EXPECT_EQ(sound.equal, (std::vector<uint32_t>{0, 1}));
  const ReplicaDigests::Comparison drifted = compared(5, "16 bytes, another");
  ASSERT_EQ(drifted.differing.size(), 1u);
  EXPECT_TRUE(drifted.differing[0].is_presumed);
  EXPECT_EQ(drifted.differing[0].first.rank, 4);
  EXPECT_EQ(drifted.differing[0].second.rank, 5);
  EXPECT_EQ(drifted.equal, (std::vector<uint32_t>{0}));

  // One mesh writes "b", both write "a": each of its elements once.
  const WritePlan plan(joint, false, {}, {}, drifted.equal);
  std::vector<int64_t> writers(2, 0);
  for (int64_t rank = 0; rank < 8; ++rank) {
    for (const ClassWrites& writes : read_decision(plan.decision(rank), {norms.kind_of})) {
      for (const uint32_t key : writes.keys) ++writers[key];
      EXPECT_TRUE(rank % 2 == 0 || writes.keys == std::vector<uint32_t>{0});
    }
  }
  EXPECT_EQ(writers, (std::vector<int64_t>{4, 4}));
  const std::vector<int64_t>& loads = plan.load_bytes();
  EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), int64_t{0}), 2 * 4 * 7);
  EXPECT_EQ(*std::max_element(loads.begin(), loads.end()), 2 * 4);
}

TEST(ReplicaDigests, OneOfThreeMeshesDiffers) {
  const KeyColumns norms = make_columns({strided_mesh({2}, {3})}, {sharded({7}, {{0, 1}})}, {{"a", 0}});
  JointTable joint;
  const size_t section = joint.add_section(encode_columns(norms));
  for (int64_t rank = 0; rank < 6; ++rank) {
    joint.add_rank({section}, encode_part(make_part(norms, {rank / 3}, rank % 3)));
  }
  joint.agree(true);
  ReplicaDigests digests(joint);
  for (int64_t rank = 0; rank < 6; ++rank) {
    const std::string digest = rank == 1 ? "16 bytes, another" : "16 bytes, shard " + std::to_string(rank / 3);
    digests.add_rank({digests.add_message(section, encode_digests({0}, 1, {digest}))});
  }
  const ReplicaDigests::Comparison found = digests.compare();
  ASSERT_EQ(found.differing.size(), 1u);
  EXPECT_EQ(found.differing[0].second.rank, 1);
  EXPECT_TRUE(found.equal.empty());
}

TEST(ReplicaDigests, ValuesAreNeverCut) {
  constexpr uint32_t kNumKeys = 60;
  std::vector<std::pair<std::string, uint32_t>> keys;
  std::vector<std::string> values;
  for (uint32_t key = 0; key < kNumKeys; ++key) {
    keys.emplace_back("key" + std::to_string(key), 0);
    values.push_back(key % 2 == 0 ? "value " + std::to_string(100 + key) : "sixteen bytes or " + std::to_string(key));
  }
  JointTable joint;
  const size_t section = joint.add_section(encode_columns(make_columns({}, {object()}, keys)));
  for (int rank = 0; rank < 2; ++rank) joint.add_rank({section}, encode_part({{}, {{}}, {}, {}}));
  joint.agree(true);
  const std::vector<uint32_t> kind_of(kNumKeys, 0);
  ReplicaDigests digests(joint);
  digests.add_rank({digests.add_message(section, encode_digests(kind_of, 1, {values.begin(), values.end()}))});
  values[20].back() = '9';
  digests.add_rank({digests.add_message(section, encode_digests(kind_of, 1, {values.begin(), values.end()}))});
  const auto found = digests.compare().differing;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].first.digest, "value 120");
  EXPECT_EQ(found[0].second.digest, "value 129");
  EXPECT_FALSE(found[0].first.is_cut || found[0].second.is_cut || found[0].is_presumed);
}

// Messages of a world with every type of entry, mutated: they are refused with a place, or they make some other world.
TEST(Messages, MutatedOnesAreRefusedOrMakeAnotherWorld) {
  const KeyColumns tensors =
      make_columns({strided_mesh({2, 2}, {2, 1}), {{2}, false, {0, 3}, true, {"dp"}}},
                   {sharded({9, 3}, kRows), sharded({9}, kReplicated), sharded({4}, {{0, 3}}, 1), stated_boxes({4})},
                   {{"layers.0.w", 0}, {"layers.1.w", 0}, {"norm", 1}, {"strided", 2}, {"boxes", 3}});
  KeyColumns others = make_columns({}, {plain({2}), object()}, {{"step", 0}, {"lr", 1}});
  others.forms = {{{{0, false}}}};
  others.form_of = {1, 1};
  std::vector<std::string> messages = {encode_columns(tensors), encode_columns(others)};
  for (int64_t rank = 0; rank < 4; ++rank) {
    RankPart part = make_part(tensors, {rank / 2, rank % 2});
    part.boxes = {{4, {{{rank}, {1}, {}}}}};
    messages.push_back(encode_part(part));
  }
  messages.push_back(encode_digests(others.kind_of, 2, {"digest of step", "digest of lr"}));
  const std::vector<std::vector<uint32_t>> kind_of = {tensors.kind_of, others.kind_of};

  std::mt19937 random(1);
  const auto below = [&](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random); };
  size_t num_refused = 0;
  for (int round = 0; round < 10'000; ++round) {
    std::vector<std::string> sent = messages;
    std::string& victim = sent[below(sent.size())];
    for (size_t mutation = below(3) + 1; mutation > 0 && !victim.empty(); --mutation) {
      const size_t at = below(victim.size());
      switch (below(4)) {
        case 0:
          victim[at] = static_cast<char>(below(256));
          break;
        case 1:
          victim[at] = static_cast<char>(victim[at] ^ (1 << below(8)));
          break;
        case 2:
          victim.insert(at, below(12) + 1, static_cast<char>(0xff));
          break;
        default:
          victim.erase(at, below(4) + 1);
      }
    }
    try {
      JointTable joint;
      const size_t first = joint.add_section(sent[0]);
      const size_t second = joint.add_section(sent[1]);
      for (size_t rank = 0; rank < 4; ++rank) joint.add_rank({first, second}, sent[2 + rank]);
      joint.agree(true);
      ReplicaDigests digests(joint);
      const size_t none = digests.add_message(first, std::string(joint.sections()[first].columns.kinds.size(), '\0'));
      const size_t message = digests.add_message(second, sent[6]);
      for (int rank = 0; rank < 4; ++rank) digests.add_rank({none, message});
      digests.compare();
      bool is_sound = true;
      for (const KeyClass& of_keys : joint.classes()) is_sound = is_sound && !of_keys.trouble;
      if (!is_sound) continue;
      std::string decision = WritePlan(joint, false, {}).decision(static_cast<int64_t>(below(4)));
      decision[below(decision.size())] = static_cast<char>(below(256));
      read_decision(decision, kind_of);
    } catch (const WireError& error) {
      EXPECT_NE(std::string(error.what()).find(':'), std::string::npos);
      ++num_refused;
    } catch (const std::overflow_error&) {  // all ranks together write more than 2^63 bytes
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 3'000u);
}

}  // namespace
}  // namespace torchtitan_ext::core
