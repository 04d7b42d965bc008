// "late": a device of PyTorch's PrivateUse1 in CPU memory, for tests of what needs an accelerator. `late.py` builds and
// loads it.
//
// It is made to show mistakes that a GPU shows now and then:
//   streams    Each is a thread with a queue. It sleeps before every copy and kernel, so that bytes which nobody waited
//              for are wrong.
//   memory     Addresses of the device cannot be read or written by the host: it would end with a signal. Streams use a
//              second mapping of the same pages. Memory is filled with kFresh when it is made, and with kFreed when it
//              is given back and everything that its stream, and those of record_stream, had to do is done.
//   pinned     Host memory that this file's allocator made. Only copies between it and the device return early.
//   operators  Those of torchtitan_ext run on the current stream, as their CPU kernels; bad arguments raise in the call.
//              All that the device has no kernel for runs on the CPU, between two copies (at::native::cpu_fallback).
// torch.ops.late counts copies and bytes.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace late {
namespace {

constexpr uint8_t kFresh = 0xA5;
constexpr uint8_t kFreed = 0xDD;
constexpr size_t kNumStreams = 16;
constexpr size_t kArenaBytes = size_t{64} << 30;  // of addresses; pages are taken when they are written
constexpr size_t kBlockBytes = 512;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

const c10::Device kDevice(kType, 0);

// How long a stream sleeps before a copy or kernel.
std::atomic<int64_t> delay_microseconds{1500};

// Python's lock is given up while the host waits: what runs on a stream may need it.
class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    static const auto is_held = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto is_running = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (is_running != nullptr && is_running() && is_held()) state_ = save();
  }
  ~WithoutPythonLock() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_ != nullptr) restore(state_);
  }

 private:
  void* state_ = nullptr;
};

// ---- streams and events ----

// Whether streams are held: then one makes its copies and kernels only while somebody waits for it, and nothing that
// nobody waited for is ever there in time.
class Gate {
 public:
  static Gate& instance() {
    static Gate* gate = new Gate();
    return *gate;
  }
  void hold(bool is_held) {
    const std::lock_guard lock(mutex_);
    is_held_ = is_held;
    changed_.notify_all();
  }
  // How many more wait for the stream that has this count.
  void add_waiting(int& num_waiting, int more) {
    const std::lock_guard lock(mutex_);
    num_waiting += more;
    changed_.notify_all();
  }
  void pass(const int& num_waiting) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !is_held_ || num_waiting > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_held_ = false;
};

// A place in the work of a stream, passed once; any number of threads wait for it.
class Mark {
 public:
  explicit Mark(int& num_waiting_for_stream) : num_waiting_for_stream_(num_waiting_for_stream) {}
  void pass() {
    const std::lock_guard lock(mutex_);
    is_passed_ = true;
    // Here, on the stream: it must not go on for those that have got what they waited for.
    Gate::instance().add_waiting(num_waiting_for_stream_, -num_waiting_);
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    if (is_passed_) return;
    ++num_waiting_;
    Gate::instance().add_waiting(num_waiting_for_stream_, 1);
    changed_.wait(lock, [this] { return is_passed_; });
  }
  bool is_passed() {
    const std::lock_guard lock(mutex_);
    return is_passed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int& num_waiting_for_stream_;  // guarded by the gate; streams live as long as the process
  int num_waiting_ = 0;
  bool is_passed_ = false;
};

class Queue {
 public:
  using Work = std::function<void()>;

  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void add(Work work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_one();
  }

  // Work that takes its time, as a copy or a kernel does.
  void add_late(Work work) {
    add([this, work = std::move(work)] {
      Gate::instance().pass(num_waiting_);
      std::this_thread::sleep_for(std::chrono::microseconds(delay_microseconds.load()));
      work();
    });
  }

  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>(num_waiting_);
    add([mark] { mark->pass(); });
    return mark;
  }

  // Raises what work on the stream raised.
  void wait() {
    mark()->wait();
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      Work work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (...) {
        lock.lock();
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::exception_ptr error_;
  int num_waiting_ = 0;  // guarded by the gate
};

// Never destroyed: its thread runs until the process ends.
Queue& queue(c10::StreamId id) {
  static std::array<std::once_flag, kNumStreams> once;
  static std::array<Queue*, kNumStreams> queues{};
  TORCH_CHECK(id >= 0 && id < static_cast<c10::StreamId>(kNumStreams), "late: no stream ", id);
  std::call_once(once[id], [id] { queues[id] = new Queue(); });
  return *queues[id];
}

thread_local c10::StreamId current_stream = 0;

Queue& current_queue() { return queue(current_stream); }

void wait_for(c10::StreamId id) {
  const WithoutPythonLock unlocked;
  queue(id).wait();
}

void wait_for_all() {
  for (size_t id = 0; id < kNumStreams; ++id) wait_for(static_cast<c10::StreamId>(id));
}

// ---- memory of the device ----

class Arena {
 public:
  static Arena& instance() {
    static Arena* arena = new Arena();
    return *arena;
  }

  void* allocate(size_t num_bytes, c10::StreamId stream) {
    const size_t size = (num_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    std::unique_lock lock(mutex_);
    char* block = nullptr;
    const auto found = free_.lower_bound(size);
    if (found != free_.end() && found->first <= 2 * size) {
      block = found->second;
      blocks_[block] = {found->first, num_bytes, stream, {}};
      free_.erase(found);
    } else {
      TORCH_CHECK(end_ + size <= kArenaBytes, "late: out of memory");
      block = device_ + end_;
      end_ += size;
      blocks_[block] = {size, num_bytes, stream, {}};
    }
    used_bytes_ += static_cast<int64_t>(num_bytes);
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    lock.unlock();
    std::memset(alias(block), kFresh, num_bytes);
    return block;
  }

  // The block is ready for others when its streams have done what they had to do at this call.
  void release(void* address) {
    char* block = static_cast<char*>(address);
    std::vector<std::shared_ptr<Mark>> others;
    std::unique_lock lock(mutex_);
    const Block given = blocks_.at(block);
    used_bytes_ -= static_cast<int64_t>(given.used);
    lock.unlock();
    for (const c10::StreamId stream : given.recorded) {
      if (stream != given.stream) others.push_back(queue(stream).mark());
    }
    const auto poison = [this, block, given] {
      std::memset(alias(block), kFreed, given.used);
      const std::lock_guard lock(mutex_);
      blocks_.erase(block);
      free_.emplace(given.size, block);
    };
    if (others.empty()) {
      queue(given.stream).add(poison);
      return;
    }
    // On a thread, since the stream itself must not wait for the others.
    auto own = queue(given.stream).mark();
    std::thread([own, others, poison] {
      own->wait();
      for (const auto& other : others) other->wait();
      poison();
    }).detach();
  }

  void record(void* address, c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    blocks_.at(static_cast<char*>(address)).recorded.insert(stream);
  }

  // Where streams read and write what lies at an address of the device.
  void* alias(const void* address) const {
    if (address == nullptr) return nullptr;
    return host_ + (static_cast<const char*>(address) - device_);
  }

  // Other memory, of whatever bytes, that lies as the device's does.
  void* shadow(const void* address) const {
    if (address == nullptr) return nullptr;
    return shadow_ + (static_cast<const char*>(address) - device_);
  }

  void clear_shadow() { madvise(shadow_, kArenaBytes, MADV_DONTNEED); }

  std::vector<int64_t> used_and_peak_bytes() {
    const std::lock_guard lock(mutex_);
    return {used_bytes_, peak_bytes_};
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_bytes_ = used_bytes_;
  }

 private:
  struct Block {
    size_t size;
    size_t used;
    c10::StreamId stream;
    std::set<c10::StreamId> recorded;
  };

  Arena() {
    const int file = memfd_create("late", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "late: no memory");
    device_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    host_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    shadow_ = static_cast<char*>(
        mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(device_ != MAP_FAILED && host_ != MAP_FAILED && shadow_ != MAP_FAILED, "late: no addresses");
    close(file);
  }

  char* device_ = nullptr;
  char* host_ = nullptr;
  char* shadow_ = nullptr;
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::multimap<size_t, char*> free_;
  size_t end_ = 0;
  int64_t used_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

void release_block(void* block) {
  if (block != nullptr) Arena::instance().release(block);
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* block = num_bytes == 0 ? nullptr : Arena::instance().allocate(num_bytes, current_stream);
    return {block, block, &release_block, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* dst, const void* src, size_t num_bytes) const override {
    Arena& arena = Arena::instance();
    current_queue().add_late(
        [to = arena.alias(dst), from = arena.alias(src), num_bytes] { std::memcpy(to, from, num_bytes); });
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// ---- pinned memory of the host ----

// A block that is given back while copies are under way is freed by the last of them.
class PinnedMemory {
 public:
  static PinnedMemory& instance() {
    static PinnedMemory* memory = new PinnedMemory();
    return *memory;
  }

  void* allocate(size_t num_bytes) {
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 4096, num_bytes) == 0, "late: no pinned memory");
    std::memset(block, kFresh, num_bytes);
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<char*>(block)] = {num_bytes, 0, false};
    return block;
  }

  void release(void* block) {
    const std::lock_guard lock(mutex_);
    blocks_.at(static_cast<char*>(block)).is_given_back = true;
    free_if_unused(static_cast<char*>(block));
  }

  bool contains(const void* address) {
    const std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }

  // The block of the address is in use until the function is called that this returns.
  std::function<void()> use(const void* address) {
    const std::lock_guard lock(mutex_);
    char* block = find(address);
    if (block == nullptr) return [] {};
    ++blocks_.at(block).num_uses;
    return [this, block] {
      const std::lock_guard lock(mutex_);
      --blocks_.at(block).num_uses;
      free_if_unused(block);
    };
  }

 private:
  struct Block {
    size_t num_bytes;
    int64_t num_uses;
    bool is_given_back;
  };

  char* find(const void* address) {
    char* at = static_cast<char*>(const_cast<void*>(address));
    auto behind = blocks_.upper_bound(at);
    if (behind == blocks_.begin()) return nullptr;
    --behind;
    return at < behind->first + behind->second.num_bytes ? behind->first : nullptr;
  }

  void free_if_unused(char* block) {
    const auto found = blocks_.find(block);
    if (!found->second.is_given_back || found->second.num_uses > 0) return;
    std::memset(block, kFreed, found->second.num_bytes);
    blocks_.erase(found);
    free(block);
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
};

void release_pinned(void* block) {
  if (block != nullptr) PinnedMemory::instance().release(block);
}

struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* block = num_bytes == 0 ? nullptr : PinnedMemory::instance().allocate(num_bytes);
    return {block, block, &release_pinned, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* dst, const void* src, size_t num_bytes) const override { std::memcpy(dst, src, num_bytes); }
  bool record_event(void* address, void*, c10::Stream stream) override {
    queue(stream.id()).add(PinnedMemory::instance().use(address));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator pinned_allocator;

// ---- what PyTorch asks of a device ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "late: there is one device"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<size_t> next{0};
    return stream(static_cast<c10::StreamId>(1 + next++ % (kNumStreams - 1)));
  }
  c10::Stream exchangeStream(c10::Stream stream_) const override {
    return stream(std::exchange(current_stream, stream_.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream.id()).mark()->is_passed(); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_all(); }

  // An event is a std::shared_ptr<Mark> on the heap.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<Mark>();
    mark_of(*event) = queue(stream.id()).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    queue(stream.id()).add([mark = mark_of(event)] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return event == nullptr || mark_of(event)->is_passed(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const WithoutPythonLock unlocked;
    mark_of(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Mark>*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) Arena::instance().record(data.get(), stream.id());
  }

 private:
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  static std::shared_ptr<Mark>& mark_of(void* event) { return *static_cast<std::shared_ptr<Mark>*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::instance().contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    at::DataPtr data = device_allocator.allocate(num_bytes);
    const size_t kept = std::min(num_bytes, storage.nbytes());
    if (kept > 0) device_allocator.copy_data(data.mutable_get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(kType, &pinned_allocator);
  return true;
}();

// ---- copies and kernels ----

std::atomic<int64_t> copies_to_host{0};
std::atomic<int64_t> copies_to_device{0};
std::atomic<int64_t> copies_within{0};

at::Tensor tensor_over(void* begin, const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  const c10::Storage shared(c10::Storage::use_byte_size_t{}, storage.nbytes(), at::DataPtr(begin, at::Device(at::kCPU)),
                            nullptr, false);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A CPU tensor over the same memory, for the threads of streams. It owns nothing: as on a GPU, whoever frees memory
// that a stream still uses has made a mistake.
at::Tensor alias_of(const at::Tensor& tensor) {
  const void* begin = tensor.storage().data();
  const bool is_ours = tensor.device().type() == kType;
  return tensor_over(is_ours ? Arena::instance().alias(begin) : const_cast<void*>(begin), tensor);
}

at::Tensor shadow_of(const at::Tensor& tensor) {
  return tensor_over(Arena::instance().shadow(tensor.storage().data()), tensor);
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const bool reads = src.device().type() == kType, writes = dst.device().type() == kType;
  TORCH_CHECK((reads || src.is_cpu()) && (writes || dst.is_cpu()), "late: copies from ", src.device(), " to ",
              dst.device());
  if (dst.numel() == 0) return dst;
  ++(reads && writes ? copies_within : reads ? copies_to_host : copies_to_device);
  const at::Tensor& host = reads ? dst : src;
  const bool is_pinned = !(reads && writes) && PinnedMemory::instance().contains(host.storage().data());
  auto done = is_pinned ? PinnedMemory::instance().use(host.storage().data()) : [] {};
  current_queue().add_late([to = alias_of(dst), from = alias_of(src), done]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
    done();
  });
  if (!(reads && writes) && !(non_blocking && is_pinned)) wait_for(current_stream);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  at::native::resize_(dst, src.sizes(), std::nullopt);
  return copy_from(src, dst, false);
}

at::Tensor& fill(at::Tensor& tensor, const at::Scalar& value) {
  if (tensor.numel() == 0) return tensor;
  current_queue().add_late([to = alias_of(tensor), value]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.fill_(value);
  });
  return tensor;
}

at::Tensor& zero(at::Tensor& tensor) { return fill(tensor, 0); }

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  ++copies_to_host;
  wait_for(current_stream);
  return alias_of(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (tensor.storage().data() != nullptr) {
    Arena::instance().record(tensor.storage().mutable_data(), stream.id());
  }
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor);
  std::vector<int64_t> sizes = parts.at(0).sizes().vec();
  dim = at::maybe_wrap_dim(dim, parts[0].dim());
  sizes[dim] = 0;
  for (const at::Tensor& part : parts) sizes[dim] += part.size(dim);
  at::Tensor whole = at::empty(sizes, parts[0].options());
  int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    whole.narrow(dim, begin, part.size(dim)).copy_(part);
    begin += part.size(dim);
  }
  return whole;
}

// set_.source_Storage: the whole storage as one dim.
at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  const int64_t size = static_cast<int64_t>(source.nbytes()) / static_cast<int64_t>(tensor.dtype().itemsize());
  return tensor.set_(std::move(source), 0, {size}, {1});
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

// Calls visit(tensor) for the tensors of arguments, and puts what it returns in their place.
template <typename Visit>
void replace_tensors(at::ArrayRef<c10::IValue> arguments, torch::jit::Stack& stack, const Visit& visit) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      stack.emplace_back(visit(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> replaced;
      for (const at::Tensor& tensor : argument.toTensorVector()) replaced.push_back(visit(tensor));
      stack.emplace_back(std::move(replaced));
    } else {
      stack.push_back(argument);
    }
  }
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// An operator checks its arguments before it moves the first byte: it is tried in other memory, which lies alike.
void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  for (const c10::IValue& argument : arguments) {
    for (const at::Tensor& tensor : tensors_in(argument)) {
      TORCH_CHECK_VALUE(tensor.device() == kDevice, op.schema().name(), ": tensors are on different devices");
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack shadows;
  replace_tensors(arguments, shadows, shadow_of);
  op.callBoxed(&shadows);
  Arena::instance().clear_shadow();
}

// Operators whose CPU kernels compare what is in their arguments, or exchange it.
const std::set<std::string> kLookAtData{"torchtitan_ext::broadcast_coalesced_"};

// An operator of torchtitan_ext: its CPU kernel runs on the current stream. What it returns is made here, in the
// shapes that its fake kernel says, and filled there.
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const size_t num_returns = op.schema().returns().size();
  torch::jit::Stack arguments(stack->end() - static_cast<int64_t>(num_arguments), stack->end());
  torch::jit::drop(*stack, num_arguments);

  if (!kLookAtData.contains(op.schema().name())) check_arguments(op, arguments);
  std::vector<at::Tensor> results;
  torch::jit::Stack on_cpu;
  replace_tensors(arguments, on_cpu, alias_of);
  if (num_returns > 0) {
    torch::jit::Stack fake;
    replace_tensors(arguments, fake, [](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    });
    op.callBoxed(&fake);
    replace_tensors(fake, *stack, [&](const at::Tensor& tensor) {
      results.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice)));
      return results.back();
    });
  }
  std::vector<at::Tensor> places;
  for (const at::Tensor& result : results) places.push_back(alias_of(result));
  current_queue().add_late([op, on_cpu, places]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(&on_cpu);
    size_t next = 0;
    for (const c10::IValue& value : on_cpu) {
      for (const at::Tensor& tensor : tensors_in(value)) places[next++].copy_(tensor);
    }
  });
}

// An operator that looks at shapes and addresses only.
void run_at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  torch::jit::Stack on_cpu;
  replace_tensors(at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - num_arguments), on_cpu, alias_of);
  torch::jit::drop(*stack, num_arguments);
  op.callBoxed(&on_cpu);
  for (c10::IValue& value : on_cpu) stack->push_back(std::move(value));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", TORCH_FN(at::native::resize_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("fill_.Scalar", fill);
  library.impl("zero_", zero);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("cat", cat);
}

// alias_of passes lazy conjugation and negation on. PyTorch would carry them out first, by a copy like this one.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(torchtitan_ext, PrivateUse1, library) {
  for (const char* name :
       {"pack_shard", "unpack_shard", "unpack_shard_", "pack_shards", "unpack_shards_", "flatten_tensors",
        "flatten_into_", "unflatten_tensors_", "fingerprint_shard", "fingerprint_shards", "broadcast_coalesced_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  }
  library.impl("check_broadcast", torch::CppFunction::makeFromBoxedFunction<&run_at_once>());
}

// How many copies were made since the last call: to the host, to the device, within the device.
std::vector<int64_t> count_copies() {
  return {copies_to_host.exchange(0), copies_to_device.exchange(0), copies_within.exchange(0)};
}

// Bytes of the device in use, and the most since the last call.
std::vector<int64_t> count_bytes() {
  const std::vector<int64_t> bytes = Arena::instance().used_and_peak_bytes();
  Arena::instance().reset_peak();
  return bytes;
}

void set_delay(int64_t microseconds) { delay_microseconds = microseconds; }

void hold(bool is_held) { Gate::instance().hold(is_held); }

TORCH_LIBRARY(late, library) {
  library.def("count_copies() -> int[]", count_copies);
  library.def("count_bytes() -> int[]", count_bytes);
  library.def("set_delay(int microseconds) -> ()", set_delay);
  library.def("hold(bool is_held) -> ()", hold);
}

}  // namespace
}  // namespace late
