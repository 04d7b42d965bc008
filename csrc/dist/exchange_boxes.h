// The boxes of one direction of an exchange: what this rank sends, or what it receives.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/exchange_schedule.h"
#include "core/memory.h"
#include "dist/tensor_fault.h"

namespace torchtitan_ext::dist {

constexpr const char* kExchange = "exchange_runs_";

// A box in the memory of its tensor. `dtype` and `num_bytes` are those on the wire.
struct TensorBox {
  const at::Tensor* tensor = nullptr;
  core::Memory memory;
  std::span<const int64_t> offsets;
  at::ScalarType dtype = at::kByte;
  int64_t num_bytes = 0;
  bool is_cast = false;
  bool is_contiguous = false;
};

class ExchangeBoxes {
 public:
  // Checks the tensors and the table, which must outlive this. `first` is the first tensor of the call. Throws what
  // becomes a ValueError.
  ExchangeBoxes(at::TensorList tensors, const at::Tensor& table, const at::Tensor& first, int64_t num_ranks,
                Access access);

  const TensorBox& operator[](size_t index) const { return boxes_[index]; }
  // The other end and the bytes of each box.
  const std::vector<core::PeerBytes>& peer_bytes() const { return peer_bytes_; }
  // Of the tensors.
  const std::vector<core::Memory>& memories() const { return memories_; }
  // The positions [first, last) of the boxes of one rank.
  std::pair<size_t, size_t> range_of(int64_t peer) const;
  // Throws what becomes a ValueError where boxes of one tensor share elements.
  void check_disjoint() const;

 private:
  std::vector<TensorBox> boxes_;
  std::vector<core::PeerBytes> peer_bytes_;
  std::vector<core::Memory> memories_;
};

// Throws what becomes a ValueError where received boxes share elements with each other, or targets share memory with each
// other or with sources.
void check_separate(const ExchangeBoxes& sources, const ExchangeBoxes& targets);

}  // namespace torchtitan_ext::dist
