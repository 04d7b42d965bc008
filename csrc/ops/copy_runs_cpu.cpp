#include <algorithm>
#include <cstring>

#include "ops/copy_runs.h"
#include "ops/run_ranges.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torchtitan_ext::ops {
namespace {

using core::Loop;
using core::RunList;

// Below this a second thread costs more than it copies: waking one takes some 10 us, in which one core copies 100 KiB.
constexpr int64_t kGrainBytes = int64_t{256} << 10;
// How runs are copied follows from how many bytes the whole list has, that is from where they lie.
enum class Stores {
  kNear,       // within a core's own caches, for which memcpy is made
  kCached,     // within the cache that cores share: line by line, runs of up to 8 KiB take a tenth less than memcpy
  kStreaming,  // beyond: a plain store first reads the line that it is about to overwrite, these do not
};
constexpr int64_t kCachedBytes = int64_t{1} << 20;
constexpr int64_t kStreamingBytes = int64_t{8} << 20;
// Shorter runs are not worth the fence and the unaligned ends of streaming stores.
constexpr int64_t kStreamingRunBytes = 128;
constexpr int64_t kLineBytes = 64;
// Measured: for runs of 256 B to 32 KiB 4 KiB ahead beat 0.5 to 2 KiB clearly (twice no prefetch) and 8 to 16 KiB
// slightly.
constexpr int64_t kPrefetchBytes = 4096;

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

#if defined(__SSE2__)
template <Stores kStores, int64_t kLines>
inline void copy_lines(char* dst, const char* src, const char* ahead) {
  if constexpr (kStores == Stores::kStreaming) {
    for (int64_t line = 0; line < kLines; ++line) _mm_prefetch(ahead + line * kLineBytes, _MM_HINT_NTA);
  }
  const __m128i* from = reinterpret_cast<const __m128i*>(src);
  __m128i* to = reinterpret_cast<__m128i*>(dst);
#pragma GCC unroll 32
  for (int64_t part = 0; part < kLines * 4; ++part) {
    const __m128i word = _mm_loadu_si128(from + part);
    kStores == Stores::kStreaming ? _mm_stream_si128(to + part, word) : _mm_storeu_si128(to + part, word);
  }
}

// Whole lines: as many at once as there are buffers between a core and the memory, and no loop for the rest. Line by
// line runs of 128 to 512 B take half as long again.
template <Stores kStores>
inline void copy_lines(char* dst, const char* src, int64_t num_bytes, const char* ahead) {
  constexpr int64_t kMostLines = kStores == Stores::kStreaming ? 8 : 4;
  int64_t done = 0;
  const auto copy_next = [&]<int64_t kLines>() {
    copy_lines<kStores, kLines>(dst + done, src + done, ahead + done);
    done += kLines * kLineBytes;
  };
  while (num_bytes - done >= kMostLines * kLineBytes) copy_next.template operator()<kMostLines>();
  if (num_bytes - done >= 4 * kLineBytes) copy_next.template operator()<4>();
  if (num_bytes - done >= 2 * kLineBytes) copy_next.template operator()<2>();
  if (num_bytes - done >= kLineBytes) copy_next.template operator()<1>();
}

inline void copy_cached(char* dst, const char* src, int64_t num_bytes) {
  const int64_t body = num_bytes & -kLineBytes;
  copy_lines<Stores::kCached>(dst, src, body, nullptr);
  if (body < num_bytes) std::memcpy(dst + body, src + body, num_bytes - body);
}

// Copies `num_bytes` and prefetches what comes kPrefetchBytes later: the hardware stops at the end of a short run and
// at the end of a page, and streaming stores leave it little time. What lies behind the run is that much of the run at
// `ahead`. A prefetch of memory that is not there does nothing; this kind leaves the caches to others' data.
inline void copy_streaming(char* dst, const char* src, int64_t num_bytes, const char* ahead) {
  const int64_t head = std::min(num_bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1)));
  if (head > 0) std::memcpy(dst, src, head);
  const int64_t body = (num_bytes - head) & -kLineBytes;
  const int64_t within = std::max<int64_t>(body - kPrefetchBytes, 0);  // up to there it is this run's own
  copy_lines<Stores::kStreaming>(dst + head, src + head, within, src + head + kPrefetchBytes);
  copy_lines<Stores::kStreaming>(dst + head + within, src + head + within, body - within, ahead);
  const int64_t done = head + body;
  if (done < num_bytes) std::memcpy(dst + done, src + done, num_bytes - done);
}

void finish_streaming() { _mm_sfence(); }
#else
void copy_cached(char* dst, const char* src, int64_t num_bytes) { std::memcpy(dst, src, num_bytes); }
void copy_streaming(char* dst, const char* src, int64_t num_bytes, const char*) { std::memcpy(dst, src, num_bytes); }
void finish_streaming() {}
#endif

// A copy of constant size compiles to one or two moves instead of a call.
template <size_t kBytes>
struct CopyBytes {
  void operator()(char* dst, const char* src) const { std::memcpy(dst, src, kBytes); }
};

template <typename Copy>
void copy_strided(char* dst, const char* src, const Loop& loop, const Copy& copy) {
  for (int64_t index = 0; index < loop.count; ++index) {
    copy(dst, src);
    dst += loop.dst_stride_bytes;
    src += loop.src_stride_bytes;
  }
}

void copy_strided(char* dst, const char* src, const Loop& loop, int64_t run_bytes, Stores stores) {
  switch (run_bytes) {
    case 1:
      return copy_strided(dst, src, loop, CopyBytes<1>());
    case 2:
      return copy_strided(dst, src, loop, CopyBytes<2>());
    case 4:
      return copy_strided(dst, src, loop, CopyBytes<4>());
    case 8:
      return copy_strided(dst, src, loop, CopyBytes<8>());
    case 16:
      return copy_strided(dst, src, loop, CopyBytes<16>());
    case 32:
      return copy_strided(dst, src, loop, CopyBytes<32>());
    case 64:
      return copy_strided(dst, src, loop, CopyBytes<64>());
    default:
      break;
  }
  if (stores == Stores::kStreaming && run_bytes >= kStreamingRunBytes) {
    const int64_t ahead_bytes = std::max<int64_t>(kPrefetchBytes / run_bytes, 1) * loop.src_stride_bytes;
    copy_strided(dst, src, loop, [=](char* to, const char* from) {
      copy_streaming(to, from, run_bytes, pointer(reinterpret_cast<uintptr_t>(from) + ahead_bytes));
    });
  } else if (stores == Stores::kCached) {
    copy_strided(dst, src, loop, [=](char* to, const char* from) { copy_cached(to, from, run_bytes); });
  } else {
    copy_strided(dst, src, loop, [=](char* to, const char* from) { std::memcpy(to, from, run_bytes); });
  }
}

}  // namespace

void copy_runs_cpu(const RunList& runs, uintptr_t src, uintptr_t dst, ParallelFor parallel_for) {
  const int64_t num_bytes = runs.num_bytes();
  if (num_bytes <= kGrainBytes) {
    RunRanges::visit_all(runs, [=](int64_t from, int64_t to, const Loop& loop, int64_t run_bytes) {
      copy_strided(pointer(dst + to), pointer(src + from), loop, run_bytes, Stores::kNear);
    });
    return;
  }
  struct Task {
    RunRanges ranges;
    uintptr_t src, dst;
    Stores stores;
  };
  const Stores stores = num_bytes >= kStreamingBytes ? Stores::kStreaming
                        : num_bytes >= kCachedBytes  ? Stores::kCached
                                                     : Stores::kNear;
  Task task{RunRanges(runs), src, dst, stores};
  const auto body = [](int64_t first, int64_t last, void* context) {
    const Task& task = *static_cast<const Task*>(context);
    task.ranges.visit(first, last, [&](int64_t from, int64_t to, const Loop& loop, int64_t run_bytes) {
      copy_strided(pointer(task.dst + to), pointer(task.src + from), loop, run_bytes, task.stores);
    });
    if (task.stores == Stores::kStreaming) finish_streaming();
  };
  parallel_for(0, num_bytes, kGrainBytes, body, &task);
}

}  // namespace torchtitan_ext::ops
