#include "core/box_changes.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/position_blocks.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

constexpr const char* kWhere = "changes of boxes";
constexpr int64_t kDataAlignment = 8;

static_assert(sizeof(BoxHeader) == BoxChanges::kHeaderNumbers * sizeof(int64_t));

template <size_t kItemBytes>
void gather_items(std::span<const uint8_t> values, std::span<const int64_t> indices, uint8_t* gathered) {
  for (const int64_t index : indices) {
    std::memcpy(gathered, values.data() + static_cast<size_t>(index) * kItemBytes, kItemBytes);
    gathered += kItemBytes;
  }
}

std::vector<uint8_t> gather(std::span<const uint8_t> values, std::span<const int64_t> indices, int64_t item_bytes) {
  std::vector<uint8_t> gathered(indices.size() * static_cast<size_t>(item_bytes));
  switch (item_bytes) {
    case 1:
      gather_items<1>(values, indices, gathered.data());
      break;
    case 2:
      gather_items<2>(values, indices, gathered.data());
      break;
    case 4:
      gather_items<4>(values, indices, gathered.data());
      break;
    case 8:
      gather_items<8>(values, indices, gathered.data());
      break;
    default:
      TTE_CHECK(item_bytes == 16, kWhere, "elements of ", item_bytes, " bytes");
      gather_items<16>(values, indices, gathered.data());
  }
  return gathered;
}

template <typename T>
void append_bytes(std::vector<uint8_t>& data, std::span<const T> items) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(items.data());
  data.insert(data.end(), bytes, bytes + items.size_bytes());
}

// The first items of a message, which is shortened by them.
template <typename T>
std::vector<T> take(std::span<const uint8_t>& data, int64_t count) {
  std::vector<T> items(static_cast<size_t>(count));
  if (count > 0) std::memcpy(items.data(), data.data(), items.size() * sizeof(T));
  data = data.subspan(items.size() * sizeof(T));
  return items;
}

// Where a box of a rank's tensor begins in the global one.
Sizes global_offsets(const ExchangeBox& box, const HeldPart& held) {
  const auto has_box = [&](const Chunk& chunk) {
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      const int64_t begin = box.offsets[dim] - chunk.local_offsets[dim];
      if (begin < 0 || begin + box.sizes[dim] > chunk.sizes[dim]) return false;
    }
    return true;
  };
  const auto chunk = std::ranges::find_if(held.chunks, has_box);
  TTE_CHECK(chunk != held.chunks.end(), kWhere, "the box ", list_text(box.offsets), " ", list_text(box.sizes),
            " of tensor ", box.tensor, " is no part of a chunk");
  Sizes offsets = chunk->offsets;
  for (size_t dim = 0; dim < offsets.size(); ++dim) offsets[dim] += box.offsets[dim] - chunk->local_offsets[dim];
  return offsets;
}

std::string why_no_header(const BoxHeader& header, int64_t num_elements) {
  if (header.num_changed < BoxHeader::kWhole || header.num_changed > num_elements) {
    return concat("it tells of ", header.num_changed, " changed elements of ", num_elements);
  }
  const bool has_data = header.num_changed > 0;
  const int64_t least = has_data ? 1 : 0;
  const int64_t most = has_data ? header.num_changed : 0;
  for (const int64_t count : {header.num_blocks, header.num_offsets}) {
    if (count < least || count > most) {
      return concat("it tells of ", header.num_blocks, " blocks and ", header.num_offsets, " offsets of ",
                    header.num_changed, " changed elements");
    }
  }
  return "";
}

[[noreturn]] void fail(size_t number, const ExchangeBox& box, const std::string& why) {
  throw WireError(concat("changes of box ", number, " from rank ", box.peer, ": ", why));
}

}  // namespace

int64_t BoxHeader::num_bytes(int64_t item_bytes) const {
  if (num_changed <= 0) return 0;
  const int64_t num_bytes = 8 * num_blocks + 2 * num_offsets + checked_mul(item_bytes, num_changed);
  return checked_add(num_bytes, -num_bytes & (kDataAlignment - 1));
}

std::vector<TensorChanges> split_changes(std::span<const int64_t> item_bytes, std::span<const int64_t> counts,
                                         std::span<const int64_t> whole, std::span<const int64_t> positions,
                                         std::span<const uint8_t> values) {
  const ListOffsets begins = list_offsets(item_bytes, counts, kWhere);
  const std::set<int64_t> are_whole(whole.begin(), whole.end());
  std::vector<TensorChanges> changes;
  for (size_t tensor = 0; tensor < counts.size(); ++tensor) {
    const auto count = static_cast<size_t>(counts[tensor]);
    const auto first = static_cast<size_t>(begins.elements[tensor]);
    const auto begin = static_cast<size_t>(begins.value_bytes[tensor]);
    const size_t num_bytes = count * static_cast<size_t>(item_bytes[tensor]);
    TTE_CHECK(first + count <= positions.size(), kWhere, "got ", positions.size(), " positions, too few for tensor ",
              tensor);
    TTE_CHECK(count == 0 || begin + num_bytes <= values.size(), kWhere, "got ", values.size(),
              " bytes, too few for tensor ", tensor);
    changes.push_back({item_bytes[tensor], are_whole.contains(static_cast<int64_t>(tensor)),
                       positions.subspan(first, count),
                       count == 0 ? values.first(0) : values.subspan(begin, num_bytes)});
  }
  return changes;
}

void PackedBoxes::add_compared(std::span<const TensorChanges> found, std::span<const int64_t> old_sums) {
  TTE_CHECK(old_sums.size() == found.size(), kWhere, "got ", old_sums.size(), " sums for ", found.size(), " boxes");
  for (size_t box = 0; box < found.size(); ++box) {
    const TensorChanges& changes = found[box];
    if (changes.is_whole) {
      add_whole(changes.item_bytes, true);
    } else {
      add(changes.positions, changes.values, changes.item_bytes, {.old_sum = old_sums[box]});
    }
  }
}

void PackedBoxes::add_parts(const ExchangeTable& table, std::span<const TensorChanges> found,
                            std::span<const HeldPart> held) {
  TTE_CHECK(held.size() == found.size(), kWhere, "got changes of ", found.size(), " tensors, expected ", held.size());
  for (const ExchangeBox& box : table.boxes()) {
    TTE_CHECK(box.tensor < held.size(), kWhere, "there are none of tensor ", box.tensor);
    const TensorChanges& changes = found[box.tensor];
    if (changes.is_whole) {
      add_whole(changes.item_bytes, false);
      counts_.push_back(0);
      continue;
    }
    const HeldPart& part = held[box.tensor];
    const Sizes offsets = global_offsets(box, part);
    const Selection selection = select_positions(changes.positions, part.global_sizes, offsets, box.sizes);
    add(selection.in_box, gather(changes.values, selection.indices, changes.item_bytes), changes.item_bytes,
        {.has_base = 0});
    positions_.insert(positions_.end(), selection.in_box.begin(), selection.in_box.end());
    counts_.push_back(static_cast<int64_t>(selection.in_box.size()));
  }
}

void PackedBoxes::set_old_sums(std::span<const int64_t> sums) {
  TTE_CHECK(sums.size() == headers_.size(), kWhere, "got ", sums.size(), " sums for ", headers_.size(), " boxes");
  for (size_t box = 0; box < sums.size(); ++box) {
    headers_[box].old_sum = sums[box];
    headers_[box].has_base = 1;
  }
}

std::span<const uint8_t> PackedBoxes::data(size_t box) const {
  const auto num_bytes = static_cast<size_t>(header(box).num_bytes(item_bytes(box)));
  return std::span(data_).subspan(begins_[box], num_bytes);
}

void PackedBoxes::add(std::span<const int64_t> in_box, std::span<const uint8_t> values, int64_t item_bytes,
                      BoxHeader header) {
  const PositionBlocks coded = PositionBlocks::encode(in_box);
  header.num_changed = coded.size();
  header.num_blocks = static_cast<int64_t>(coded.blocks().size() / 2);
  header.num_offsets = static_cast<int64_t>(coded.offsets().size());
  headers_.push_back(header);
  item_bytes_.push_back(item_bytes);
  begins_.push_back(data_.size());
  append_bytes(data_, coded.blocks());
  append_bytes(data_, coded.offsets());
  append_bytes(data_, values);
  data_.resize(begins_.back() + static_cast<size_t>(header.num_bytes(item_bytes)));
}

void PackedBoxes::add_whole(int64_t item_bytes, bool has_base) {
  headers_.push_back({.num_changed = BoxHeader::kWhole, .has_base = has_base ? 1 : 0});
  item_bytes_.push_back(item_bytes);
  begins_.push_back(data_.size());
}

std::vector<int64_t> BoxChanges::headers_table() const {
  return table_->flat_entries(std::vector<int64_t>(table_->boxes().size(), kHeaderNumbers));
}

std::vector<int64_t> BoxChanges::data_table() const { return table_->flat_entries(data_sizes()); }

std::vector<int64_t> BoxChanges::whole_table() const {
  std::vector<size_t> whole;
  for (size_t box = 0; box < headers_.size(); ++box) {
    if (headers_[box].num_changed == BoxHeader::kWhole) whole.push_back(box);
  }
  return table_->entries_of(whole);
}

int64_t BoxChanges::num_data_bytes() const {
  int64_t num_bytes = 0;
  for (const int64_t of_box : data_sizes()) num_bytes = checked_add(num_bytes, of_box);
  return num_bytes;
}

std::map<int64_t, int64_t> BoxChanges::bytes_of_peer() const {
  std::map<int64_t, int64_t> bytes;
  for (size_t number = 0; number < headers_.size(); ++number) {
    const ExchangeBox& box = table_->boxes()[number];
    const bool is_whole = headers_[number].num_changed == BoxHeader::kWhole;
    bytes[box.peer] += is_whole ? checked_mul(num_elements(box.sizes), item_bytes_[number])
                                : headers_[number].num_bytes(item_bytes_[number]);
  }
  return bytes;
}

std::vector<int64_t> BoxChanges::data_sizes() const {
  std::vector<int64_t> sizes;
  for (size_t box = 0; box < headers_.size(); ++box) sizes.push_back(headers_[box].num_bytes(item_bytes_[box]));
  return sizes;
}

OutgoingChanges::OutgoingChanges(std::shared_ptr<const ExchangeTable> table, std::shared_ptr<const PackedBoxes> packed,
                                 std::vector<size_t> packed_as)
    : BoxChanges(std::move(table)), packed_(std::move(packed)), packed_as_(std::move(packed_as)) {
  TTE_CHECK(packed_as_.size() == table_->boxes().size(), kWhere, "got ", packed_as_.size(), " of ",
            table_->boxes().size(), " boxes");
  for (const size_t box : packed_as_) {
    headers_.push_back(packed_->header(box));
    item_bytes_.push_back(packed_->item_bytes(box));
  }
}

void OutgoingChanges::write_headers(std::span<int64_t> numbers) const {
  TTE_CHECK(static_cast<int64_t>(numbers.size()) == num_header_numbers(), kWhere, "headers have ", num_header_numbers(),
            " numbers, got space for ", numbers.size());
  if (!headers_.empty()) std::memcpy(numbers.data(), headers_.data(), numbers.size_bytes());
}

void OutgoingChanges::write_data(std::span<uint8_t> data) const {
  TTE_CHECK(static_cast<int64_t>(data.size()) == num_data_bytes(), kWhere, "data have ", num_data_bytes(),
            " bytes, got space for ", data.size());
  auto next = data.begin();
  for (const size_t box : packed_as_) next = std::ranges::copy(packed_->data(box), next).out;
}

IncomingChanges::IncomingChanges(std::shared_ptr<const ExchangeTable> table, std::span<const int64_t> item_bytes)
    : BoxChanges(std::move(table)) {
  for (const ExchangeBox& box : table_->boxes()) {
    TTE_CHECK(box.tensor < item_bytes.size(), kWhere, "got ", item_bytes.size(), " tensors, expected tensor ",
              box.tensor, " among them");
    item_bytes_.push_back(item_bytes[box.tensor]);
  }
}

void IncomingChanges::take_headers(std::span<const int64_t> numbers) {
  if (static_cast<int64_t>(numbers.size()) != num_header_numbers()) {
    throw WireError(concat("headers of changes: got ", numbers.size(), " numbers, expected ", num_header_numbers()));
  }
  std::vector<BoxHeader> headers(table_->boxes().size());
  if (!headers.empty()) std::memcpy(static_cast<void*>(headers.data()), numbers.data(), numbers.size_bytes());
  for (size_t number = 0; number < headers.size(); ++number) {
    const ExchangeBox& box = table_->boxes()[number];
    const std::string reason = why_no_header(headers[number], num_elements(box.sizes));
    if (!reason.empty()) fail(number, box, reason);
  }
  headers_ = std::move(headers);
}

std::vector<int64_t> IncomingChanges::counts() const {
  std::vector<int64_t> counts;
  for (const BoxHeader& header : headers_) counts.push_back(std::max<int64_t>(0, header.num_changed));
  return counts;
}

ListOffsets IncomingChanges::list_offsets() const { return core::list_offsets(item_bytes_, counts(), kWhere); }

void IncomingChanges::unpack(std::span<const uint8_t> data, std::span<int64_t> positions,
                             std::span<uint8_t> values) const {
  if (static_cast<int64_t>(data.size()) != num_data_bytes()) {
    throw WireError(concat(kWhere, ": got ", data.size(), " bytes, expected ", num_data_bytes()));
  }
  const ListOffsets begins = list_offsets();
  TTE_CHECK(static_cast<int64_t>(positions.size()) == begins.elements.back() &&
                static_cast<int64_t>(values.size()) == begins.value_bytes.back(),
            kWhere, "got space for ", positions.size(), " positions and ", values.size(), " bytes");
  for (size_t number = 0; number < headers_.size(); ++number) {
    const BoxHeader& header = headers_[number];
    if (header.num_changed <= 0) continue;
    const ExchangeBox& box = table_->boxes()[number];
    std::span<const uint8_t> own = data.first(static_cast<size_t>(header.num_bytes(item_bytes_[number])));
    data = data.subspan(own.size());
    std::vector<int32_t> blocks = take<int32_t>(own, 2 * header.num_blocks);
    std::vector<uint16_t> offsets = take<uint16_t>(own, header.num_offsets);
    const auto in_box =
        positions.subspan(static_cast<size_t>(begins.elements[number]), static_cast<size_t>(header.num_changed));
    try {
      PositionBlocks(std::move(blocks), std::move(offsets)).decode(in_box);
    } catch (const std::invalid_argument& error) {
      fail(number, box, error.what());
    }
    if (in_box.back() >= num_elements(box.sizes)) {
      fail(number, box, concat("element ", in_box.back(), " of ", num_elements(box.sizes), " has changed"));
    }
    const auto num_bytes = static_cast<size_t>(header.num_changed * item_bytes_[number]);
    std::ranges::copy(own.first(num_bytes), values.begin() + begins.value_bytes[number]);
  }
}

std::vector<size_t> IncomingChanges::tensors_of_other_base(std::span<const int64_t> sums) const {
  TTE_CHECK(sums.size() == headers_.size(), kWhere, "got ", sums.size(), " sums for ", headers_.size(), " boxes");
  std::vector<size_t> tensors;
  for (size_t box = 0; box < sums.size(); ++box) {
    const BoxHeader& header = headers_[box];
    if (header.num_changed > 0 && header.has_base != 0 && header.old_sum != sums[box]) {
      tensors.push_back(table_->boxes()[box].tensor);
    }
  }
  return tensors;
}

}  // namespace torchtitan_ext::core
