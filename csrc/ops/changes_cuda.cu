// Launches the tiles of change_tiles.h. The tables lie in the memory of the device, since a tensor may have any number of
// boxes: one copy from the host for each call.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/change_tables.h"
#include "ops/cuda_block.h"
#include "ops/cuda_launch.h"

namespace torchtitan_ext::ops {
namespace {

// Memory of the device for one call, from torch's allocator: given back, it is used again by the same stream only.
class Scratch {
 public:
  Scratch(int64_t num_bytes, int32_t device_index) {
    const int64_t size = num_bytes, stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                                                    aoti_torch_device_type_cuda(), device_index, &handle));
    tensor_ = torch::stable::Tensor(handle);
  }
  template <typename Item>
  Item* data() const {
    return static_cast<Item*>(tensor_.mutable_data_ptr());
  }

 private:
  torch::stable::Tensor tensor_;
};

// Entries and numbers on the device.
template <typename Entry>
class DeviceTable {
 public:
  DeviceTable(const ChangeEntries<Entry>& made, int32_t device_index, cudaStream_t stream)
      : scratch_(num_bytes(made), device_index) {
    const size_t entry_bytes = made.entries.size() * sizeof(Entry);
    std::vector<char> bytes(num_bytes(made));
    std::memcpy(bytes.data(), made.entries.data(), entry_bytes);
    if (!made.numbers.empty()) std::memcpy(bytes.data() + entry_bytes, made.numbers.data(), bytes.size() - entry_bytes);
    // From pageable memory: CUDA has taken the bytes when the call returns.
    check_cuda(cudaMemcpyAsync(scratch_.data<char>(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream),
               "changes");
    table.entries = scratch_.data<Entry>();
    table.numbers = reinterpret_cast<const int64_t*>(scratch_.data<char>() + entry_bytes);
    table.count = static_cast<int64_t>(made.entries.size());
  }

  ChangeTable<Entry> table;

 private:
  static int64_t num_bytes(const ChangeEntries<Entry>& made) {
    return static_cast<int64_t>(made.entries.size() * sizeof(Entry) + made.numbers.size() * sizeof(int64_t));
  }

  Scratch scratch_;
};

__device__ void add_to(uint64_t* sum, uint64_t more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(more));
}

// Grid of all: one block per tile. Neighbouring threads read neighbouring bytes of tensors, masks and lists; what they read
// and write at positions is scattered. One atomic addition per block and sum.
__global__ void __launch_bounds__(kTileThreads)
    mark_tiles(const ChangeTable<MarkEntry> table, uint64_t* mask, uint64_t* counts) {
  __shared__ unsigned long long warp_sums[kTileWarps];
  CudaBlock block(warp_sums);
  const uint64_t count = sum_over_block(block, threadIdx.x, mark_tile(table, mask, blockIdx.x, threadIdx.x));
  if (threadIdx.x == 0) add_to(counts + table.entries[table.entry_of(blockIdx.x)].tensor, count);
}

__global__ void __launch_bounds__(kTileThreads) count_tiles(const ChangeTable<ListEntry> table, int64_t* counts) {
  __shared__ unsigned long long warp_sums[kTileWarps];
  CudaBlock block(warp_sums);
  const uint64_t count = sum_over_block(block, threadIdx.x, count_tile(table, blockIdx.x, threadIdx.x));
  if (threadIdx.x == 0) counts[blockIdx.x] = static_cast<int64_t>(count);
}

// One block.
__global__ void __launch_bounds__(kScanThreads) scan_starts(int64_t* numbers, int64_t count) {
  __shared__ int64_t parts[kScanThreads];
  scan_parts(numbers, count, threadIdx.x, parts);
  __syncthreads();
  scan_write(numbers, count, threadIdx.x, parts);
}

__global__ void __launch_bounds__(kTileThreads) list_tiles(const ChangeTable<ListEntry> table, const int64_t* starts) {
  __shared__ unsigned long long before[kTileWarps], now[kTileWarps];
  CudaBlock of_before(before), of_now(now);
  const ListSums sums = list_tile(table, starts, blockIdx.x, threadIdx.x);
  const uint64_t sum_before = sum_over_block(of_before, threadIdx.x, sums.before);
  const uint64_t sum_now = sum_over_block(of_now, threadIdx.x, sums.now);
  if (threadIdx.x != 0) return;
  const ListEntry& entry = table.entries[table.entry_of(blockIdx.x)];
  add_to(reinterpret_cast<uint64_t*>(entry.old_sum), sum_before);
  add_to(reinterpret_cast<uint64_t*>(entry.new_sum), sum_now);
}

__global__ void __launch_bounds__(kTileThreads) write_tiles(const ChangeTable<ListedEntry> table) {
  write_tile(table, blockIdx.x, threadIdx.x);
}

__global__ void __launch_bounds__(kTileThreads)
    sum_tiles(const ChangeTable<ListedEntry> table, uint64_t* sums, uint64_t* counts) {
  __shared__ unsigned long long of_sums[kTileWarps], of_counts[kTileWarps];
  CudaBlock block_of_sums(of_sums), block_of_counts(of_counts);
  const FoundSum found = sum_tile(table, blockIdx.x, threadIdx.x);
  const uint64_t sum = sum_over_block(block_of_sums, threadIdx.x, found.sum);
  const uint64_t count = sum_over_block(block_of_counts, threadIdx.x, found.found);
  if (threadIdx.x != 0) return;
  const ListedEntry& entry = table.entries[table.entry_of(blockIdx.x)];
  add_to(sums + entry.tensor, sum);
  add_to(counts + entry.tensor, count);
}

// A graph would copy the tables again at each replay, from memory that is gone.
void refuse_capture(cudaStream_t stream, const char* where) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), where);
  if (status == cudaStreamCaptureStatusNone) return;
  throw std::invalid_argument(
      std::string(where) +
      ": its tables lie in the host's memory during the call, so it cannot be captured in a CUDA "
      "graph; call it before or after the capture");
}

// With the device current, on torch's stream.
template <typename Launch>
void on_device(int32_t device_index, const char* where, const Launch& launch) {
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const CurrentDevice current(device_index, where);
  const cudaStream_t stream = current_stream(device_index);
  refuse_capture(stream, where);
  launch(stream);
  check_cuda(cudaGetLastError(), where);
}

// Copies the list of a tensor to the host, sorts it there, and copies it back.
void sort_on_host(const MarkedElements& tensor, cudaStream_t stream) {
  const char* where = "changed_elements_";
  std::vector<int64_t> positions(tensor.count);
  std::vector<char> values(tensor.count * tensor.item_bytes);
  const auto copy = [&](void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, num_bytes, kind, stream), where);
  };
  copy(positions.data(), tensor.positions, positions.size() * sizeof(int64_t), cudaMemcpyDeviceToHost);
  copy(values.data(), tensor.values, values.size(), cudaMemcpyDeviceToHost);
  check_cuda(cudaStreamSynchronize(stream), where);
  MarkedElements on_host;
  on_host.item_bytes = tensor.item_bytes;
  on_host.count = tensor.count;
  on_host.positions = positions.data();
  on_host.values = values.data();
  sort_list(on_host);
  copy(tensor.positions, positions.data(), positions.size() * sizeof(int64_t), cudaMemcpyHostToDevice);
  copy(tensor.values, values.data(), values.size(), cudaMemcpyHostToDevice);
  check_cuda(cudaStreamSynchronize(stream), where);
}

}  // namespace

void mark_changes_cuda(std::span<const MarkedPair> pairs, uint64_t* mask, int64_t* counts, int32_t device_index) {
  const ChangeEntries<MarkEntry> made = make_mark_entries(pairs);
  on_device(device_index, "mark_changes", [&](cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(counts, 0, pairs.size() * sizeof(int64_t), stream), "mark_changes");
    if (made.num_tiles == 0) return;
    const DeviceTable<MarkEntry> device(made, device_index, stream);
    mark_tiles<<<made.num_tiles, kTileThreads, 0, stream>>>(device.table, mask, reinterpret_cast<uint64_t*>(counts));
  });
}

void list_changes_cuda(std::span<const MarkedElements> tensors, int32_t device_index) {
  const ChangeEntries<ListEntry> made = make_list_entries(tensors);
  if (made.num_tiles == 0) return;
  on_device(device_index, "changed_elements_", [&](cudaStream_t stream) {
    const DeviceTable<ListEntry> device(made, device_index, stream);
    const Scratch scratch(made.num_tiles * static_cast<int64_t>(sizeof(int64_t)), device_index);
    int64_t* starts = scratch.data<int64_t>();
    count_tiles<<<made.num_tiles, kTileThreads, 0, stream>>>(device.table, starts);
    scan_starts<<<1, kScanThreads, 0, stream>>>(starts, made.num_tiles);
    list_tiles<<<made.num_tiles, kTileThreads, 0, stream>>>(device.table, starts);
    check_cuda(cudaGetLastError(), "changed_elements_");
    for (const MarkedElements& tensor : tensors) {
      if (!keeps_order(tensor.chunks)) sort_on_host(tensor, stream);
    }
  });
}

void write_listed_cuda(std::span<const ListedElements> tensors, int32_t device_index) {
  const ChangeEntries<ListedEntry> made = make_listed_entries(tensors);
  if (made.num_tiles == 0) return;
  on_device(device_index, "apply_changes_", [&](cudaStream_t stream) {
    const DeviceTable<ListedEntry> device(made, device_index, stream);
    write_tiles<<<made.num_tiles, kTileThreads, 0, stream>>>(device.table);
  });
}

void sum_listed_cuda(std::span<const ListedElements> tensors, uint64_t* sums, int64_t* counts, int32_t device_index) {
  const ChangeEntries<ListedEntry> made = make_listed_entries(tensors);
  if (made.num_tiles == 0) return;
  on_device(device_index, "sum_elements", [&](cudaStream_t stream) {
    const DeviceTable<ListedEntry> device(made, device_index, stream);
    sum_tiles<<<made.num_tiles, kTileThreads, 0, stream>>>(device.table, sums, reinterpret_cast<uint64_t*>(counts));
  });
}

}  // namespace torchtitan_ext::ops
