// How changes travel over the table of an exchange: of each box only the elements that changed.
//
// Both ends of a box know it by its place in their tables, and an element by its position in the row-major order of the
// box. Three exchanges: of the headers, which say how much of each box follows; of the changed elements; and of the boxes
// that go whole. Per box, in the order of the table,
//
//   headers  five int64: the members of BoxHeader
//   data     blocks (int32) | offsets (uint16) of PositionBlocks | values | zeros up to a multiple of 8 bytes;
//            nothing of a box in which nothing changed, or that goes whole
//
// What arrives is trusted in nothing: it is a WireError before it is read or allocated where it says what cannot be.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk.h"
#include "core/exchange_table.h"
#include "core/list_offsets.h"

namespace torchtitan_ext::core {

struct BoxHeader {
  static constexpr int64_t kWhole = -1;

  int64_t num_changed = 0;  // elements, or kWhole
  int64_t num_blocks = 0;   // of their PositionBlocks
  int64_t num_offsets = 0;
  int64_t old_sum = 0;   // of the hashes of their old bits, at their positions in the box
  int64_t has_base = 1;  // whether `old_sum` is known

  // Of the data of the box.
  int64_t num_bytes(int64_t item_bytes) const;
};

// What changed in one tensor: all of it, or elements at positions in it, which ascend.
struct TensorChanges {
  int64_t item_bytes = 1;
  bool is_whole = false;
  std::span<const int64_t> positions;
  std::span<const uint8_t> values;  // their new bits
};

// Of each tensor its part of what `ops.find_changes` has found. Throws std::invalid_argument where that is not enough.
// Args:
//   whole: the numbers of the tensors that go whole;
//   positions, values: the lists of all tensors (list_offsets.h).
std::vector<TensorChanges> split_changes(std::span<const int64_t> item_bytes, std::span<const int64_t> counts,
                                         std::span<const int64_t> whole, std::span<const int64_t> positions,
                                         std::span<const uint8_t> values);

// What a rank holds of a global tensor.
struct HeldPart {
  Sizes global_sizes;
  std::vector<Chunk> chunks;
};

// Boxes that were packed, one after the other.
class PackedBoxes {
 public:
  // Of boxes that were compared as tensors of their own, with the sums of the hashes of the old bits.
  void add_compared(std::span<const TensorChanges> found, std::span<const int64_t> old_sums);
  // All boxes of a table, whose tensors are these parts of global tensors, as are the positions. The old sums are unknown
  // until `set_old_sums`. Throws std::invalid_argument where a box is no part of a chunk.
  void add_parts(const ExchangeTable& table, std::span<const TensorChanges> found, std::span<const HeldPart> held);

  // Where the elements of `add_parts` lie in their boxes, box after box, and how many each of these has.
  std::span<const int64_t> positions() const { return positions_; }
  const std::vector<int64_t>& counts() const { return counts_; }
  // Of all boxes.
  void set_old_sums(std::span<const int64_t> sums);

  size_t size() const { return headers_.size(); }
  const BoxHeader& header(size_t box) const { return headers_.at(box); }
  int64_t item_bytes(size_t box) const { return item_bytes_.at(box); }
  std::span<const uint8_t> data(size_t box) const;

 private:
  void add(std::span<const int64_t> in_box, std::span<const uint8_t> values, int64_t item_bytes, BoxHeader header);
  void add_whole(int64_t item_bytes, bool has_base);

  std::vector<BoxHeader> headers_;
  std::vector<int64_t> item_bytes_;
  std::vector<size_t> begins_;  // in `data_`
  std::vector<uint8_t> data_;
  std::vector<int64_t> positions_;
  std::vector<int64_t> counts_;
};

// What both directions know of the boxes of a table.
class BoxChanges {
 public:
  static constexpr int64_t kHeaderNumbers = 5;

  // Of the exchanges of headers and of data, each of a flat tensor of so many elements; and of the boxes that go whole.
  std::vector<int64_t> headers_table() const;
  std::vector<int64_t> data_table() const;
  std::vector<int64_t> whole_table() const;
  int64_t num_header_numbers() const { return kHeaderNumbers * static_cast<int64_t>(table_->boxes().size()); }
  int64_t num_data_bytes() const;
  // Of changed elements and whole boxes, to each rank or from it.
  std::map<int64_t, int64_t> bytes_of_peer() const;

 protected:
  explicit BoxChanges(std::shared_ptr<const ExchangeTable> table) : table_(std::move(table)) {}
  std::vector<int64_t> data_sizes() const;

  std::shared_ptr<const ExchangeTable> table_;
  std::vector<BoxHeader> headers_;   // per box
  std::vector<int64_t> item_bytes_;  // per box, as it travels
};

class OutgoingChanges : public BoxChanges {
 public:
  // `packed_as` says per box of the table which of the packed ones it is.
  OutgoingChanges(std::shared_ptr<const ExchangeTable> table, std::shared_ptr<const PackedBoxes> packed,
                  std::vector<size_t> packed_as);

  void write_headers(std::span<int64_t> numbers) const;  // num_header_numbers()
  void write_data(std::span<uint8_t> data) const;        // num_data_bytes()

 private:
  std::shared_ptr<const PackedBoxes> packed_;
  std::vector<size_t> packed_as_;
};

class IncomingChanges : public BoxChanges {
 public:
  // `item_bytes`: of each tensor.
  IncomingChanges(std::shared_ptr<const ExchangeTable> table, std::span<const int64_t> item_bytes);

  // What came of the exchange of headers. Throws WireError.
  void take_headers(std::span<const int64_t> numbers);

  // After `take_headers`: of each box how many elements are listed, and where in the lists of all boxes.
  std::vector<int64_t> counts() const;
  ListOffsets list_offsets() const;
  // What came of the exchange of data; fills the lists of positions, in their boxes, and of values. Throws WireError.
  void unpack(std::span<const uint8_t> data, std::span<int64_t> positions, std::span<uint8_t> values) const;

  // The tensors of which a box had other bits than the changes replace, one for each such box. `sums` are those of the
  // hashes that the boxes hold at the positions.
  std::vector<size_t> tensors_of_other_base(std::span<const int64_t> sums) const;
};

}  // namespace torchtitan_ext::core
