// Work in equal parts on a few threads.
#pragma once

#include <cstdint>
#include <functional>

namespace torchtitan_ext::storage {

// Calls body(worker, item) for every item of [0, num_items), taken in order by workers [0, num_threads), of which one
// is the calling thread. Where one throws no further item is begun, and the first exception is rethrown when all have
// stopped. Threads that the system refuses are done without; with fewer than one thread the caller
// works alone.
void parallel_for_items(int num_threads, int64_t num_items, const std::function<void(int, int64_t)>& body);

}  // namespace torchtitan_ext::storage
