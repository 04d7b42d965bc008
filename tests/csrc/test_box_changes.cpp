#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/box_changes.h"
#include "core/chunk.h"
#include "core/exchange_table.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Numbers = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

int64_t below(Random& random, int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); }

// Positions and values of changes, with the space between the values of two tensors that ops.find_changes leaves.
struct Found {
  Numbers item_bytes, counts, whole, positions;
  Bytes values;

  void add(int64_t item, const std::map<int64_t, Bytes>& changed) {
    item_bytes.push_back(item);
    counts.push_back(static_cast<int64_t>(changed.size()));
    values.resize((values.size() + 15) / 16 * 16, 0xee);
    for (const auto& [position, value] : changed) {
      positions.push_back(position);
      values.insert(values.end(), value.begin(), value.end());
    }
  }
  void add_whole(int64_t item) {
    whole.push_back(static_cast<int64_t>(counts.size()));
    add(item, {});
  }
  std::vector<TensorChanges> split() const { return split_changes(item_bytes, counts, whole, positions, values); }
};

std::map<int64_t, Bytes> draw_changes(Random& random, int64_t num_elements, int64_t item) {
  std::map<int64_t, Bytes> changed;
  const int64_t one_in = 1 + below(random, 4);
  for (int64_t position = 0; position < num_elements; ++position) {
    if (below(random, one_in) != 0) continue;
    Bytes value(static_cast<size_t>(item));
    for (uint8_t& byte : value) byte = static_cast<uint8_t>(random());
    changed[position] = value;
  }
  return changed;
}

void append_row(Numbers& entries, int64_t peer, int64_t tensor, const Sizes& offsets, const Sizes& sizes) {
  entries.insert(entries.end(), {peer, tensor, -1, static_cast<int64_t>(sizes.size())});
  entries.insert(entries.end(), offsets.begin(), offsets.end());
  entries.insert(entries.end(), sizes.begin(), sizes.end());
}

// A box that is a tensor of its own on both ends, and what changed in it.
struct SentBox {
  int64_t from, to, item;
  Sizes sizes;
  bool is_whole;
  int64_t old_sum;
  std::map<int64_t, Bytes> changed;
};

// What the flat tables of all ranks carry: ranges from each rank to each other one.
template <typename T>
std::vector<std::vector<T>> deliver(const std::vector<std::vector<T>>& sent, const std::vector<Numbers>& sends,
                                    const std::vector<Numbers>& receives, const Numbers& num_received) {
  std::vector<std::vector<T>> received;
  for (size_t to = 0; to < sent.size(); ++to) {
    received.emplace_back(static_cast<size_t>(num_received[to]));
    for (size_t at = 0; at < receives[to].size(); at += 6) {
      const int64_t* const row = receives[to].data() + at;
      const Numbers& table = sends[static_cast<size_t>(row[0])];
      for (size_t other = 0; other < table.size(); other += 6) {
        if (table[other] != static_cast<int64_t>(to)) continue;
        EXPECT_EQ(table[other + 5], row[5]);
        std::copy_n(sent[static_cast<size_t>(row[0])].begin() + table[other + 4], row[5],
                    received[to].begin() + row[4]);
      }
    }
  }
  return received;
}

TEST(ExchangeTable, MakesOneRangeOfEachPeer) {
  Numbers entries;
  append_row(entries, 0, 0, {1}, {2});
  append_row(entries, 0, 1, {}, {});
  append_row(entries, 2, 0, {0}, {4});
  append_row(entries, 3, 0, {3}, {1});
  const ExchangeTable table(entries, {{4}, {}});
  EXPECT_EQ(table.flat_entries(Numbers{5, 0, 0, 7}), (Numbers{0, 0, -1, 1, 0, 5, 3, 0, -1, 1, 5, 7}));
  EXPECT_EQ(table.flat_entries(Numbers{1, 2, 3, 0}), (Numbers{0, 0, -1, 1, 0, 3, 2, 0, -1, 1, 3, 3}));
  EXPECT_THROW(table.flat_entries(Numbers{1}), std::invalid_argument);
  EXPECT_EQ(table.entries_of(std::vector<size_t>{0, 1, 2, 3}), entries);
  EXPECT_EQ(table.entries_of(std::vector<size_t>{1}), (Numbers{0, 1, -1, 0}));
}

TEST(ExchangeTable, CountsEqualBoxesOnce) {
  Numbers entries;
  append_row(entries, 0, 0, {1}, {2});
  append_row(entries, 0, 1, {1}, {2});
  append_row(entries, 1, 0, {1}, {2});
  append_row(entries, 1, 0, {1}, {3});
  append_row(entries, 2, 2, {1}, {2});
  const ExchangeTable table(entries, {{4}, {4}, {4}});
  const ExchangeTable::Distinct distinct = table.distinct(Numbers{7, 8, 7});
  EXPECT_EQ(distinct.firsts, (std::vector<size_t>{0, 1, 3}));
  EXPECT_EQ(distinct.of_boxes, (std::vector<size_t>{0, 1, 0, 2, 0}));
  EXPECT_THROW(table.distinct(Numbers{7}), std::invalid_argument);
}

TEST(ExchangeTable, RefusesWhatIsNoTable) {
  EXPECT_THROW(ExchangeTable(Numbers{0, 0, -1}, {{4}}), std::invalid_argument);
  EXPECT_THROW(ExchangeTable(Numbers{0, 1, -1, 1, 0, 4}, {{4}}), std::invalid_argument);
  EXPECT_THROW(ExchangeTable(Numbers{0, 0, -1, 1, 1, 4}, {{4}}), std::invalid_argument);
}

// All ranks send boxes to all others, and each finds what the others drew.
TEST(BoxChanges, BringWhatChanged) {
  Random random(3);
  for (int round = 0; round < 120; ++round) {
    const auto num_ranks = static_cast<size_t>(1 + below(random, 4));
    const bool is_idle = round % 10 == 0;
    std::vector<SentBox> boxes;  // in an order that both ends of a pair share
    for (int64_t left = is_idle ? 0 : below(random, 30); left > 0; --left) {
      SentBox box{below(random, static_cast<int64_t>(num_ranks)),
                  below(random, static_cast<int64_t>(num_ranks)),
                  int64_t{1} << below(random, 5),
                  {},
                  below(random, 5) == 0,
                  static_cast<int64_t>(random()),
                  {}};
      for (int64_t dims = below(random, 4); dims > 0; --dims) box.sizes.push_back(1 + below(random, 9));
      if (below(random, 20) == 0) box.sizes = {70'000 + below(random, 100)};
      if (!box.is_whole && below(random, 4) != 0) box.changed = draw_changes(random, num_elements(box.sizes), box.item);
      boxes.push_back(box);
    }
    std::vector<std::vector<SentBox>> out(num_ranks), in(num_ranks);
    std::vector<std::unique_ptr<OutgoingChanges>> outgoing;
    std::vector<std::unique_ptr<IncomingChanges>> incoming;
    const auto table_of = [](const std::vector<SentBox>& of_rank, int64_t SentBox::* peer) {
      Numbers entries;
      std::vector<Sizes> shapes;
      for (const SentBox& box : of_rank) {
        append_row(entries, box.*peer, static_cast<int64_t>(shapes.size()), Sizes(box.sizes.size()), box.sizes);
        shapes.push_back(box.sizes);
      }
      return std::make_shared<ExchangeTable>(entries, shapes);
    };
    std::vector<Numbers> header_sends, header_receives, sent_headers;
    Numbers num_received;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (const SentBox& box : boxes) {
        if (box.from == static_cast<int64_t>(rank)) out[rank].push_back(box);
        if (box.to == static_cast<int64_t>(rank)) in[rank].push_back(box);
      }
      std::ranges::stable_sort(out[rank], {}, &SentBox::to);
      std::ranges::stable_sort(in[rank], {}, &SentBox::from);
      // Packed in another order than they are sent, in two batches.
      std::vector<size_t> order(out[rank].size()), packed_as(out[rank].size());
      for (size_t at = 0; at < order.size(); ++at) order[at] = at;
      std::ranges::shuffle(order, random);
      auto packed = std::make_shared<PackedBoxes>();
      for (const auto& [first, last] : {std::pair(size_t{0}, order.size() / 2), {order.size() / 2, order.size()}}) {
        Found found;
        Numbers old_sums;
        for (size_t at = first; at < last; ++at) {
          const SentBox& box = out[rank][order[at]];
          packed_as[order[at]] = at;
          box.is_whole ? found.add_whole(box.item) : found.add(box.item, box.changed);
          old_sums.push_back(box.old_sum);
        }
        packed->add_compared(found.split(), old_sums);
      }
      outgoing.push_back(std::make_unique<OutgoingChanges>(table_of(out[rank], &SentBox::to), packed, packed_as));
      Numbers items;
      for (const SentBox& box : in[rank]) items.push_back(box.item);
      incoming.push_back(std::make_unique<IncomingChanges>(table_of(in[rank], &SentBox::from), items));
      header_sends.push_back(outgoing[rank]->headers_table());
      header_receives.push_back(incoming[rank]->headers_table());
      num_received.push_back(incoming[rank]->num_header_numbers());
      sent_headers.emplace_back(static_cast<size_t>(outgoing[rank]->num_header_numbers()));
      outgoing[rank]->write_headers(sent_headers[rank]);
    }
    const auto headers = deliver(sent_headers, header_sends, header_receives, num_received);
    std::vector<Numbers> data_sends, data_receives;
    std::vector<Bytes> sent_data;
    num_received.clear();
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      incoming[rank]->take_headers(headers[rank]);
      data_sends.push_back(outgoing[rank]->data_table());
      data_receives.push_back(incoming[rank]->data_table());
      num_received.push_back(incoming[rank]->num_data_bytes());
      sent_data.emplace_back(static_cast<size_t>(outgoing[rank]->num_data_bytes()));
      outgoing[rank]->write_data(sent_data[rank]);
    }
    const auto data = deliver(sent_data, data_sends, data_receives, num_received);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      Numbers positions(static_cast<size_t>(incoming[rank]->list_offsets().elements.back()));
      Bytes values(static_cast<size_t>(incoming[rank]->list_offsets().value_bytes.back()));
      incoming[rank]->unpack(data[rank], positions, values);
      Found expected;
      Numbers sums, whole;
      std::vector<size_t> wrong;
      std::map<int64_t, int64_t> bytes_of_peer;
      for (size_t at = 0; at < in[rank].size(); ++at) {
        const SentBox& box = in[rank][at];
        expected.add(box.item, box.changed);
        if (box.is_whole) append_row(whole, box.from, static_cast<int64_t>(at), Sizes(box.sizes.size()), box.sizes);
        sums.push_back(box.old_sum + (at % 3 == 0 ? 1 : 0));
        if (at % 3 == 0 && !box.changed.empty()) wrong.push_back(at);
        bytes_of_peer[box.from] += box.is_whole ? num_elements(box.sizes) * box.item : 0;
      }
      for (size_t at = 0; at < data_receives[rank].size(); at += 6) {
        bytes_of_peer[data_receives[rank][at]] += data_receives[rank][at + 5];
      }
      EXPECT_EQ(incoming[rank]->counts(), expected.counts);
      EXPECT_EQ(positions, expected.positions);
      ASSERT_EQ(values.size(), expected.values.size());
      const std::vector<TensorChanges> split = expected.split();
      for (const TensorChanges& of_box : split) {
        const size_t begin = static_cast<size_t>(of_box.values.data() - expected.values.data());
        const auto own = std::span(values).subspan(of_box.values.empty() ? 0 : begin, of_box.values.size());
        EXPECT_TRUE(std::ranges::equal(own, of_box.values));
      }
      EXPECT_EQ(incoming[rank]->whole_table(), whole);
      EXPECT_EQ(incoming[rank]->tensors_of_other_base(sums), wrong);
      EXPECT_EQ(incoming[rank]->bytes_of_peer(), bytes_of_peer);
    }
    std::map<std::pair<size_t, size_t>, int64_t> sent_bytes, received_bytes;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (const auto& [peer, bytes] : outgoing[rank]->bytes_of_peer()) sent_bytes[{rank, peer}] = bytes;
      for (const auto& [peer, bytes] : incoming[rank]->bytes_of_peer()) received_bytes[{peer, rank}] = bytes;
    }
    EXPECT_EQ(sent_bytes, received_bytes);
  }
}

// Boxes of a rank's tensors, whose changes are known by their positions in global tensors.
TEST(BoxChanges, FindTheChangesOfPartsOfChunks) {
  Random random(5);
  for (int round = 0; round < 200; ++round) {
    const int64_t item = int64_t{1} << below(random, 5);
    // A global tensor of rows, of which the rank holds two chunks one behind the other.
    const int64_t width = 1 + below(random, 6), depth = 1 + below(random, 4);
    const Sizes global{20, width, depth};
    const int64_t first = below(random, 5), second = 10 + below(random, 5), rows = 1 + below(random, 5);
    const HeldPart held{
        global,
        {{{first, 0, 0}, {rows, width, depth}, {0, 0, 0}}, {{second, 0, 0}, {rows, width, depth}, {rows, 0, 0}}}};
    const std::map<int64_t, Bytes> changed = draw_changes(random, 20 * width * depth, item);
    Numbers entries;
    std::vector<std::map<int64_t, Bytes>> expected;
    for (int64_t left = below(random, 6); left > 0; --left) {
      const bool is_second = random() % 2 == 0;
      Sizes offsets{below(random, rows), below(random, width), below(random, depth)};
      const Sizes sizes{1 + below(random, rows - offsets[0]), 1 + below(random, width - offsets[1]),
                        1 + below(random, depth - offsets[2])};
      std::map<int64_t, Bytes> in_box;
      for (const auto& [position, value] : changed) {
        const int64_t row = position / (width * depth) - (is_second ? second : first) - offsets[0];
        const int64_t column = position / depth % width - offsets[1], at = position % depth - offsets[2];
        const bool is_inside =
            row >= 0 && row < sizes[0] && column >= 0 && column < sizes[1] && at >= 0 && at < sizes[2];
        if (is_inside) in_box[(row * sizes[1] + column) * sizes[2] + at] = value;
      }
      expected.push_back(in_box);
      if (is_second) offsets[0] += rows;
      append_row(entries, 0, 1, offsets, sizes);
    }
    append_row(entries, 1, 0, {0}, {3});  // of a tensor that goes whole
    const auto table = std::make_shared<ExchangeTable>(entries, std::vector<Sizes>{{3}, {2 * rows, width, depth}});
    Found found;
    found.add_whole(4);
    found.add(item, changed);
    auto packed = std::make_shared<PackedBoxes>();
    packed->add_parts(*table, found.split(), std::vector<HeldPart>{{{3}, {{{0}, {3}, {0}}}}, held});
    ASSERT_EQ(packed->size(), expected.size() + 1);
    Found boxes;
    for (const auto& of_box : expected) boxes.add(item, of_box);
    boxes.add(4, {});
    EXPECT_TRUE(std::ranges::equal(packed->positions(), boxes.positions));
    EXPECT_EQ(packed->counts(), boxes.counts);
    EXPECT_EQ(packed->header(0).has_base, 0);
    packed->set_old_sums(Numbers(packed->size(), 11));
    std::vector<size_t> packed_as;
    for (size_t at = 0; at < packed->size(); ++at) packed_as.push_back(at);
    const OutgoingChanges outgoing(table, packed, packed_as);
    IncomingChanges incoming(table, Numbers{4, item});
    Numbers headers(static_cast<size_t>(outgoing.num_header_numbers()));
    outgoing.write_headers(headers);
    incoming.take_headers(headers);
    Bytes data(static_cast<size_t>(outgoing.num_data_bytes()));
    outgoing.write_data(data);
    Numbers positions(static_cast<size_t>(incoming.list_offsets().elements.back()));
    Bytes values(static_cast<size_t>(incoming.list_offsets().value_bytes.back()), 0xee);
    incoming.unpack(data, positions, values);
    EXPECT_EQ(positions, boxes.positions);
    EXPECT_EQ(values, boxes.values);
    EXPECT_EQ(incoming.whole_table(), (Numbers{1, 0, -1, 1, 0, 3}));
    EXPECT_EQ(incoming.tensors_of_other_base(Numbers(packed->size(), 12)).size(),
              packed->size() - static_cast<size_t>(std::ranges::count(boxes.counts, 0)));
  }
}

TEST(BoxChanges, RefuseWhatDoesNotFit) {
  const Numbers items{4}, counts{2}, positions{1, 2};
  const Bytes values(8);
  EXPECT_THROW(split_changes(items, Numbers{2, 2}, {}, positions, values), std::invalid_argument);
  EXPECT_THROW(split_changes(items, Numbers{3}, {}, positions, values), std::invalid_argument);
  EXPECT_THROW(split_changes(items, Numbers{-1}, {}, positions, values), std::invalid_argument);
  EXPECT_THROW(split_changes(Numbers{8}, counts, {}, positions, values), std::invalid_argument);
  const auto found = split_changes(items, counts, {}, positions, values);
  const auto table = std::make_shared<ExchangeTable>(Numbers{0, 0, -1, 1, 2, 4}, std::vector<Sizes>{{8}});
  PackedBoxes packed;
  EXPECT_THROW(packed.add_compared(found, Numbers{}), std::invalid_argument);
  // No chunk has all of the box.
  const std::vector<HeldPart> held{{{8}, {{{0}, {4}, {0}}, {{4}, {4}, {4}}}}};
  EXPECT_THROW(packed.add_parts(*table, found, held), std::invalid_argument);
  EXPECT_THROW(packed.add_parts(*table, {}, {}), std::invalid_argument);
  EXPECT_THROW(packed.set_old_sums(Numbers{1}), std::invalid_argument);
  EXPECT_THROW(OutgoingChanges(table, std::make_shared<PackedBoxes>(), {}), std::invalid_argument);
  EXPECT_THROW(OutgoingChanges(table, std::make_shared<PackedBoxes>(), {0}), std::out_of_range);
  EXPECT_THROW(IncomingChanges(table, Numbers{}), std::invalid_argument);
}

class HostileChanges : public ::testing::Test {
 protected:
  std::shared_ptr<const ExchangeTable> table_ =
      std::make_shared<ExchangeTable>(Numbers{3, 0, -1, 1, 0, 6, 3, 0, -1, 1, 0, 2}, std::vector<Sizes>{{6}});

  // What the receiver makes of these messages.
  void take(const Numbers& headers, const Bytes& data) const {
    IncomingChanges incoming(table_, Numbers{2});
    incoming.take_headers(headers);
    // What it allocates is bound by its own tensors.
    ASSERT_LE(incoming.num_data_bytes(), 200);
    Numbers positions(static_cast<size_t>(incoming.list_offsets().elements.back()));
    Bytes values(static_cast<size_t>(incoming.list_offsets().value_bytes.back()));
    incoming.unpack(data, positions, values);
    auto own = positions.begin();
    for (size_t box = 0; box < 2; ++box) {
      const std::span in_box(own, static_cast<size_t>(incoming.counts()[box]));
      own += incoming.counts()[box];
      ASSERT_EQ(std::ranges::adjacent_find(in_box, std::greater_equal()), in_box.end());
      ASSERT_TRUE(in_box.empty() || (in_box.front() >= 0 && in_box.back() < (box == 0 ? 6 : 2)));
    }
  }
};

TEST_F(HostileChanges, AreErrors) {
  const Numbers idle{0, 0, 0, 0, 1};
  const auto refuses = [&](const Numbers& header, const Bytes& data, const std::string& why) {
    Numbers headers = header;
    headers.insert(headers.end(), idle.begin(), idle.end());
    try {
      take(headers, data);
      ADD_FAILURE() << "accepted; expected: " << why;
    } catch (const WireError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  const auto data_of = [](std::vector<int32_t> blocks, std::vector<uint16_t> offsets, size_t num_bytes) {
    Bytes data(num_bytes);
    std::memcpy(data.data(), blocks.data(), 4 * blocks.size());
    std::memcpy(data.data() + 4 * blocks.size(), offsets.data(), 2 * offsets.size());
    return data;
  };
  take({2, 1, 2, 0, 1, 0, 0, 0, 0, 1}, data_of({0, 2}, {3, 5}, 16));
  refuses({}, {}, "headers of changes: got 5 numbers, expected 10");
  refuses({-2, 0, 0, 0, 1}, {}, "changes of box 0 from rank 3: it tells of -2 changed elements of 6");
  refuses({7, 1, 7, 0, 1}, {}, "it tells of 7 changed elements of 6");
  refuses({std::numeric_limits<int64_t>::max(), 1, 1, 0, 1}, {}, "changed elements of 6");
  refuses({2, 0, 2, 0, 1}, {}, "it tells of 0 blocks and 2 offsets of 2 changed elements");
  refuses({2, 1, std::numeric_limits<int64_t>::max(), 0, 1}, {}, "offsets of 2 changed elements");
  refuses({2, -1, 2, 0, 1}, {}, "it tells of -1 blocks");
  refuses({0, 1, 0, 0, 1}, {}, "it tells of 1 blocks and 0 offsets of 0 changed elements");
  refuses({-1, 0, 5, 0, 1}, {}, "offsets of -1 changed elements");
  refuses({2, 1, 2, 0, 1}, Bytes(8), "changes of boxes: got 8 bytes, expected 16");
  refuses({2, 1, 2, 0, 1}, Bytes(24), "changes of boxes: got 24 bytes, expected 16");
  refuses({2, 1, 2, 0, 1}, data_of({0, 2}, {5, 3}, 16), "rank 3: PositionBlocks: positions of block 0 do not ascend");
  refuses({2, 1, 2, 0, 1}, data_of({0, 1}, {3, 5}, 16), "PositionBlocks: got 2 offsets, expected 1");
  refuses({2, 1, 2, 0, 1}, data_of({0, 3}, {3, 5}, 16), "PositionBlocks: offsets of block 0 are missing");
  refuses({2, 1, 1, 0, 1}, data_of({0, -4}, {2}, 16), "PositionBlocks: has 4 positions, expected 2");
  refuses({2, 1, 2, 0, 1}, data_of({0, 2}, {3, 6}, 16), "changes of box 0 from rank 3: element 6 of 6 has changed");
  refuses({2, 1, 2, 0, 1}, data_of({1, 2}, {3, 5}, 16), "element 65541 of 6 has changed");
}

TEST_F(HostileChanges, NeverReachFurther) {
  Random random(17);
  int num_taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    Numbers headers{3, 1, 3, 5, 1, 1, 1, 1, 6, 1};
    Bytes data{0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 2, 0, 5, 0, 1, 2, 3, 4,
               5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 7, 8};
    data.resize(40);
    for (int64_t left = 1 + below(random, 3); left > 0; --left) {
      if (random() % 2 == 0) {
        headers[static_cast<size_t>(below(random, 10))] = below(random, 9) - 2;
      } else {
        data[static_cast<size_t>(below(random, 40))] =
            static_cast<uint8_t>(random() % 8 == 0 ? random() : random() % 8);
      }
    }
    if (random() % 8 == 0) data.resize(static_cast<size_t>(below(random, 80)));
    try {
      take(headers, data);
      ++num_taken;
    } catch (const WireError&) {
    }
  }
  EXPECT_GT(num_taken, 100);
}

}  // namespace
}  // namespace torchtitan_ext::core
