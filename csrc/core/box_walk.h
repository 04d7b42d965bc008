// The elements of a box in ascending order of their keys, run by run.
//
// A key is the place of an element in the row-major order of a tensor that has the box: its position in the global tensor,
// or its index in the local one. Each element has places elsewhere too, for example an address. A run is a stretch of
// elements with keys one behind the other; their places lie at even distances.
//
// Example: columns [2, 4) of a 3 x 8 tensor, keyed by position, have the runs [2, 4), [10, 12), [18, 20). All columns of
// rows [1, 3) are the one run [8, 24), if their places go on from row to row as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace torchtitan_ext::core {

constexpr int64_t kNoKey = std::numeric_limits<int64_t>::max();

template <size_t kPlaces>
class BoxWalk {
 public:
  using Places = std::array<int64_t, kPlaces>;

  // Keys [begin, end), and the places of the first of them. The next run where `begin` is kNoKey: there is none.
  struct Run {
    int64_t begin = kNoKey;
    int64_t end = kNoKey;
    Places places{};
  };

  // A box without a size 0. `key_strides` are those of a contiguous tensor that has the box; the element at the beginning
  // of the box has `first_key` and `first_places`.
  BoxWalk(std::span<const int64_t> sizes, int64_t first_key, std::span<const int64_t> key_strides,
          const Places& first_places, const std::array<std::vector<int64_t>, kPlaces>& place_strides)
      : first_key_(first_key), first_places_(first_places) {
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      if (sizes[dim] == 1) continue;
      Dim next{sizes[dim], key_strides[dim], {}};
      for (size_t place = 0; place < kPlaces; ++place) next.strides[place] = place_strides[place][dim];
      if (!dims_.empty() && continues(dims_.back(), next)) {
        next.size *= dims_.back().size;  // at most the elements of the tensor
        dims_.back() = next;
      } else {
        dims_.push_back(next);
      }
    }
    if (dims_.empty() || dims_.back().key_stride != 1) dims_.push_back({1, 1, {}});
    inner_ = dims_.back();
    dims_.pop_back();
    last_key_ = first_key_ + inner_.size - 1;
    for (const Dim& dim : dims_) last_key_ += (dim.size - 1) * dim.key_stride;
  }

  // Between places of neighbours in a run.
  const Places& strides() const { return inner_.strides; }
  const Places& first_places() const { return first_places_; }
  Places last_places() const {
    Places last = first_places_;
    const auto move_to_end = [&](const Dim& dim) {
      for (size_t place = 0; place < kPlaces; ++place) last[place] += (dim.size - 1) * dim.strides[place];
    };
    for (const Dim& dim : dims_) move_to_end(dim);
    move_to_end(inner_);
    return last;
  }
  int64_t first_key() const { return first_key_; }
  int64_t last_key() const { return last_key_; }

  // The box as numbers, for kernels that decode single keys (ops/change_tiles.h): first key, number of dims, first places;
  // then size, stride of the key and strides of the places of each dim, the innermost last, whose keys are neighbours.
  void append_numbers(std::vector<int64_t>& numbers) const {
    numbers.insert(numbers.end(), {first_key_, static_cast<int64_t>(dims_.size() + 1)});
    numbers.insert(numbers.end(), first_places_.begin(), first_places_.end());
    const auto append = [&](const Dim& dim) {
      numbers.insert(numbers.end(), {dim.size, dim.key_stride});
      numbers.insert(numbers.end(), dim.strides.begin(), dim.strides.end());
    };
    for (const Dim& dim : dims_) append(dim);
    append(inner_);
  }

  // The first run that ends behind `key`. Coordinates in the box follow from the key by divisions; where one of them is
  // outside of the box, the run is the first of the next outer index.
  Run seek(int64_t key) const {
    if (key > last_key_) return {};
    int64_t rest = key > first_key_ ? key - first_key_ : 0;
    Run run{first_key_, 0, first_places_};
    size_t dim = 0;
    for (; dim < dims_.size(); ++dim) {
      const int64_t index = rest / dims_[dim].key_stride;
      if (index >= dims_[dim].size) break;
      rest -= index * dims_[dim].key_stride;
      move(run, dim, index);
    }
    if (dim < dims_.size() || rest >= inner_.size) carry(run, dim);
    run.end = run.begin + inner_.size;
    return run;
  }

 private:
  struct Dim {
    int64_t size = 1;
    int64_t key_stride = 1;
    Places strides{};
  };

  static bool continues(const Dim& outer, const Dim& inner) {
    if (outer.key_stride != inner.size * inner.key_stride) return false;
    for (size_t place = 0; place < kPlaces; ++place) {
      if (outer.strides[place] != inner.size * inner.strides[place]) return false;
    }
    return true;
  }

  void move(Run& run, size_t dim, int64_t by) const {
    run.begin += by * dims_[dim].key_stride;
    for (size_t place = 0; place < kPlaces; ++place) run.places[place] += by * dims_[dim].strides[place];
  }

  // One more in the dim above the first `num_dims`; dims at their end begin again. There is such a run, for the key is
  // not behind the last one.
  void carry(Run& run, size_t num_dims) const {
    for (size_t dim = num_dims; dim-- > 0;) {
      int64_t rest = run.begin - first_key_;
      for (size_t outer = 0; outer < dim; ++outer) rest %= dims_[outer].key_stride;
      const int64_t index = rest / dims_[dim].key_stride;
      if (index + 1 < dims_[dim].size) return move(run, dim, 1);
      move(run, dim, -index);
    }
  }

  std::vector<Dim> dims_;  // outermost first, without the innermost
  Dim inner_;
  int64_t first_key_ = 0;
  int64_t last_key_ = 0;
  Places first_places_{};
};

}  // namespace torchtitan_ext::core
