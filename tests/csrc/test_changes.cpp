// The runs of a box, and the operators of changes: the CPU kernels and the CUDA kernels' work, block by block and thread by
// thread on a CPU, against going element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/chunk.h"
#include "core/element_hash.h"
#include "ops/change_lists.h"
#include "ops/change_marks.h"
#include "ops/change_tables.h"

namespace torchtitan_ext::ops {
namespace {

using core::BoxWalk;
using core::Sizes;
using Bytes = std::vector<uint8_t>;

std::mt19937_64 random_numbers(7);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_numbers); }

// Many short ranges.
void parallel_for(int64_t begin, int64_t end, int64_t, RangeBody body, void* context) {
  const int64_t step = std::max<int64_t>((end - begin) / 7, 1);
  for (int64_t first = begin; first < end; first += step) body(first, std::min(first + step, end), context);
}

// Calls visit(coordinates) for each element of a box of these sizes, in row-major order.
template <typename Visit>
void visit_elements(const Sizes& sizes, const Visit& visit) {
  Sizes at(sizes.size(), 0);
  const int64_t count = core::num_elements(sizes);
  for (int64_t index = 0; index < count; ++index) {
    visit(at);
    for (size_t dim = sizes.size(); dim-- > 0;) {
      if (++at[dim] < sizes[dim]) break;
      at[dim] = 0;
    }
  }
}

int64_t dot(const Sizes& at, const Sizes& strides) {
  int64_t sum = 0;
  for (size_t dim = 0; dim < at.size(); ++dim) sum += at[dim] * strides[dim];
  return sum;
}

TEST(BoxWalk, RunsAreThoseOfTheElements) {
  for (int round = 0; round < 2000; ++round) {
    const size_t num_dims = draw(0, 4);
    Sizes global(num_dims), offsets(num_dims), sizes(num_dims), strides(num_dims);
    for (size_t dim = 0; dim < num_dims; ++dim) {
      global[dim] = draw(1, 5);
      offsets[dim] = draw(0, 1) ? 0 : draw(0, global[dim] - 1);
      sizes[dim] = draw(0, 1) ? global[dim] - offsets[dim] : draw(1, global[dim] - offsets[dim]);
      strides[dim] = draw(0, 40);
    }
    if (draw(0, 1)) strides = core::row_major_strides(sizes);
    const Sizes keys = core::row_major_strides(global);
    const int64_t first = dot(offsets, keys);
    const BoxWalk<2> walk(sizes, first, keys, {1000, 5}, {strides, keys});
    std::map<int64_t, int64_t> places;
    visit_elements(sizes, [&](const Sizes& at) { places[first + dot(at, keys)] = 1000 + dot(at, strides); });
    ASSERT_EQ(walk.first_key(), places.begin()->first);
    ASSERT_EQ(walk.last_key(), places.rbegin()->first);
    ASSERT_EQ(walk.last_places()[0], places.rbegin()->second);

    std::vector<int64_t> numbers;
    walk.append_numbers(numbers);
    ASSERT_EQ(static_cast<int64_t>(numbers.size()), numbers_of_box<2>(numbers.data()));
    for (int64_t key = -1; key <= core::num_elements(global); ++key) {
      const auto run = walk.seek(key);
      const auto next = places.lower_bound(key);
      int64_t found[2];
      ASSERT_EQ(find_places<2>(numbers.data(), key, found), places.contains(key));
      if (next == places.end()) {
        ASSERT_EQ(run.begin, core::kNoKey);
        continue;
      }
      if (next->first == key) {
        ASSERT_EQ(found[0], next->second);
        ASSERT_EQ(found[1], 5 + key - first);
      }
      ASSERT_GT(run.end, key);
      ASSERT_LE(run.begin, next->first);
      ASSERT_EQ(std::max(key, run.begin), next->first);
      for (int64_t in_run = run.begin; in_run < run.end; ++in_run) {
        ASSERT_EQ(places.at(in_run), run.places[0] + (in_run - run.begin) * walk.strides()[0]);
      }
    }
  }
}

TEST(ChangeMarks, InstructionSetsAgree) {
  std::vector<const MarkKernel*> kernels{&kBaselineMarks, &mark_kernel()};
  for (const int64_t item_bytes : {1, 2, 4, 8, 16}) {
    for (const int share : {0, 1, 30, 100}) {
      const int64_t num_words = 37, num_bytes = num_words * 64 * item_bytes;
      Bytes left(num_bytes + 1), right;
      for (uint8_t& byte : left) byte = static_cast<uint8_t>(draw(0, 255));
      right = left;
      std::set<uint16_t> differing;
      for (int64_t item = 0; item < num_words * 64; ++item) {
        if (draw(0, 99) >= share) continue;
        right[1 + item * item_bytes + draw(0, item_bytes - 1)] ^= 0x80;
        differing.insert(static_cast<uint16_t>(item));
      }
      for (const MarkKernel* kernel : kernels) {
        std::vector<uint64_t> mask(num_words);
        kernel->mark(reinterpret_cast<char*>(left.data() + 1), reinterpret_cast<char*>(right.data() + 1), item_bytes,
                     num_words, mask.data());
        for (int64_t item = 0; item < num_words * 64; ++item) {
          ASSERT_EQ(mask[item / 64] >> (item % 64) & 1, differing.count(static_cast<uint16_t>(item)));
        }
        ASSERT_EQ(kernel->count(mask.data(), num_words), static_cast<int64_t>(differing.size()));
        std::vector<uint16_t> indices(num_words * 64 + kIndexSlack);
        ASSERT_EQ(kernel->indices(mask.data(), num_words, indices.data()), static_cast<int64_t>(differing.size()));
        ASSERT_TRUE(std::equal(differing.begin(), differing.end(), indices.begin()));
      }
    }
  }
}

// A shard of a tensor of two dims: its boxes stand in a grid, in any order, and each side has strides of its own.
struct Case {
  int64_t item_bytes;
  Sizes global, sizes;
  std::vector<Sizes> offsets, box_sizes, local_offsets;
  Sizes left_strides, right_strides;
  std::vector<uint64_t> left, right;
  bool contiguous;

  explicit Case(bool shuffled) {
    item_bytes = int64_t{1} << draw(0, 4);
    const Sizes grid{draw(1, 3), draw(1, 3)}, box{draw(1, 40), draw(1, 40)};
    global = {grid[0] * (box[0] + 2), grid[1] * (box[1] + 3)};
    sizes = {grid[0] * box[0], grid[1] * box[1]};
    std::vector<int64_t> order(grid[0] * grid[1]);
    for (size_t index = 0; index < order.size(); ++index) order[index] = static_cast<int64_t>(index);
    if (shuffled) std::shuffle(order.begin(), order.end(), random_numbers);
    for (size_t index = 0; index < order.size(); ++index) {
      const int64_t here = static_cast<int64_t>(index), there = order[index];
      local_offsets.push_back({here / grid[1] * box[0], here % grid[1] * box[1]});
      offsets.push_back({there / grid[1] * (box[0] + 2) + 1, there % grid[1] * (box[1] + 3) + 2});
      box_sizes.push_back(box);
    }
    contiguous = draw(0, 1);
    left_strides = right_strides = core::row_major_strides(sizes);
    if (!contiguous) left_strides = {1, sizes[0]};
    if (!contiguous && draw(0, 1)) right_strides = {2 * sizes[1], 1};
    for (std::vector<uint64_t>* side : {&left, &right}) side->resize((2 * num_elements() * item_bytes + 31) / 16 * 2);
    for (uint64_t& word : left) word = random_numbers();
    const int64_t share = draw(0, 2) * 50;
    visit_elements(sizes, [&](const Sizes& at) {
      char* to = reinterpret_cast<char*>(right.data()) + dot(at, right_strides) * item_bytes;
      std::memcpy(to, reinterpret_cast<char*>(left.data()) + dot(at, left_strides) * item_bytes, item_bytes);
      if (draw(0, 99) < share) to[draw(0, item_bytes - 1)] ^= 1;
    });
  }

  int64_t num_elements() const { return core::num_elements(sizes); }
  char* address(std::vector<uint64_t>& side) const { return reinterpret_cast<char*>(side.data()); }

  MarkedPair pair() {
    const auto memory = [&](std::vector<uint64_t>& side, const Sizes& strides) {
      return core::Memory{reinterpret_cast<uintptr_t>(side.data()), sizes, strides, item_bytes};
    };
    return {memory(left, left_strides),
            memory(right, right_strides),
            left_strides == core::row_major_strides(sizes),
            right_strides == core::row_major_strides(sizes),
            num_elements(),
            0};
  }

  Sizes in_bytes(Sizes strides) const {
    for (int64_t& stride : strides) stride *= item_bytes;
    return strides;
  }

  MarkedElements::Chunks chunks_by_index() {
    MarkedElements::Chunks chunks;
    const Sizes keys = core::row_major_strides(sizes), positions = core::row_major_strides(global);
    for (size_t index = 0; index < offsets.size(); ++index) {
      const auto place = [&](std::vector<uint64_t>& side, const Sizes& strides) {
        return reinterpret_cast<int64_t>(side.data()) + dot(local_offsets[index], strides) * item_bytes;
      };
      chunks.emplace_back(
          box_sizes[index], dot(local_offsets[index], keys), keys,
          BoxWalk<3>::Places{place(left, left_strides), place(right, right_strides), dot(offsets[index], positions)},
          std::array<Sizes, 3>{in_bytes(left_strides), in_bytes(right_strides), positions});
    }
    return chunks;
  }

  ListedElements::Chunks chunks_by_position(std::vector<uint64_t>& side, const Sizes& strides) {
    ListedElements::Chunks chunks;
    const Sizes positions = core::row_major_strides(global);
    for (size_t index = 0; index < offsets.size(); ++index) {
      chunks.emplace_back(
          box_sizes[index], dot(offsets[index], positions), positions,
          BoxWalk<1>::Places{reinterpret_cast<int64_t>(side.data()) + dot(local_offsets[index], strides) * item_bytes},
          std::array<Sizes, 1>{in_bytes(strides)});
    }
    return chunks;
  }

  // Position -> bits now and before of the elements that differ.
  std::map<int64_t, std::pair<Bytes, Bytes>> differing() {
    std::map<int64_t, std::pair<Bytes, Bytes>> found;
    const Sizes positions = core::row_major_strides(global);
    for (size_t index = 0; index < offsets.size(); ++index) {
      visit_elements(box_sizes[index], [&](const Sizes& at) {
        const auto bits = [&](std::vector<uint64_t>& side, const Sizes& strides) {
          const char* from = address(side) + (dot(local_offsets[index], strides) + dot(at, strides)) * item_bytes;
          return Bytes(from, from + item_bytes);
        };
        const Bytes now = bits(left, left_strides), before = bits(right, right_strides);
        if (now != before) found[dot(offsets[index], positions) + dot(at, positions)] = {now, before};
      });
    }
    return found;
  }
};

uint64_t hash_of(const Bytes& bits, int64_t position) {
  return with_word(static_cast<int64_t>(bits.size()), [&](auto word) {
    std::memcpy(&word, bits.data(), sizeof(word));
    return core::hash_element(word, static_cast<uint64_t>(position));
  });
}

template <typename Entry>
ChangeTable<Entry> table_of(const ChangeEntries<Entry>& made) {
  return {made.entries.data(), made.numbers.data(), static_cast<int64_t>(made.entries.size())};
}

template <typename Entry, typename Visit>
void visit_threads(const ChangeEntries<Entry>& made, const Visit& visit) {
  for (int64_t tile = 0; tile < made.num_tiles; ++tile) {
    for (uint32_t thread = 0; thread < kTileThreads; ++thread) visit(tile, thread);
  }
}

TEST(Changes, KernelsOfBothDevicesMatchElementByElement) {
  for (int round = 0; round < 300; ++round) {
    Case one(round % 3 == 0), other(round % 3 == 1);
    std::array<Case*, 2> cases{&one, &other};
    std::vector<MarkedPair> pairs{one.pair(), other.pair()};
    pairs[1].first_word = pairs[0].num_words();
    const int64_t num_words = pairs[1].first_word + pairs[1].num_words();

    std::vector<uint64_t> mask(num_words, ~uint64_t{0}), mask_of_tiles = mask;
    int64_t counts[2] = {-1, -1};
    mark_changes_cpu(pairs, mask.data(), counts, parallel_for);
    const ChangeEntries<MarkEntry> marks = make_mark_entries(pairs);
    int64_t counts_of_tiles[2] = {0, 0};
    visit_threads(marks, [&](int64_t tile, uint32_t thread) {
      const int64_t tensor = marks.entries[table_of(marks).entry_of(tile)].tensor;
      counts_of_tiles[tensor] += mark_tile(table_of(marks), mask_of_tiles.data(), tile, thread);
    });
    ASSERT_EQ(mask, mask_of_tiles);
    for (const MarkedPair& pair : pairs) {  // bits behind the last element, of a mask that is not ours
      const int64_t rest = pair.num_elements % kWordElements;
      if (rest > 0 && round % 2 == 0) mask[pair.first_word + pair.num_words() - 1] |= ~uint64_t{0} << rest;
    }

    for (const bool tiles : {false, true}) {
      std::array<std::vector<int64_t>, 2> positions;
      std::array<std::vector<uint64_t>, 2> values;
      uint64_t sums[2][2] = {};
      std::vector<MarkedElements> marked;
      for (size_t index = 0; index < 2; ++index) {
        ASSERT_EQ(counts[index], counts_of_tiles[index]);
        positions[index].resize(counts[index]);
        values[index].resize(counts[index] * 2 + 2);
        marked.push_back({cases[index]->chunks_by_index(), cases[index]->item_bytes,
                          mask.data() + pairs[index].first_word, pairs[index].num_elements, counts[index],
                          positions[index].data(), cases[index]->address(values[index]), &sums[index][0],
                          &sums[index][1]});
      }
      if (tiles) {
        const ChangeEntries<ListEntry> made = make_list_entries(marked);
        std::vector<int64_t> starts(made.num_tiles, 0), parts(kScanThreads);
        visit_threads(made, [&](int64_t tile, uint32_t thread) {
          starts[tile] += static_cast<int64_t>(count_tile(table_of(made), tile, thread));
        });
        for (uint32_t thread = 0; thread < kScanThreads; ++thread) {
          scan_parts(starts.data(), made.num_tiles, thread, parts.data());
        }
        for (uint32_t thread = 0; thread < kScanThreads; ++thread) {
          scan_write(starts.data(), made.num_tiles, thread, parts.data());
        }
        visit_threads(made, [&](int64_t tile, uint32_t thread) {
          const ListSums found = list_tile(table_of(made), starts.data(), tile, thread);
          const ListEntry& entry = made.entries[table_of(made).entry_of(tile)];
          *reinterpret_cast<uint64_t*>(entry.old_sum) += found.before;
          *reinterpret_cast<uint64_t*>(entry.new_sum) += found.now;
        });
        for (const MarkedElements& tensor : marked) {
          if (!keeps_order(tensor.chunks)) sort_list(tensor);
        }
      } else {
        ASSERT_EQ(list_changes_cpu(marked, parallel_for).tensor, -1);
      }

      std::vector<ListedElements> listed;
      std::array<std::vector<uint64_t>, 2> targets{one.right, other.right};
      for (size_t index = 0; index < 2; ++index) {
        Case& of = *cases[index];
        const auto differing = of.differing();
        ASSERT_EQ(counts[index], static_cast<int64_t>(differing.size()));
        uint64_t before = 0, now = 0;
        int64_t at = 0;
        for (const auto& [position, bits] : differing) {
          ASSERT_EQ(positions[index][at], position);
          const char* value = of.address(values[index]) + at * of.item_bytes;
          ASSERT_EQ(Bytes(value, value + of.item_bytes), bits.first);
          now += hash_of(bits.first, position);
          before += hash_of(bits.second, position);
          ++at;
        }
        ASSERT_EQ(sums[index][0], before);
        ASSERT_EQ(sums[index][1], now);
        listed.push_back({of.chunks_by_position(targets[index], of.right_strides), of.item_bytes,
                          core::num_elements(of.global), positions[index].data(), counts[index],
                          of.address(values[index])});
      }
      ASSERT_EQ(find_unordered(listed, parallel_for), -1);
      const ChangeEntries<ListedEntry> made = make_listed_entries(listed);
      uint64_t found[2] = {};
      int64_t held[2] = {};
      if (tiles) {
        visit_threads(made, [&](int64_t tile, uint32_t thread) {
          const FoundSum sum = sum_tile(table_of(made), tile, thread);
          const int64_t tensor = made.entries[table_of(made).entry_of(tile)].tensor;
          found[tensor] += sum.sum;
          held[tensor] += static_cast<int64_t>(sum.found);
        });
        visit_threads(made, [&](int64_t tile, uint32_t thread) { write_tile(table_of(made), tile, thread); });
      } else {
        sum_listed_cpu(listed, found, held, parallel_for);
        write_listed_cpu(listed, parallel_for);
      }
      for (size_t index = 0; index < 2; ++index) {
        ASSERT_EQ(found[index], sums[index][0]);
        ASSERT_EQ(held[index], counts[index]);
        Case& of = *cases[index];
        visit_elements(of.sizes, [&](const Sizes& at) {
          ASSERT_EQ(std::memcmp(of.address(targets[index]) + dot(at, of.right_strides) * of.item_bytes,
                                of.address(of.left) + dot(at, of.left_strides) * of.item_bytes, of.item_bytes),
                    0);
        });
      }
    }
  }
}

TEST(Changes, WrongCountsAndOrdersAreFound) {
  Case of(false);
  of.right = of.left;
  of.right_strides = of.left_strides;
  of.right[0] ^= 1;
  const MarkedPair pair = of.pair();
  std::vector<uint64_t> mask(pair.num_words());
  int64_t count = 0;
  mark_changes_cpu({&pair, 1}, mask.data(), &count, parallel_for);
  ASSERT_EQ(count, 1);
  uint64_t sums[2];
  MarkedElements marked{
      of.chunks_by_index(), of.item_bytes, mask.data(), pair.num_elements, 2, nullptr, nullptr, &sums[0], &sums[1]};
  const WrongCount wrong = list_changes_cpu({&marked, 1}, parallel_for);
  EXPECT_EQ(wrong.tensor, 0);
  EXPECT_EQ(wrong.marked, 1);
  for (const auto& positions : {std::vector<int64_t>{1, 1}, {3, 2}, {-1, 2}, {2, 9}}) {
    std::vector<ListedElements> listed{{{}, 1, 9, nullptr, 0}, {{}, 1, 9, positions.data(), 2}};
    EXPECT_EQ(find_unordered(listed, parallel_for), 1);
  }
}

}  // namespace
}  // namespace torchtitan_ext::ops
