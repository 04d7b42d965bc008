#include "core/loads.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>

#include "core/check.h"

namespace torchtitan_ext::core {

Loads::Loads(std::vector<uint32_t> hosts, std::vector<int64_t> rank_bytes)
    : host_of_(std::move(hosts)), rank_bytes_(std::move(rank_bytes)) {
  if (rank_bytes_.empty()) rank_bytes_.assign(host_of_.size(), 0);
  TTE_CHECK(rank_bytes_.size() == host_of_.size(), "Loads", "got bytes of ", rank_bytes_.size(), " ranks, expected ",
            host_of_.size());
  host_bytes_.assign(host_of_.empty() ? 0 : size_t{*std::ranges::max_element(host_of_)} + 1, 0);
  for (size_t rank = 0; rank < host_of_.size(); ++rank) {
    int64_t& of_host = host_bytes_[host_of_[rank]];
    of_host = checked_add(of_host, rank_bytes_[rank]);
  }
}

void Loads::add(int64_t rank, int64_t num_bytes) {
  int64_t& of_rank = rank_bytes_.at(static_cast<size_t>(rank));
  int64_t& of_host = host_bytes_[host_of(rank)];
  of_rank = checked_add(of_rank, num_bytes);
  of_host = checked_add(of_host, num_bytes);
}

size_t Loads::best(std::span<const int64_t> ranks, int64_t wanting) const {
  const auto own = wanting < 0 ? ranks.end() : std::ranges::lower_bound(ranks, wanting);
  if (own != ranks.end() && *own == wanting) return static_cast<size_t>(own - ranks.begin());
  const auto cost = [this, wanting](int64_t rank) {
    const bool is_far = wanting >= 0 && host_of(rank) != host_of(wanting);
    return std::tuple(is_far, bytes_of(rank), bytes_of_host(host_of(rank)), rank);
  };
  return static_cast<size_t>(std::ranges::min_element(ranks, {}, cost) - ranks.begin());
}

Dealer::Dealer(const Loads& loads, std::span<const int64_t> ranks) {
  std::map<uint32_t, std::vector<Load>> of_host;
  for (const int64_t rank : ranks) of_host[loads.host_of(rank)].push_back({loads.bytes_of(rank), rank});
  for (auto& [host, of_ranks] : of_host) {
    std::ranges::sort(of_ranks);
    of_ranks.erase(std::unique(of_ranks.begin(), of_ranks.end()), of_ranks.end());
    best_.push_back({of_ranks.front().first, loads.bytes_of_host(host), of_ranks.front().second, hosts_.size()});
    hosts_.push_back(std::move(of_ranks));
  }
  std::ranges::make_heap(best_, std::greater<>());
}

// Only the host that is taken changes, so all other entries of the heap stay right.
int64_t Dealer::take(int64_t num_bytes) {
  std::ranges::pop_heap(best_, std::greater<>());
  Host& host = best_.back();
  const int64_t taken = host.rank;
  std::vector<Load>& of_ranks = hosts_[host.position];
  std::ranges::pop_heap(of_ranks, std::greater<>());
  of_ranks.back().first = checked_add(of_ranks.back().first, num_bytes);
  std::ranges::push_heap(of_ranks, std::greater<>());
  host.rank_bytes = of_ranks.front().first;
  host.rank = of_ranks.front().second;
  host.num_bytes = checked_add(host.num_bytes, num_bytes);
  std::ranges::push_heap(best_, std::greater<>());
  return taken;
}

}  // namespace torchtitan_ext::core
