// Does a set of chunks hold every element of a tensor exactly once?
//
// The mathematics. Let f(p) = (number of chunks that hold element p) - 1, and 0 outside the tensor. The cover is exact
// when f is 0 everywhere. The mixed difference of f, D f(p) = sum over subsets s of the dims of (-1)^|s| f(p - e_s),
// loses nothing (f has finite support), and a box contributes to it only at its 2^d corners, with alternating signs. So
// the cover is exact when the signed corners of all chunks cancel against those of the whole tensor. Of what does not
// cancel, the first point in row-major order is the first element with f != 0: all p - e_s precede p, so there
// D f(p) = f(p). Its sign tells a gap from an overlap.
//
// Sorting the corners makes this O(n 2^d log n) for n chunks; only dims in which some chunk is partial count in d. With
// more than 6 of them, which no mesh in use has, chunks are compared with each other instead (boxes.h) and elements
// counted; then an overlap is told before a gap, wherever it lies.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk.h"

namespace torchtitan_ext::core {

struct CoverDefect {
  enum class Kind { kGap, kOverlap, kOutOfBounds };
  Kind kind = Kind::kGap;
  Sizes element;               // the first element, in row-major order, that is missing or held more than once
  std::vector<size_t> chunks;  // the chunks that hold it (kOverlap), or the chunk that leaves the tensor (kOutOfBounds)
};

// In words that follow "the chunks": "leave out [2, 0]", for an element or chunk.
std::string defect_text(const CoverDefect& defect);

// Nothing when `chunks` hold every element of a tensor of `global_shape` exactly once. Chunks without elements are
// ignored; `local_offsets` are not looked at.
std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> global_shape, std::span<const Chunk> chunks);

}  // namespace torchtitan_ext::core
