// Transforms: which tensors of a checkpoint become which tensors of a state, by rules over patterns of names.
//
// A rule takes tensors by their names, passes them through steps, and gives out tensors by names. Its stars stand for the
// same texts in all of its patterns, and the rule is followed for each choice of texts; a "#" stands for 0, 1, 2, ...: a
// *series*. Steps work on a list of members, each a tensor or a series:
//
//     from  experts.#.w1, experts.#.w3     members: series of w1, series of w3
//     stack along dim 0                    each series becomes one tensor: w1, w3
//     concat along dim 1                   no series is left, so the members become one tensor
//     to    experts.w13
//
// A stage is a list of rules and the names that it drops. Stages follow each other: tensors that one gives out are those
// that the next one takes. `resolve` gives the map of each tensor of the last stage over the tensors of the checkpoint, and
// proves it: each element of each target, and of its scales, comes from one element; each element of each source goes
// somewhere, or into a tensor that is dropped. Everything that is wrong is a problem that names keys and boxes; nothing has been read so far.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/tensor_map.h"

namespace torchtitan_ext::core {

struct TransformStep {
  enum class Op {
    kConcat,      // dim, sizes of the parts or none
    kConcatEven,  // dim, count in sizes[0], of equal sizes
    kSplit,       // dim, sizes of the parts
    kSplitEven,   // dim, count in sizes[0]
    kStack,       // dim
    kUnstack,     // dim
    kPermute,     // dims in sizes
    kTranspose,   // two dims in sizes
    kReshape,     // shape in sizes
    kSlice,       // dim, begin and end in sizes
    kPlace,       // shape in sizes, an offset per member in offsets
    kPad,         // dim, size in sizes[0], value
    kCrop,        // dim, size in sizes[0]
    kCast,        // dtype
    kDequantize,  // block in sizes, dtype; each member is followed by its scales
  };
  Op op = Op::kConcat;
  int64_t dim = 0;
  Sizes sizes;
  std::vector<Sizes> offsets;
  std::string dtype;
  double value = 0;
};

struct TransformRule {
  std::vector<std::string> from;
  std::vector<std::string> to;
  std::vector<TransformStep> steps;
  bool of_others = false;  // takes only what no rule has taken, these in their order last, and nothing that is dropped
};

struct TransformStage {
  std::vector<TransformRule> rules;
  std::vector<std::string> drop;
};

// What a checkpoint has of a key. Without a dtype it is a value that is no tensor.
struct TransformSource {
  std::string name;
  std::string dtype;
  Sizes shape;
};

// A tensor that a transform gives out, or a value that it passes on.
struct MappedTensor {
  std::string name;
  std::vector<std::string>
      dtypes;  // that of the sources, then those to which elements are cast in turn; empty for a value
  TensorMap values;
  std::optional<TensorMap> scales;  // by which values are multiplied before the first cast
  uint32_t value = 0;               // the source of a value that is no tensor
};

struct TransformProblem {
  std::string key;
  std::string detail;
};

struct ResolvedTransform {
  std::vector<MappedTensor> targets;
  std::vector<TransformProblem> problems;
};

ResolvedTransform resolve(const std::vector<TransformStage>& stages, const std::vector<TransformSource>& sources);

}  // namespace torchtitan_ext::core
