#include "core/block_ledger.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

// Neighbours that one rank gets, so that it reads some MiB at a time.
constexpr int64_t kStretch = 8;

// Files are not larger than the largest offset: more blocks than this are no ledger.
constexpr int64_t kMaxBlocks = int64_t{1} << 48;

struct Stretch {
  int64_t first = 0;
  int64_t last = 0;
  BlockState state = BlockState::kUntouched;
};

// Touched and verified blocks, neighbours of one state together.
std::vector<Stretch> stretches_of(const BlockStates& states) {
  std::vector<Stretch> found;
  const auto size = static_cast<int64_t>(states.size());
  for (int64_t first = 0, last = 0; first < size; first = last) {
    const BlockState state = states.at(static_cast<size_t>(first));
    for (last = first + 1; last < size && states.at(static_cast<size_t>(last)) == state;) ++last;
    if (state == BlockState::kTouched || state == BlockState::kVerified) found.push_back({first, last, state});
  }
  return found;
}

// Where a stretch of some rank begins or ends.
struct Edge {
  int64_t block = 0;
  bool is_begin = false;
  BlockState state = BlockState::kUntouched;
  int64_t rank = 0;
};

class Dealer {
 public:
  explicit Dealer(size_t num_ranks) : parts_(num_ranks), num_dealt_(num_ranks, 0) {}

  // Deals out the blocks of one file.
  void deal(const std::string& file, std::vector<Edge> edges) {
    std::ranges::sort(edges, {}, &Edge::block);
    std::set<int64_t> touching;
    int64_t num_verifying = 0;
    for (size_t next = 0; next < edges.size();) {
      const int64_t first = edges[next].block;
      for (; next < edges.size() && edges[next].block == first; ++next) {
        const Edge& edge = edges[next];
        if (edge.state == BlockState::kVerified) {
          num_verifying += edge.is_begin ? 1 : -1;
        } else if (edge.is_begin) {
          touching.insert(edge.rank);
        } else {
          touching.erase(edge.rank);
        }
      }
      if (num_verifying == 0 && !touching.empty()) give(file, first, edges[next].block, touching);
    }
  }

  std::vector<std::vector<BlockRange>> take() { return std::move(parts_); }

 private:
  void give(const std::string& file, int64_t first, int64_t last, const std::set<int64_t>& ranks) {
    while (first < last) {
      const int64_t rank =
          *std::ranges::min_element(ranks, {}, [&](int64_t one) { return num_dealt_[static_cast<size_t>(one)]; });
      const int64_t end = ranks.size() == 1 ? last : std::min(last, first + kStretch);
      std::vector<BlockRange>& part = parts_[static_cast<size_t>(rank)];
      if (!part.empty() && part.back().file == file && part.back().last == first) {
        part.back().last = end;
      } else {
        part.push_back({file, first, end});
      }
      num_dealt_[static_cast<size_t>(rank)] += end - first;
      first = end;
    }
  }

  std::vector<std::vector<BlockRange>> parts_;
  std::vector<int64_t> num_dealt_;
};

}  // namespace

std::shared_ptr<BlockStates> BlockLedger::file(const std::string& name, size_t num_blocks) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<BlockStates>& states = files_[name];
  if (states == nullptr) states = std::make_shared<BlockStates>(num_blocks);
  TTE_CHECK(states->size() == num_blocks, name, "has ", num_blocks, " blocks, and had ", states->size(),
            " before; please report");
  return states;
}

std::map<std::string, std::shared_ptr<BlockStates>> BlockLedger::files() const {
  const std::scoped_lock lock(mutex_);
  return files_;
}

std::vector<BlockRange> BlockLedger::unverified() const {
  std::vector<BlockRange> found;
  for (const auto& [name, states] : files()) {
    for (const Stretch& stretch : stretches_of(*states)) {
      if (stretch.state == BlockState::kTouched) found.push_back({name, stretch.first, stretch.last});
    }
  }
  return found;
}

void BlockLedger::take_part(const std::vector<BlockRange>& part) {
  const auto all = files();
  for (const auto& [name, states] : all) {
    for (size_t block = 0; block < states->size(); ++block) {
      states->replace(block, BlockState::kTouched, BlockState::kElsewhere);
    }
  }
  for (const BlockRange& range : part) {
    const auto found = all.find(range.file);
    const auto size = static_cast<int64_t>(found == all.end() ? 0 : found->second->size());
    TTE_CHECK(range.first >= 0 && range.first <= range.last && range.last <= size, range.file, "has ", size,
              " blocks, got blocks ", range.first, " to ", range.last, " to verify; please report");
    for (int64_t block = range.first; block < range.last; ++block) {
      found->second->replace(static_cast<size_t>(block), BlockState::kElsewhere, BlockState::kTouched);
    }
  }
}

std::string BlockLedger::message(std::string_view copy) const {
  WireWriter writer;
  writer.put_string(copy);
  const auto all = files();
  writer.put(all.size());
  for (const auto& [name, states] : all) {
    const std::vector<Stretch> stretches = stretches_of(*states);
    writer.put_string(name);
    writer.put(stretches.size());
    int64_t at = 0;
    for (const Stretch& stretch : stretches) {
      writer.put(static_cast<uint64_t>(stretch.first - at) * 2 + (stretch.state == BlockState::kVerified ? 1 : 0));
      writer.put(static_cast<uint64_t>(stretch.last - stretch.first));
      at = stretch.last;
    }
  }
  return writer.take();
}

std::vector<std::vector<BlockRange>> deal_blocks(const std::vector<std::string_view>& messages) {
  std::map<std::pair<std::string, std::string>, std::vector<Edge>> edges_of;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    WireReader reader(messages[rank], "ledger of blocks");
    const std::string copy(reader.get_string("copy"));
    const size_t num_files = reader.get_count("files", 2);
    for (size_t file = 0; file < num_files; ++file) {
      std::vector<Edge>& edges = edges_of[{copy, std::string(reader.get_string("file"))}];
      const size_t num_stretches = reader.get_count("stretches", 2);
      int64_t at = 0;
      for (size_t number = 0; number < num_stretches; ++number) {
        const auto coded = static_cast<uint64_t>(reader.get_index("block", 2 * kMaxBlocks));
        const auto length = static_cast<int64_t>(reader.get_index("blocks", kMaxBlocks));
        const BlockState state = coded % 2 == 1 ? BlockState::kVerified : BlockState::kTouched;
        const int64_t first = checked_add(at, static_cast<int64_t>(coded / 2));
        at = checked_add(first, length);
        edges.push_back({first, true, state, static_cast<int64_t>(rank)});
        edges.push_back({at, false, state, static_cast<int64_t>(rank)});
      }
    }
    reader.finish();
  }
  Dealer dealer(messages.size());
  for (auto& [name, edges] : edges_of) dealer.deal(name.second, std::move(edges));
  return dealer.take();
}

}  // namespace torchtitan_ext::core
