// One side of an exchange between ranks: a table of boxes (exchange_schedule.h), and the tables that are made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk.h"
#include "core/exchange_schedule.h"

namespace torchtitan_ext::core {

class ExchangeTable {
 public:
  // Args:
  //   entries: the table;
  //   shapes: of the rank's tensors.
  // Throws std::invalid_argument for what is no such table.
  ExchangeTable(std::vector<int64_t> entries, const std::vector<Sizes>& shapes);
  // Its boxes are views into it.
  ExchangeTable(const ExchangeTable&) = delete;
  ExchangeTable& operator=(const ExchangeTable&) = delete;

  const std::vector<ExchangeBox>& boxes() const { return boxes_; }

  // The table of some of the boxes, of the same tensors. `numbers` ascend.
  std::vector<int64_t> entries_of(std::span<const size_t> numbers) const;
  // The table of an exchange in which each peer gets, or sends, one range of a flat tensor, which has of each box so many
  // elements as `sizes` says, one box behind the other.
  std::vector<int64_t> flat_entries(std::span<const int64_t> sizes) const;

  // Boxes of the same elements, which travel in the same dtype, count once.
  struct Distinct {
    std::vector<size_t> firsts;    // the first box of each kind
    std::vector<size_t> of_boxes;  // of each box the position of its kind there
  };
  // `identities`: of each tensor a number that equal tensors share.
  Distinct distinct(std::span<const int64_t> identities) const;

 private:
  std::vector<int64_t> entries_;
  std::vector<ExchangeBox> boxes_;
};

}  // namespace torchtitan_ext::core
