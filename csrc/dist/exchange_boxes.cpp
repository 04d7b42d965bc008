#include "dist/exchange_boxes.h"

#include <algorithm>
#include <set>
#include <span>
#include <string>

#include "core/boxes.h"
#include "core/check.h"

namespace torchtitan_ext::dist {
namespace {

using core::ExchangeBox;
using core::Memory;

constexpr int64_t kOwnDtype = -1;

std::span<const int64_t> span_of(const at::Tensor& table, const char* name) {
  TORCH_CHECK_VALUE(table.layout() == at::kStrided && table.is_cpu() && table.scalar_type() == at::kLong &&
                        table.dim() == 1 && table.is_contiguous(),
                    kExchange, ": ", name, " is no 1-d contiguous int64 tensor on the CPU");
  return {table.const_data_ptr<int64_t>(), static_cast<size_t>(table.numel())};
}

Memory memory_of(const at::Tensor& tensor, Access access) {
  // The form for writing gives a copy-on-write tensor memory of its own.
  const void* data = tensor.numel() == 0        ? nullptr
                     : access == Access::kWrite ? tensor.mutable_data_ptr()
                                                : tensor.const_data_ptr();
  return {reinterpret_cast<uintptr_t>(data), tensor.sizes(), tensor.strides(), tensor.element_size()};
}

bool is_contiguous(const Memory& memory) {
  int64_t expected = 1;
  for (size_t dim = memory.sizes.size(); dim-- > 0;) {
    if (memory.sizes[dim] != 1 && memory.strides[dim] != expected) return false;
    expected *= memory.sizes[dim];
  }
  return true;
}

bool is_plain(int64_t dtype) {
  if (dtype < 0 || dtype >= static_cast<int64_t>(at::ScalarType::NumOptions)) return false;
  const auto type = static_cast<at::ScalarType>(dtype);
  return at::isIntegralType(type, true) || at::isFloatingType(type) || at::isComplexType(type);
}

// What the dtype of a sent box can be: torch must have the conversion. Each pair is tried once, on one element.
class Casts {
 public:
  void check(const at::Tensor& tensor, int64_t dtype, const std::string& where, size_t box) {
    if (!tried_.insert({tensor.scalar_type(), dtype}).second) return;
    TORCH_CHECK_VALUE(is_plain(dtype), where, ": box ", box, " has dtype ", dtype, ", expected -1 or that of elements");
    try {
      at::zeros({1}, tensor.options()).to(static_cast<at::ScalarType>(dtype));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, where, ": box ", box, " cannot be cast: ", error.what_without_backtrace());
    }
  }

 private:
  std::set<std::pair<at::ScalarType, int64_t>> tried_;
};

}  // namespace

ExchangeBoxes::ExchangeBoxes(at::TensorList tensors, const at::Tensor& table, const at::Tensor& first,
                             int64_t num_ranks, Access access) {
  const bool are_sent = access == Access::kRead;
  const char* name = are_sent ? "sources" : "targets";
  std::vector<std::span<const int64_t>> shapes;
  shapes.reserve(tensors.size());
  memories_.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    const std::string fault = fault_of(tensors[index], first, access);
    TORCH_CHECK_VALUE(fault.empty(), kExchange, ": ", name, "[", index, "] ", fault);
    memories_.push_back(memory_of(tensors[index], access));
    shapes.push_back(tensors[index].sizes());
  }
  const char* table_name = are_sent ? "sends" : "receives";
  const std::string where = c10::str(kExchange, ": ", table_name);
  const std::vector<ExchangeBox> boxes =
      core::read_exchange_boxes(span_of(table, table_name), shapes, num_ranks, where);
  boxes_.reserve(boxes.size());
  peer_bytes_.reserve(boxes.size());
  Casts casts;
  for (size_t index = 0; index < boxes.size(); ++index) {
    const ExchangeBox& box = boxes[index];
    const at::Tensor& tensor = tensors[box.tensor];
    TensorBox here{&tensor, memories_[box.tensor], box.offsets, tensor.scalar_type(), 0, false, false};
    if (box.dtype != kOwnDtype && box.dtype != static_cast<int64_t>(tensor.scalar_type())) {
      TORCH_CHECK_VALUE(are_sent, where, ": box ", index, " has dtype ", box.dtype,
                        ", expected -1: only a sender can cast");
      casts.check(tensor, box.dtype, where, index);
      here.dtype = static_cast<at::ScalarType>(box.dtype);
      here.is_cast = true;
    }
    here.memory.sizes = box.sizes;
    int64_t num_elements = 1;
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      num_elements = core::checked_mul(num_elements, box.sizes[dim]);
      here.memory.address += box.offsets[dim] * here.memory.strides[dim] * here.memory.item_bytes;
    }
    here.num_bytes = core::checked_mul(num_elements, static_cast<int64_t>(c10::elementSize(here.dtype)));
    here.is_contiguous = is_contiguous(here.memory);
    boxes_.push_back(here);
    peer_bytes_.push_back({box.peer, here.num_bytes});
  }
}

std::pair<size_t, size_t> ExchangeBoxes::range_of(int64_t peer) const {
  const auto range = std::ranges::equal_range(peer_bytes_, peer, {}, &core::PeerBytes::peer);
  return {range.begin() - peer_bytes_.begin(), range.end() - peer_bytes_.begin()};
}

void ExchangeBoxes::check_disjoint() const {
  std::vector<std::pair<const at::Tensor*, size_t>> by_tensor;
  for (size_t index = 0; index < boxes_.size(); ++index) by_tensor.emplace_back(boxes_[index].tensor, index);
  std::ranges::sort(by_tensor);
  std::vector<core::Box> boxes;
  for (size_t first = 0; first < by_tensor.size();) {
    size_t last = first + 1;
    while (last < by_tensor.size() && by_tensor[last].first == by_tensor[first].first) ++last;
    if (last - first > 1) {
      boxes.clear();
      for (size_t place = first; place < last; ++place) {
        const TensorBox& box = boxes_[by_tensor[place].second];
        boxes.push_back({box.offsets, box.memory.sizes});
      }
      const auto pair = core::find_colliding_pair(boxes);
      TORCH_CHECK_VALUE(!pair, kExchange, ": receives: boxes ", by_tensor[first + pair->first].second, " and ",
                        by_tensor[first + pair->second].second, " share elements");
    }
    first = last;
  }
}

void check_separate(const ExchangeBoxes& sources, const ExchangeBoxes& targets) {
  targets.check_disjoint();
  const auto pair = core::find_shared_memory(targets.memories());
  TORCH_CHECK_VALUE(!pair, kExchange, ": targets[", pair->first, "] and targets[", pair->second,
                    "] share memory and would both be received into");
  const auto both = core::find_shared_memory(targets.memories(), sources.memories());
  TORCH_CHECK_VALUE(!both, kExchange, ": targets[", both->first, "] and sources[", both->second,
                    "] share memory; clone() one of them first");
}

}  // namespace torchtitan_ext::dist
