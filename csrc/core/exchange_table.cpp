#include "core/exchange_table.h"

#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr const char* kWhere = "table of boxes";

void append_box(std::vector<int64_t>& entries, int64_t peer, int64_t tensor, int64_t dtype,
                std::span<const int64_t> offsets, std::span<const int64_t> sizes) {
  entries.insert(entries.end(), {peer, tensor, dtype, static_cast<int64_t>(sizes.size())});
  entries.insert(entries.end(), offsets.begin(), offsets.end());
  entries.insert(entries.end(), sizes.begin(), sizes.end());
}

}  // namespace

ExchangeTable::ExchangeTable(std::vector<int64_t> entries, const std::vector<Sizes>& shapes)
    : entries_(std::move(entries)) {
  const std::vector<std::span<const int64_t>> views(shapes.begin(), shapes.end());
  boxes_ = read_exchange_boxes(entries_, views, std::numeric_limits<int64_t>::max(), kWhere);
}

std::vector<int64_t> ExchangeTable::entries_of(std::span<const size_t> numbers) const {
  std::vector<int64_t> entries;
  for (const size_t number : numbers) {
    const ExchangeBox& box = boxes_.at(number);
    append_box(entries, box.peer, static_cast<int64_t>(box.tensor), box.dtype, box.offsets, box.sizes);
  }
  return entries;
}

std::vector<int64_t> ExchangeTable::flat_entries(std::span<const int64_t> sizes) const {
  TTE_CHECK(sizes.size() == boxes_.size(), kWhere, "got ", sizes.size(), " sizes for ", boxes_.size(), " boxes");
  std::vector<int64_t> entries;
  int64_t begin = 0;
  for (size_t next = 0; next < boxes_.size();) {
    const int64_t peer = boxes_[next].peer;
    int64_t size = 0;
    for (; next < boxes_.size() && boxes_[next].peer == peer; ++next) size = checked_add(size, sizes[next]);
    if (size > 0) append_box(entries, peer, 0, -1, {&begin, 1}, {&size, 1});
    begin = checked_add(begin, size);
  }
  return entries;
}

ExchangeTable::Distinct ExchangeTable::distinct(std::span<const int64_t> identities) const {
  std::map<std::tuple<int64_t, int64_t, Sizes, Sizes>, size_t> kinds;
  Distinct distinct;
  for (size_t number = 0; number < boxes_.size(); ++number) {
    const ExchangeBox& box = boxes_[number];
    TTE_CHECK(box.tensor < identities.size(), kWhere, "got ", identities.size(), " tensors, expected tensor ",
              box.tensor, " among them");
    const auto [kind, is_new] =
        kinds.try_emplace({identities[box.tensor], box.dtype, Sizes(box.offsets.begin(), box.offsets.end()),
                           Sizes(box.sizes.begin(), box.sizes.end())},
                          kinds.size());
    if (is_new) distinct.firsts.push_back(number);
    distinct.of_boxes.push_back(kind->second);
  }
  return distinct;
}

}  // namespace torchtitan_ext::core
