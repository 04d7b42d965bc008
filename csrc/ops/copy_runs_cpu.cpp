#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "ops/copy_runs.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torchtitan_ext::ops {
namespace {

using core::Loop;
using core::RunList;
using core::RunNest;

// Below this a second thread costs more than it copies: waking one takes some 10 us, in which one core copies 100 KiB.
constexpr int64_t kGrainBytes = int64_t{256} << 10;
// Beyond the cache a plain store first reads the line that it is about to overwrite; a streaming store does not. Within
// the cache it is the other way round: the line would be thrown out before its reader comes.
constexpr int64_t kStreamingBytes = int64_t{8} << 20;
// Shorter runs are not worth the fence and the unaligned ends of streaming stores.
constexpr int64_t kStreamingRunBytes = 128;
// A run is cut between threads only where both parts stay long.
constexpr int64_t kCutRunBytes = int64_t{64} << 10;
constexpr int64_t kLineBytes = 64;

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

#if defined(__SSE2__)
void copy_streaming(char* dst, const char* src, int64_t num_bytes) {
  const int64_t head = std::min(num_bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1)));
  std::memcpy(dst, src, head);
  dst += head;
  src += head;
  num_bytes -= head;
  for (; num_bytes >= kLineBytes; num_bytes -= kLineBytes, dst += kLineBytes, src += kLineBytes) {
    const __m128i* from = reinterpret_cast<const __m128i*>(src);
    __m128i* to = reinterpret_cast<__m128i*>(dst);
    const __m128i part0 = _mm_loadu_si128(from), part1 = _mm_loadu_si128(from + 1);
    const __m128i part2 = _mm_loadu_si128(from + 2), part3 = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, part0);
    _mm_stream_si128(to + 1, part1);
    _mm_stream_si128(to + 2, part2);
    _mm_stream_si128(to + 3, part3);
  }
  std::memcpy(dst, src, num_bytes);
}

void finish_streaming() { _mm_sfence(); }
#else
void copy_streaming(char* dst, const char* src, int64_t num_bytes) { std::memcpy(dst, src, num_bytes); }

void finish_streaming() {}
#endif

// The innermost loop. A copy of constant size compiles to one or two moves instead of a call.
template <size_t kBytes>
void copy_strided(char* dst, const char* src, const Loop& loop) {
  for (int64_t index = 0; index < loop.count; ++index) {
    std::memcpy(dst, src, kBytes);
    dst += loop.dst_stride_bytes;
    src += loop.src_stride_bytes;
  }
}

void copy_strided(char* dst, const char* src, const Loop& loop, int64_t run_bytes, bool streaming) {
  switch (run_bytes) {
    case 1:
      return copy_strided<1>(dst, src, loop);
    case 2:
      return copy_strided<2>(dst, src, loop);
    case 4:
      return copy_strided<4>(dst, src, loop);
    case 8:
      return copy_strided<8>(dst, src, loop);
    case 16:
      return copy_strided<16>(dst, src, loop);
    case 32:
      return copy_strided<32>(dst, src, loop);
    case 64:
      return copy_strided<64>(dst, src, loop);
    default:
      break;
  }
  for (int64_t index = 0; index < loop.count; ++index) {
    if (streaming) {
      copy_streaming(dst, src, run_bytes);
    } else {
      std::memcpy(dst, src, run_bytes);
    }
    dst += loop.dst_stride_bytes;
    src += loop.src_stride_bytes;
  }
}

// Copies runs [first, last) of a nest, counted in the order of its loops.
void copy_nest(const RunNest& nest, std::span<const Loop> loops, uintptr_t src, uintptr_t dst, int64_t first,
               int64_t last, bool streaming) {
  streaming = streaming && nest.run_bytes >= kStreamingRunBytes;
  src += nest.src_bytes;
  dst += nest.dst_bytes;
  if (loops.empty()) {
    return copy_strided(pointer(dst), pointer(src), Loop{last - first, 0, 0}, nest.run_bytes, streaming);
  }
  const Loop& inner = loops.back();
  while (first < last) {
    // Where the inner loop stands, from the number of the run; a division per inner loop costs nothing beside the loop.
    int64_t rest = first / inner.count;
    const int64_t inner_index = first % inner.count;
    uintptr_t from = src + inner_index * inner.src_stride_bytes;
    uintptr_t to = dst + inner_index * inner.dst_stride_bytes;
    for (size_t index = loops.size() - 1; index-- > 0;) {
      const int64_t position = rest % loops[index].count;
      rest /= loops[index].count;
      from += position * loops[index].src_stride_bytes;
      to += position * loops[index].dst_stride_bytes;
    }
    const int64_t count = std::min(inner.count - inner_index, last - first);
    copy_strided(pointer(to), pointer(from), Loop{count, inner.src_stride_bytes, inner.dst_stride_bytes},
                 nest.run_bytes, streaming);
    first += count;
  }
}

// Copies bytes [first, last) of one long run or of a nest of them, as if its runs lay one behind the other.
void copy_nest_bytes(const RunNest& nest, std::span<const Loop> loops, uintptr_t src, uintptr_t dst, int64_t first,
                     int64_t last, bool streaming) {
  while (first < last) {
    const int64_t run = first / nest.run_bytes;
    const int64_t begin = first % nest.run_bytes;
    const int64_t num_bytes = std::min(nest.run_bytes - begin, last - first);
    const RunNest part{nest.src_bytes + begin, nest.dst_bytes + begin, num_bytes, nest.num_runs, 0, 0};
    copy_nest(part, loops, src, dst, run, run + 1, streaming);
    first += num_bytes;
  }
}

struct Task {
  const RunList& runs;
  uintptr_t src;
  uintptr_t dst;
  std::vector<int64_t> first_byte;  // of each nest, when all their bytes are laid end to end
  bool streaming;

  void operator()(int64_t first, int64_t last) const {
    const std::vector<RunNest>& nests = runs.nests();
    size_t index = std::upper_bound(first_byte.begin(), first_byte.end(), first) - first_byte.begin() - 1;
    for (; index < nests.size() && first_byte[index] < last; ++index) {
      const RunNest& nest = nests[index];
      const int64_t begin = std::max<int64_t>(first - first_byte[index], 0);
      const int64_t end = std::min(last - first_byte[index], nest.run_bytes * nest.num_runs);
      if (nest.run_bytes >= kCutRunBytes) {
        copy_nest_bytes(nest, runs.loops_of(nest), src, dst, begin, end, streaming);
      } else {
        // A run belongs to the thread whose range holds its first byte.
        const int64_t first_run = (begin + nest.run_bytes - 1) / nest.run_bytes;
        const int64_t last_run = (end + nest.run_bytes - 1) / nest.run_bytes;
        copy_nest(nest, runs.loops_of(nest), src, dst, first_run, last_run, streaming);
      }
    }
    if (streaming) finish_streaming();
  }
};

}  // namespace

void copy_runs_cpu(const RunList& runs, uintptr_t src, uintptr_t dst, ParallelFor parallel_for) {
  const int64_t num_bytes = runs.num_bytes();
  if (num_bytes <= kGrainBytes) {
    for (const RunNest& nest : runs.nests()) copy_nest(nest, runs.loops_of(nest), src, dst, 0, nest.num_runs, false);
    return;
  }
  Task task{runs, src, dst, {}, num_bytes >= kStreamingBytes};
  task.first_byte.reserve(runs.nests().size());
  int64_t sum = 0;
  for (const RunNest& nest : runs.nests()) {
    task.first_byte.push_back(sum);
    sum += nest.run_bytes * nest.num_runs;
  }
  const auto body = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Task*>(context))(first, last);
  };
  parallel_for(0, num_bytes, kGrainBytes, body, &task);
}

}  // namespace torchtitan_ext::ops
