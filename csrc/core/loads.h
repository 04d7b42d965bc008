// Who of several ranks that can all do a thing does it: the one rule of saves, shared reads and transfers.
//
// A rank that wants something gets it from itself, if it is one of them, else from a rank on its own host. Of those that
// are left it is the one with the fewest bytes so far, then the one whose host has the fewest, then the lowest.
//
//   ranks 0 1 2 3 on hosts a a b b have 5 1 1 9 bytes:   best of all 1 (host a has 6, b has 10),   best for rank 3 is 3
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace torchtitan_ext::core {

// Bytes that each rank, and each host, has to write, to read or to send.
class Loads {
 public:
  // Args:
  //   hosts: per rank the number of its host, counted from 0;
  //   rank_bytes: what each rank has from the start; nothing where it is empty.
  explicit Loads(std::vector<uint32_t> hosts, std::vector<int64_t> rank_bytes = {});

  size_t num_ranks() const { return host_of_.size(); }
  uint32_t host_of(int64_t rank) const { return host_of_[static_cast<size_t>(rank)]; }
  int64_t bytes_of(int64_t rank) const { return rank_bytes_[static_cast<size_t>(rank)]; }
  int64_t bytes_of_host(uint32_t host) const { return host_bytes_[host]; }
  const std::vector<int64_t>& rank_bytes() const { return rank_bytes_; }

  // `num_bytes` is negative where a rank is relieved. Throws std::overflow_error.
  void add(int64_t rank, int64_t num_bytes);

  // The position in `ranks`, which are not none, of the best one; `wanting` is the rank that wants it, or -1. For a rank
  // that wants it they are in increasing order.
  size_t best(std::span<const int64_t> ranks, int64_t wanting = -1) const;

 private:
  std::vector<uint32_t> host_of_;
  std::vector<int64_t> rank_bytes_;
  std::vector<int64_t> host_bytes_;
};

// Gives many things of one size to some ranks, each to the best one, in a time that grows with the logarithm of their
// number. The loads stay as they are.
class Dealer {
 public:
  Dealer(const Loads& loads, std::span<const int64_t> ranks);

  int64_t take(int64_t num_bytes);

 private:
  using Load = std::pair<int64_t, int64_t>;  // bytes, rank
  struct Host {
    int64_t rank_bytes;  // of its best rank
    int64_t num_bytes;
    int64_t rank;
    size_t position;  // in hosts_

    auto operator<=>(const Host&) const = default;
  };
  std::vector<std::vector<Load>> hosts_;  // heaps
  std::vector<Host> best_;                // a heap
};

}  // namespace torchtitan_ext::core
