#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/list_offsets.h"
#include "ops/change_lists.h"
#include "ops/change_marks.h"
#include "ops/chunk_table.h"
#include "ops/ops.h"
#include "ops/tensor_view.h"

namespace torchtitan_ext::ops {
namespace {

using core::checked_mul;

Subject subject(const char* op, const char* name, size_t index) { return {op, name, static_cast<int64_t>(index)}; }

bool on_cuda(const TensorView& view) { return view.device_type == aoti_torch_device_type_cuda(); }

std::vector<MarkedPair> pairs_of(std::span<const TensorView> left, const TensorList& base, const char* op,
                                 std::vector<TensorView>& right) {
  TTE_CHECK(left.size() == base.size(), op, "got ", left.size(), " tensors and ", base.size(), " to compare them with");
  right = views_of(base, Access::kRead, op, "base");
  check_same_device(left[0], right[0], {op, "new", 0}, {op, "base", 0});
  std::vector<MarkedPair> pairs;
  pairs.reserve(left.size());
  int64_t num_words = 0;
  for (size_t index = 0; index < left.size(); ++index) {
    const Subject left_is = subject(op, "new", index), right_is = subject(op, "base", index);
    check_same_dtype(left[index], right[index], left_is, right_is);
    TTE_CHECK(std::ranges::equal(left[index].sizes, right[index].sizes), op, left_is.text(), " has the shape ",
              core::list_text(left[index].sizes), ", ", right_is.text(), " ", core::list_text(right[index].sizes));
    pairs.push_back({left[index].memory(), right[index].memory(), left[index].contiguous, right[index].contiguous,
                     left[index].num_elements, num_words});
    num_words += pairs.back().num_words();
  }
  return pairs;
}

// A 1-d contiguous tensor of that dtype on the device, with at least so many elements.
TensorView list_view(const Tensor& tensor, Access access, int32_t dtype, int64_t num_elements, const TensorView& on,
                     const Subject& of_on, const Subject& list_is) {
  const TensorView view = view_of(tensor.get(), access, list_is);
  const char* dtype_name = dtype == aoti_torch_dtype_uint8() ? "uint8" : "int64";
  TTE_CHECK(view.dtype == dtype && view.sizes.size() == 1 && view.contiguous, list_is.op, list_is.text(),
            " is not a contiguous ", dtype_name, " tensor of 1 dim");
  TTE_CHECK(view.num_elements >= num_elements, list_is.op, list_is.text(), " has ", view.num_elements,
            " elements, expected at least ", num_elements);
  check_same_device(view, on, list_is, of_on);
  return view;
}

std::vector<int64_t> item_bytes_of(std::span<const TensorView> views) {
  std::vector<int64_t> item_bytes;
  for (const TensorView& view : views) item_bytes.push_back(view.item_bytes);
  return item_bytes;
}

// A shard with its place in a global tensor.
struct PlacedShard {
  std::span<const int64_t> global_sizes;
  std::vector<int64_t> global_strides;
  std::vector<ChunkView> chunks;
  int64_t num_global_elements = 0;

  int64_t position(const ChunkView& chunk) const { return offset_bytes(chunk.offsets, {}, global_strides, 1); }
};

std::vector<PlacedShard> placed_shards(std::span<const TensorView> views, std::span<const int64_t> tables,
                                       const char* op, const char* name) {
  TableReader reader(tables, op);
  std::vector<PlacedShard> shards;
  shards.reserve(views.size());
  std::vector<int64_t> origin;
  for (size_t index = 0; index < views.size(); ++index) {
    const TensorView& view = views[index];
    const TableReader::Entry entry = reader.next(view.sizes.size());
    TTE_CHECK(std::ranges::equal(entry.shard_sizes, view.sizes), op, subject(op, name, index).text(),
              " has another shape than the table says");
    origin.assign(view.sizes.size(), 0);
    PlacedShard shard{entry.of_dims, core::row_major_strides(entry.of_dims),
                      checked_chunks(entry.chunks, entry.of_dims, origin, view.sizes, op, "the global shape"),
                      core::num_elements(entry.of_dims)};
    check_disjoint(shard.chunks, &ChunkView::offsets, op, "global tensor");
    checked_mul(shard.num_global_elements, view.item_bytes);
    shards.push_back(std::move(shard));
  }
  reader.finish();
  return shards;
}

std::vector<int64_t> stride_bytes(const TensorView& view) {
  std::vector<int64_t> strides(view.strides.begin(), view.strides.end());
  for (int64_t& stride : strides) stride *= view.item_bytes;
  return strides;
}

int64_t address_of(const TensorView& view, const ChunkView& chunk) {
  return static_cast<int64_t>(view.address) + offset_bytes(chunk.local_offsets, {}, view.strides, view.item_bytes);
}

MarkedElements::Chunks chunks_by_index(const PlacedShard& shard, const TensorView& left, const TensorView& right) {
  const std::vector<int64_t> local = core::row_major_strides(left.sizes);
  const std::array<std::vector<int64_t>, 3> strides{stride_bytes(left), stride_bytes(right), shard.global_strides};
  MarkedElements::Chunks chunks;
  chunks.reserve(shard.chunks.size());
  for (const ChunkView& chunk : shard.chunks) {
    chunks.emplace_back(
        chunk.sizes, offset_bytes(chunk.local_offsets, {}, local, 1), local,
        core::BoxWalk<3>::Places{address_of(left, chunk), address_of(right, chunk), shard.position(chunk)}, strides);
  }
  return chunks;
}

ListedElements::Chunks chunks_by_position(const PlacedShard& shard, const TensorView& view) {
  const std::array<std::vector<int64_t>, 1> strides{stride_bytes(view)};
  ListedElements::Chunks chunks;
  chunks.reserve(shard.chunks.size());
  for (const ChunkView& chunk : shard.chunks) {
    chunks.emplace_back(chunk.sizes, shard.position(chunk), shard.global_strides,
                        core::BoxWalk<1>::Places{address_of(view, chunk)}, strides);
  }
  return chunks;
}

std::vector<ListedElements> listed_elements(std::span<const TensorView> views, std::span<const PlacedShard> shards,
                                            std::span<const int64_t> counts, const core::ListOffsets& offsets,
                                            const TensorView& positions, const char* op) {
  std::vector<ListedElements> listed;
  listed.reserve(views.size());
  for (size_t index = 0; index < views.size(); ++index) {
    listed.push_back({chunks_by_position(shards[index], views[index]), views[index].item_bytes,
                      shards[index].num_global_elements,
                      reinterpret_cast<const int64_t*>(positions.address) + offsets.elements[index], counts[index]});
  }
  if (!on_cuda(positions)) {
    const int64_t unordered = find_unordered(listed, parallel_for);
    TTE_CHECK(unordered < 0, op, "the positions of tensor ", unordered,
              " do not ascend, or are not inside of its global tensor of ", listed[unordered].num_elements,
              " elements");
  }
  return listed;
}

void check_counts(std::span<const int64_t> counts, size_t num_tensors, const char* op) {
  TTE_CHECK(counts.size() == num_tensors, op, "got ", num_tensors, " tensors and ", counts.size(), " counts");
}

// CUDA kernels read and write whole elements.
void check_aligned(std::span<const TensorView> views, const char* op, const char* name) {
  for (size_t index = 0; index < views.size(); ++index) {
    TTE_CHECK(views[index].address % static_cast<uintptr_t>(views[index].item_bytes) == 0, op,
              subject(op, name, index).text(), " is not aligned to its elements; clone() it first");
  }
}

void check_values_aligned(const TensorView& values, const char* op) {
  TTE_CHECK(values.address % core::kValuesAlignment == 0, op, "values does not begin at a multiple of ",
            core::kValuesAlignment, " bytes; clone() it first");
}

Tensor empty_int64(const TensorView& on, std::vector<int64_t> sizes) {
  return empty_on(on, sizes, aoti_torch_dtype_int64());
}

}  // namespace

std::tuple<Tensor, Tensor> mark_changes(const TensorList& new_tensors, const TensorList& base) {
  const char* op = "mark_changes";
  const std::vector<TensorView> left = views_of(new_tensors, Access::kRead, op, "new");
  std::vector<TensorView> right;
  const std::vector<MarkedPair> pairs = pairs_of(left, base, op, right);
  Tensor mask = empty_int64(left[0], {pairs.back().first_word + pairs.back().num_words()});
  Tensor counts = empty_int64(left[0], {static_cast<int64_t>(pairs.size())});
  uint64_t* words = static_cast<uint64_t*>(mask.mutable_data_ptr());
  int64_t* numbers = static_cast<int64_t*>(counts.mutable_data_ptr());
  if (on_cuda(left[0])) {
    check_aligned(left, op, "new");
    check_aligned(right, op, "base");
    mark_changes_cuda(pairs, words, numbers, left[0].device_index);
  } else {
    mark_changes_cpu(pairs, words, numbers, parallel_for);
  }
  return {std::move(mask), std::move(counts)};
}

Tensor changed_elements_(const TensorList& new_tensors, const TensorList& base, const Ints& tables, const Tensor& mask,
                         const Ints& counts, const Tensor& positions, const Tensor& values) {
  const char* op = "changed_elements_";
  const std::vector<TensorView> left = views_of(new_tensors, Access::kRead, op, "new");
  std::vector<TensorView> right;
  const std::vector<MarkedPair> pairs = pairs_of(left, base, op, right);
  check_counts(counts, left.size(), op);
  const std::vector<PlacedShard> shards = placed_shards(left, tables, op, "new");
  const core::ListOffsets offsets = core::list_offsets(item_bytes_of(left), counts, op);
  const Subject on_is{op, "new", 0};
  const int64_t num_words = pairs.back().first_word + pairs.back().num_words();
  const TensorView mask_view =
      list_view(mask, Access::kRead, aoti_torch_dtype_int64(), num_words, left[0], on_is, {op, "mask"});
  TTE_CHECK(mask_view.num_elements == num_words, op, "mask has ", mask_view.num_elements, " words, the tensors ",
            num_words);
  const std::array<TensorView, 2> written = {list_view(positions, Access::kWrite, aoti_torch_dtype_int64(),
                                                       offsets.elements.back(), left[0], on_is, {op, "positions"}),
                                             list_view(values, Access::kWrite, aoti_torch_dtype_uint8(),
                                                       offsets.value_bytes.back(), left[0], on_is, {op, "values"})};
  std::vector<TensorView> read = left;
  read.insert(read.end(), right.begin(), right.end());
  read.push_back(mask_view);
  check_separate(written, op, "(positions, values)");
  check_separate(written, read, op);

  Tensor sums = empty_int64(left[0], {2, static_cast<int64_t>(left.size())});
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(sums.get()));
  uint64_t* sum = static_cast<uint64_t*>(sums.mutable_data_ptr());
  std::vector<MarkedElements> marked;
  std::vector<size_t> indices;
  for (size_t index = 0; index < left.size(); ++index) {
    if (counts[index] == 0) continue;
    marked.push_back({chunks_by_index(shards[index], left[index], right[index]), left[index].item_bytes,
                      reinterpret_cast<const uint64_t*>(mask_view.address) + pairs[index].first_word,
                      pairs[index].num_elements, counts[index],
                      reinterpret_cast<int64_t*>(written[0].address) + offsets.elements[index],
                      reinterpret_cast<char*>(written[1].address) + offsets.value_bytes[index], sum + index,
                      sum + left.size() + index});
    indices.push_back(index);
  }
  if (on_cuda(left[0])) {
    check_aligned(left, op, "new");
    check_aligned(right, op, "base");
    check_values_aligned(written[1], op);
    list_changes_cuda(marked, left[0].device_index);
    return sums;
  }
  const WrongCount wrong = list_changes_cpu(marked, parallel_for);
  TTE_CHECK(wrong.tensor < 0, op, "counts[", indices[wrong.tensor], "] is ", marked[wrong.tensor].count,
            ", but the mask has ", wrong.marked, " changed elements");
  return sums;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> find_changes(const TensorList& new_tensors, const TensorList& base,
                                                        const Ints& tables, const Ints& limits) {
  const char* op = "find_changes";
  const std::vector<TensorView> left = views_of(new_tensors, Access::kRead, op, "new");
  std::vector<TensorView> right;
  const std::vector<MarkedPair> pairs = pairs_of(left, base, op, right);
  TTE_CHECK(limits.size() == left.size(), op, "got ", left.size(), " tensors and ", limits.size(), " limits");
  const std::vector<PlacedShard> shards = placed_shards(left, tables, op, "new");
  const int64_t num_tensors = static_cast<int64_t>(left.size());
  TensorView host = left[0];
  host.device_type = aoti_torch_device_type_cpu();
  host.device_index = 0;
  Tensor counts = empty_int64(host, {num_tensors});
  int64_t* count = static_cast<int64_t*>(counts.mutable_data_ptr());

  Tensor mask;
  std::vector<FoundElements> found;
  std::vector<ComparedElements> compared;
  if (on_cuda(left[0])) {
    Tensor on_device;
    std::tie(mask, on_device) = mark_changes(new_tensors, base);
    torch::stable::copy_(counts, on_device);
  } else {
    for (size_t index = 0; index < left.size(); ++index) {
      compared.push_back({pairs[index], chunks_by_index(shards[index], left[index], right[index]), limits[index]});
    }
    found = find_changes_cpu(compared, parallel_for);
    for (size_t index = 0; index < found.size(); ++index) count[index] = found[index].count;
  }
  Ints listed(left.size());
  for (size_t index = 0; index < left.size(); ++index) listed[index] = count[index] > limits[index] ? 0 : count[index];
  const core::ListOffsets offsets = core::list_offsets(item_bytes_of(left), listed, op);
  Tensor positions = empty_int64(left[0], {offsets.elements.back()});
  const int64_t num_bytes[] = {offsets.value_bytes.back()};
  Tensor values = empty_on(left[0], num_bytes, aoti_torch_dtype_uint8());
  if (on_cuda(left[0])) {
    Tensor sums = changed_elements_(new_tensors, base, tables, mask, listed, positions, values);
    return {std::move(positions), std::move(values), std::move(counts), std::move(sums)};
  }
  Tensor sums = empty_int64(left[0], {2, num_tensors});
  uint64_t* sum = static_cast<uint64_t*>(sums.mutable_data_ptr());
  for (size_t index = 0; index < left.size(); ++index) {
    sum[index] = found[index].old_sum;
    sum[left.size() + index] = found[index].new_sum;
    if (listed[index] == 0) continue;
    MarkedElements tensor;
    tensor.chunks = std::move(compared[index].chunks);
    tensor.item_bytes = left[index].item_bytes;
    tensor.count = listed[index];
    tensor.positions = static_cast<int64_t*>(positions.mutable_data_ptr()) + offsets.elements[index];
    tensor.values = static_cast<char*>(values.mutable_data_ptr()) + offsets.value_bytes[index];
    gather_found(found[index], tensor);
  }
  return {std::move(positions), std::move(values), std::move(counts), std::move(sums)};
}

std::tuple<Tensor, Tensor> sum_elements(const TensorList& tensors, const Ints& tables, const Tensor& positions,
                                        const Ints& counts) {
  const char* op = "sum_elements";
  const std::vector<TensorView> views = views_of(tensors, Access::kRead, op, "shards");
  check_counts(counts, views.size(), op);
  const std::vector<PlacedShard> shards = placed_shards(views, tables, op, "shards");
  const core::ListOffsets offsets = core::list_offsets(item_bytes_of(views), counts, op);
  const TensorView list = list_view(positions, Access::kRead, aoti_torch_dtype_int64(), offsets.elements.back(),
                                    views[0], {op, "shards", 0}, {op, "positions"});
  Tensor sums = empty_int64(views[0], {static_cast<int64_t>(views.size())});
  Tensor found = empty_int64(views[0], {static_cast<int64_t>(views.size())});
  const std::vector<ListedElements> listed = listed_elements(views, shards, counts, offsets, list, op);
  uint64_t* sum = static_cast<uint64_t*>(sums.mutable_data_ptr());
  int64_t* number = static_cast<int64_t*>(found.mutable_data_ptr());
  if (on_cuda(views[0])) {
    check_aligned(views, op, "shards");
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(sums.get()));
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(found.get()));
    sum_listed_cuda(listed, sum, number, views[0].device_index);
  } else {
    sum_listed_cpu(listed, sum, number, parallel_for);
  }
  return {std::move(sums), std::move(found)};
}

void apply_changes_(const TensorList& tensors, const Ints& tables, const Tensor& positions, const Ints& counts,
                    const Tensor& values) {
  const char* op = "apply_changes_";
  const std::vector<TensorView> views = views_of(tensors, Access::kWrite, op, "shards");
  check_counts(counts, views.size(), op);
  const std::vector<PlacedShard> shards = placed_shards(views, tables, op, "shards");
  const core::ListOffsets offsets = core::list_offsets(item_bytes_of(views), counts, op);
  const Subject on_is{op, "shards", 0};
  const std::array<TensorView, 2> read = {list_view(positions, Access::kRead, aoti_torch_dtype_int64(),
                                                    offsets.elements.back(), views[0], on_is, {op, "positions"}),
                                          list_view(values, Access::kRead, aoti_torch_dtype_uint8(),
                                                    offsets.value_bytes.back(), views[0], on_is, {op, "values"})};
  check_separate(views, op, "shards");
  check_separate(views, read, op);
  std::vector<ListedElements> listed = listed_elements(views, shards, counts, offsets, read[0], op);
  for (size_t index = 0; index < listed.size(); ++index) {
    listed[index].values = reinterpret_cast<const char*>(read[1].address) + offsets.value_bytes[index];
  }
  if (on_cuda(views[0])) {
    check_aligned(views, op, "shards");
    check_values_aligned(read[1], op);
    write_listed_cuda(listed, views[0].device_index);
  } else {
    write_listed_cpu(listed, parallel_for);
  }
}

}  // namespace torchtitan_ext::ops
