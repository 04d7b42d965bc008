#include "storage/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace torchtitan_ext::storage {

void parallel_for_items(int num_threads, int64_t num_items, const std::function<void(int, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&](int worker) {
    try {
      for (int64_t item = next++; item < num_items; item = next++) body(worker, item);
    } catch (...) {
      next = num_items;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const int64_t num_others = std::min<int64_t>(num_threads, num_items) - 1;
  std::vector<std::thread> threads;
  // What grows the vector may throw, and threads that run must be joined first.
  threads.reserve(static_cast<size_t>(std::max<int64_t>(num_others, 0)));
  for (int64_t worker = 1; worker <= num_others; ++worker) {
    try {
      threads.emplace_back(work, static_cast<int>(worker));
    } catch (const std::system_error&) {
      break;
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace torchtitan_ext::storage
