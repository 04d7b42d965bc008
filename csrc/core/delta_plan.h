// Which rank writes what into a file of changes (torchtitan_ext/delta): all of each tensor once.
//
// Each rank tells what it holds of tensors, changed or not, as pieces, and what it would write of them, as parts. The
// pieces of a tensor have each element once in one of two ways: the first piece of each list of boxes, where these do not
// overlap, so that a rank may be silent whose boxes another one has; else each replica that was given whole, of which the
// first is written.
//
//   rank  replica  boxes           written: ranks 0 and 1, and the sums of rank 2, in the boxes of rank 0, must be those
//   0     "a"      rows [0, 3)     of rank 0.
//   1     "a"      rows [3, 6)
//   2     "b"      rows [0, 3)     rank 3 is silent
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/chunk.h"
#include "core/sums.h"

namespace torchtitan_ext::core {

using DeltaBox = std::pair<Sizes, Sizes>;   // offsets and sizes in the global tensor
using DeltaSums = std::array<uint64_t, 3>;  // before, of the bits that are replaced, and after

// What a rank tells the coordinator.
class DeltaOffer {
 public:
  struct Piece {
    std::string key;
    int64_t tensor = 0;  // which of the rank's
    std::vector<DeltaBox> boxes;
    std::string replica;
    std::string dtype;
    Sizes shape;  // of the global tensor
    DeltaSums sums{};
  };
  struct Part {
    int64_t tensor = 0;
    SumTable::Box box;  // where it gives all elements of a box
    int64_t num_changed = 0;
    Sizes lengths;  // of the tensors of the file, in their first dim
  };

  // A tensor of the rank: one chunk or several, or one of the boxes that a value states. It is a piece where `before` has
  // a sum of that box; `replaced` and `after` have the same.
  void add_held(const std::string& key, std::vector<DeltaBox> boxes, const SumTable::Box& box, const SumTable& before,
                const SumTable& replaced, const SumTable& after);
  void add_part(Part part) { parts_.push_back(std::move(part)); }
  // A key of the state that other ranks hold.
  void add_elsewhere(std::string key) { elsewhere_.push_back(std::move(key)); }

  const std::vector<Piece>& pieces() const { return pieces_; }
  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<std::string>& elsewhere() const { return elsewhere_; }

  // `decode` throws WireError.
  std::string encode() const;
  static DeltaOffer decode(std::string_view bytes);

 private:
  int64_t num_held_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Part> parts_;
  std::vector<std::string> elsewhere_;
};

struct DeltaPlan {
  // Of one tensor, over all ranks.
  struct Total {
    std::string key;
    std::string dtype;
    Sizes shape;
    int64_t count = 0;  // elements that the file has new bits for
    DeltaSums sums{};
    std::vector<SumTable::Box> boxes;  // of each part
  };
  struct Write {
    size_t rank = 0;
    size_t part = 0;  // which of the rank's
    std::string key;
    size_t number = 0;  // among the parts of that tensor
    SumTable::Box box;
    Sizes lengths;
  };
  // Why a tensor is not written. Where pieces are missing `ranks` are those that gave some, and `detail` goes on from
  // "the chunks"; else it is the sentence.
  struct Fault {
    const char* kind;  // a ProblemKind of torchtitan_ext/errors.py
    std::string key;
    std::string detail;
    std::vector<size_t> ranks;
  };

  std::vector<std::string> keys;     // that some rank holds
  std::vector<std::string> nowhere;  // that ranks know, and none gave
  std::vector<Fault> faults;
  std::vector<Total> totals;  // of the tensors without faults
  std::vector<Write> writes;
};

// `offers` are those of all ranks; `dtypes` those that files have, by name.
DeltaPlan plan_delta(const std::vector<const DeltaOffer*>& offers, const std::vector<std::string>& dtypes);

}  // namespace torchtitan_ext::core
