#include "core/transform.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/name_pattern.h"

namespace torchtitan_ext::core {
namespace {

using Op = TransformStep::Op;

// A rule has no more tensors at a time. Only a dim of no elements, or beside one, can be cut so often by mistake.
constexpr int64_t kMaxTensors = 1 << 16;

void check_num_tensors(const char* what, int64_t count, size_t num_tensors, size_t dim, const Sizes& shape) {
  TTE_CHECK(count <= kMaxTensors - static_cast<int64_t>(num_tensors), what, "dim ", dim, " of shape ", list_text(shape),
            " would be cut into ", count, " tensors, expected at most ", kMaxTensors, " in all");
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kConcat:
    case Op::kConcatEven:
      return "concat";
    case Op::kSplit:
    case Op::kSplitEven:
      return "split";
    case Op::kStack:
      return "stack";
    case Op::kUnstack:
      return "unstack";
    case Op::kPermute:
      return "permute";
    case Op::kTranspose:
      return "transpose";
    case Op::kReshape:
      return "reshape";
    case Op::kSlice:
      return "slice";
    case Op::kPlace:
      return "place";
    case Op::kPad:
      return "pad";
    case Op::kCrop:
      return "crop";
    case Op::kCast:
      return "cast";
    case Op::kDequantize:
      return "dequantize";
  }
  return "step";
}

// One tensor, or a series of them.
struct Member {
  bool is_series = false;
  std::vector<MappedTensor> tensors;
};

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

std::vector<const TensorMap*> maps_of(const std::vector<MappedTensor>& tensors, bool scales) {
  std::vector<const TensorMap*> maps;
  for (const MappedTensor& tensor : tensors) maps.push_back(scales ? &*tensor.scales : &tensor.values);
  return maps;
}

// Makes one tensor of several: `join` is given their maps.
template <typename Join>
MappedTensor join_tensors(const std::vector<MappedTensor>& tensors, const Join& join) {
  TTE_CHECK(!tensors.empty(), "members", "there is none to join");
  MappedTensor result = tensors.front();
  for (const MappedTensor& other : tensors) {
    TTE_CHECK(other.dtypes == result.dtypes, "dtypes", "got ", joined(result.dtypes), " of ", result.name, " and ",
              joined(other.dtypes), " of ", other.name,
              "; cast them to one dtype first, those of a checkpoint by torchtitan-ext "
              "convert --dtype");
    TTE_CHECK(other.scales.has_value() == result.scales.has_value(), "dequantize", other.name, " and ", result.name,
              " are not both quantised");
  }
  result.values = join(maps_of(tensors, false));
  if (result.scales) result.scales = join(maps_of(tensors, true));
  return result;
}

// The same view of values and of scales.
template <typename View>
MappedTensor view_of(MappedTensor tensor, const View& view) {
  tensor.values = view(tensor.values);
  if (tensor.scales) tensor.scales = view(*tensor.scales);
  return tensor;
}

MappedTensor slice_of(const MappedTensor& tensor, size_t dim, int64_t begin, int64_t end) {
  return view_of(tensor, [&](const TensorMap& map) {
    Sizes offsets(map.shape.size(), 0);
    Sizes sizes = map.shape;
    offsets[dim] = begin;
    sizes[dim] = end - begin;
    return map.sliced(offsets, sizes);
  });
}

class Pipeline {
 public:
  Pipeline(std::vector<Member> members, bool gives_series)
      : members_(std::move(members)), gives_series_(gives_series) {}

  void apply(const TransformStep& step) {
    switch (step.op) {
      case Op::kConcat:
      case Op::kConcatEven:
        return concat(step);
      case Op::kStack:
        return collapse([&](const std::vector<MappedTensor>& tensors) {
          return join_tensors(tensors, [&](const auto& maps) { return TensorMap::stacked(maps, step.dim); });
        });
      case Op::kSplit:
      case Op::kSplitEven:
        return split(step);
      case Op::kUnstack:
        return unstack(step);
      case Op::kPlace:
        return place(step);
      case Op::kDequantize:
        return dequantize(step);
      default:
        break;
    }
    for (Member& member : members_) {
      for (MappedTensor& tensor : member.tensors) tensor = viewed(std::move(tensor), step);
    }
  }

  std::vector<Member> take() { return std::move(members_); }
  // What was cut off on purpose.
  std::vector<MappedTensor> take_dropped() { return std::move(dropped_); }

 private:
  template <typename Join>
  void collapse(const Join& join) {
    const bool has_series = std::ranges::any_of(members_, &Member::is_series);
    if (has_series) {
      for (Member& member : members_) {
        if (member.is_series) member = {false, {join(member.tensors)}};
      }
      return;
    }
    std::vector<MappedTensor> tensors;
    for (Member& member : members_) tensors.push_back(std::move(member.tensors.front()));
    members_ = {{false, {join(tensors)}}};
  }

  void concat(const TransformStep& step) {
    collapse([&](const std::vector<MappedTensor>& tensors) {
      Sizes sizes = step.sizes;
      if (step.op == Op::kConcatEven) {
        TTE_CHECK(step.sizes.front() == static_cast<int64_t>(tensors.size()), "parts", "got ", step.sizes.front(),
                  " for ", tensors.size(), " tensors");
        const Sizes& shape = tensors.front().values.shape;
        sizes.assign(tensors.size(), shape[checked_dim(step.dim, shape.size())]);
      }
      TTE_CHECK(sizes.empty() || sizes.size() == tensors.size(), "sizes", "got ", list_text(sizes), " for ",
                tensors.size(), " tensors");
      for (size_t part = 0; part < sizes.size(); ++part) {
        const Sizes& shape = tensors[part].values.shape;
        TTE_CHECK(shape[checked_dim(step.dim, shape.size())] == sizes[part], "sizes", "expected ", list_text(sizes),
                  " along dim ", step.dim, ", ", tensors[part].name, " has shape ", list_text(shape));
      }
      return join_tensors(tensors, [&](const auto& maps) { return TensorMap::concatenated(maps, step.dim); });
    });
  }

  void split(const TransformStep& step) {
    std::vector<Member> parts;
    size_t num_tensors = 0;
    for (const Member& member : members_) {
      const size_t first = parts.size();
      for (const MappedTensor& tensor : member.tensors) {
        const Sizes& shape = tensor.values.shape;
        const size_t dim = checked_dim(step.dim, shape.size());
        const bool is_even = step.op == Op::kSplitEven;
        const int64_t count = is_even ? step.sizes.front() : static_cast<int64_t>(step.sizes.size());
        check_num_tensors(is_even ? "parts" : "sizes", count, num_tensors, dim, shape);
        num_tensors += static_cast<size_t>(std::max<int64_t>(count, 0));
        const Sizes sizes = sizes_of_parts(step, shape, dim);
        parts.resize(std::max(parts.size(), first + sizes.size()), {member.is_series, {}});
        int64_t begin = 0;
        for (size_t part = 0; part < sizes.size(); ++part) {
          parts[first + part].tensors.push_back(slice_of(tensor, dim, begin, begin + sizes[part]));
          begin += sizes[part];
        }
      }
    }
    members_ = std::move(parts);
  }

  static Sizes sizes_of_parts(const TransformStep& step, const Sizes& shape, size_t dim) {
    const int64_t size = shape[dim];
    if (step.op == Op::kSplitEven) {
      const int64_t count = step.sizes.front();
      TTE_CHECK(count > 0 && size % count == 0, "parts", "dim ", dim, " of shape ", list_text(shape),
                " cannot be cut into ", count, " equal parts");
      return Sizes(static_cast<size_t>(count), size / count);
    }
    const int64_t sum = std::accumulate(step.sizes.begin(), step.sizes.end(), int64_t{0});
    const bool is_valid = std::ranges::all_of(step.sizes, [](int64_t part) { return part >= 0; });
    TTE_CHECK(is_valid && sum == size, "sizes", "got ", list_text(step.sizes), ", ", sum, " in all, for dim ", dim,
              " of shape ", list_text(shape));
    return step.sizes;
  }

  void unstack(const TransformStep& step) {
    std::vector<Member> parts;
    size_t num_tensors = 0;
    for (const Member& member : members_) {
      TTE_CHECK(!member.is_series, "dim", "a series cannot be unstacked; stack or concat it first");
      const MappedTensor& tensor = member.tensors.front();
      const size_t dim = checked_dim(step.dim, tensor.values.shape.size());
      check_num_tensors("dim", tensor.values.shape[dim], num_tensors, dim, tensor.values.shape);
      num_tensors += static_cast<size_t>(tensor.values.shape[dim]);
      Member series{true, {}};
      for (int64_t index = 0; index < tensor.values.shape[dim]; ++index) {
        series.tensors.push_back(view_of(slice_of(tensor, dim, index, index + 1), [&](const TensorMap& map) {
          Sizes shape = map.shape;
          shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(dim));
          return map.reshaped(std::move(shape));
        }));
      }
      if (gives_series_) {
        parts.push_back(std::move(series));
      } else {
        for (MappedTensor& one : series.tensors) parts.push_back({false, {std::move(one)}});
      }
    }
    members_ = std::move(parts);
  }

  void place(const TransformStep& step) {
    collapse([&](const std::vector<MappedTensor>& tensors) {
      return join_tensors(tensors, [&](const auto& maps) { return TensorMap::placed(step.sizes, maps, step.offsets); });
    });
  }

  void dequantize(const TransformStep& step) {
    TTE_CHECK(members_.size() % 2 == 0, "from", "got ", members_.size(),
              " members, expected each followed by its scales");
    std::vector<Member> results;
    for (size_t pair = 0; pair < members_.size(); pair += 2) {
      Member& quantised = members_[pair];
      const Member& scales = members_[pair + 1];
      TTE_CHECK(quantised.tensors.size() == scales.tensors.size(), "from", "got ", quantised.tensors.size(),
                " tensors and ", scales.tensors.size(), " scales");
      for (size_t index = 0; index < scales.tensors.size(); ++index) {
        MappedTensor& tensor = quantised.tensors[index];
        const MappedTensor& scale = scales.tensors[index];
        TTE_CHECK(!tensor.scales && !scale.scales && tensor.dtypes.size() == 1 && scale.dtypes.size() == 1, "from",
                  tensor.name, " was changed before");
        tensor.scales = scale.values.repeated(step.sizes, tensor.values.shape);
        tensor.dtypes = {tensor.dtypes.front() + " * " + scale.dtypes.front(), step.dtype};
      }
      results.push_back(std::move(quantised));
    }
    members_ = std::move(results);
  }

  MappedTensor viewed(MappedTensor tensor, const TransformStep& step) {
    const Sizes shape = tensor.values.shape;
    if (step.op == Op::kCast) {
      if (tensor.dtypes.back() != step.dtype) tensor.dtypes.push_back(step.dtype);
      return tensor;
    }
    if (step.op == Op::kReshape) {
      return view_of(std::move(tensor), [&](const TensorMap& map) { return map.reshaped(step.sizes); });
    }
    if (step.op == Op::kSlice) {
      const size_t dim = checked_dim(step.dim, shape.size());
      return slice_of(tensor, dim, step.sizes.at(0), step.sizes.at(1));
    }
    if (step.op == Op::kPad) {
      const size_t dim = checked_dim(step.dim, shape.size());
      TTE_CHECK(!tensor.scales, "dequantize", tensor.name, " has scales; pad it in a transform behind this one");
      tensor.values = tensor.values.padded(dim, step.sizes.at(0), step.value);
      return tensor;
    }
    if (step.op == Op::kCrop) {
      const size_t dim = checked_dim(step.dim, shape.size());
      const int64_t end = step.sizes.at(0);
      TTE_CHECK(end >= 0 && end <= shape[dim], "to", "got ", end, " for dim ", dim, " of shape ", list_text(shape),
                ", which a crop does not make longer");
      dropped_.push_back(slice_of(tensor, dim, end, shape[dim]));
      return slice_of(tensor, dim, 0, end);
    }
    Sizes dims = step.sizes;
    if (step.op == Op::kTranspose) {
      dims.resize(shape.size());
      std::iota(dims.begin(), dims.end(), 0);
      std::swap(dims[checked_dim(step.sizes.at(0), shape.size())], dims[checked_dim(step.sizes.at(1), shape.size())]);
    }
    return view_of(std::move(tensor), [&](const TensorMap& map) { return map.permuted(dims); });
  }

  std::vector<Member> members_;
  std::vector<MappedTensor> dropped_;
  bool gives_series_;
};

// The tensors of a rule for one choice of texts: per pattern by their numbers.
using Group = std::vector<std::map<int64_t, size_t>>;

class Stage {
 public:
  Stage(const TransformStage& stage, std::vector<MappedTensor> inputs, std::vector<TransformProblem>& problems)
      : inputs_(std::move(inputs)), is_used_(inputs_.size(), false), problems_(problems) {
    for (const TransformRule& rule : stage.rules) {
      if (!rule.of_others) follow(rule);
    }
    for (const std::string& text : stage.drop) {
      const NamePattern pattern(text);
      for (size_t input = 0; input < inputs_.size(); ++input) {
        if (!pattern.match(inputs_[input].name)) continue;
        is_used_[input] = true;
        dropped_.push_back(inputs_[input]);
      }
    }
    for (const TransformRule& rule : stage.rules) {
      if (rule.of_others) follow(rule);
    }
    for (size_t input = 0; input < inputs_.size(); ++input) {
      if (is_used_[input]) continue;
      problems_.push_back({inputs_[input].name, "no rule takes it; give it a rule, or name it in drop" + idle_});
      idle_.clear();  // once is enough
    }
  }

  // What goes nowhere on purpose.
  std::vector<MappedTensor> take_dropped() { return std::move(dropped_); }
  std::vector<MappedTensor> take() { return std::move(outputs_); }

 private:
  void follow(const TransformRule& rule) {
    std::vector<NamePattern> from(rule.from.begin(), rule.from.end());
    std::vector<NamePattern> to(rule.to.begin(), rule.to.end());
    require_numbers(from, to);
    const std::vector<bool> is_taken = rule.of_others ? is_used_ : std::vector<bool>(inputs_.size());
    std::map<std::vector<std::string>, Group> groups;
    std::vector<const std::vector<std::string>*> order;  // of the groups, as the checkpoint has them
    for (size_t pattern = 0; pattern < from.size(); ++pattern) {
      for (size_t input = 0; input < inputs_.size(); ++input) {
        if (is_taken[input]) continue;
        const std::optional<NameMatch> match = from[pattern].match(inputs_[input].name);
        if (!match) continue;
        is_used_[input] = true;
        const auto [group, is_new] = groups.try_emplace(match->texts, Group(from.size()));
        if (is_new) order.push_back(&group->first);
        group->second[pattern][match->number] = input;
      }
    }
    if (order.empty() && !rule.of_others) idle_ += "; the rule from '" + rule.from.front() + "' takes nothing";
    for (const std::vector<std::string>* texts : order) {
      const NameMatch match{*texts, 0};
      std::string key = from.front().fill(match);
      try {
        key = to.front().fill(match);
        give(rule, from, to, match, groups.at(*texts));
      } catch (const std::invalid_argument& error) {
        problems_.push_back({key, error.what()});
      } catch (const std::overflow_error& error) {
        problems_.push_back({key, error.what()});
      }
    }
  }

  // Stars to which one pattern of a rule adds stand for numbers in all of them.
  static void require_numbers(std::vector<NamePattern>& from, std::vector<NamePattern>& to) {
    std::vector<bool> numbers(from.front().num_stars());
    for (const auto* patterns : {&from, &to}) {
      for (const NamePattern& pattern : *patterns) {
        const std::vector<bool> own = pattern.numbers();
        for (size_t star = 0; star < own.size(); ++star) numbers.at(star) = numbers.at(star) || own[star];
      }
    }
    for (NamePattern& pattern : from) pattern.require_numbers(numbers);
  }

  void give(const TransformRule& rule, const std::vector<NamePattern>& from, const std::vector<NamePattern>& to,
            const NameMatch& match, const Group& group) {
    std::vector<Member> members;
    for (size_t pattern = 0; pattern < from.size(); ++pattern) {
      NameMatch wanted = match;
      TTE_CHECK(!group[pattern].empty(), from[pattern].fill(match), "it is made of this too, which is not there");
      Member member{from[pattern].is_series(), {}};
      for (const auto& [number, input] : group[pattern]) {
        wanted.number = static_cast<int64_t>(member.tensors.size());
        TTE_CHECK(number == wanted.number || !member.is_series, from[pattern].fill(wanted),
                  "it is made of this too, which is not there, though a later number is");
        member.tensors.push_back(inputs_[input]);
      }
      members.push_back(std::move(member));
    }
    if (members.size() == 1 && members.front().tensors.front().dtypes.empty()) {
      TTE_CHECK(rule.steps.empty() && to.size() == 1, members.front().tensors.front().name,
                "it is no tensor, and can only be renamed");
    } else {
      for (const Member& member : members) {
        for (const MappedTensor& tensor : member.tensors) {
          TTE_CHECK(!tensor.dtypes.empty(), tensor.name, "it is no tensor, and can only be renamed");
        }
      }
    }
    Pipeline pipeline(std::move(members), to.front().is_series());
    for (size_t number = 0; number < rule.steps.size(); ++number) {
      const TransformStep& step = rule.steps[number];
      try {
        pipeline.apply(step);
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(concat("step ", number + 1, ", ", name_of(step.op), ", of the rule from ",
                                           joined(rule.from), ": ", error.what()));
      }
    }
    members = pipeline.take();
    std::ranges::move(pipeline.take_dropped(), std::back_inserter(dropped_));
    TTE_CHECK(members.size() == to.size(), concat("the rule from ", joined(rule.from)), "its steps leave ",
              members.size(), " tensors for ", to.size(), " names, ", joined(rule.to));
    for (size_t member = 0; member < members.size(); ++member) {
      TTE_CHECK(members[member].is_series == to[member].is_series(), concat("the rule from ", joined(rule.from)),
                members[member].is_series ? "its steps leave a series for " : "its steps leave one tensor for ",
                rule.to[member], members[member].is_series ? "; stack or concat it" : "; unstack it");
      NameMatch own = match;
      for (MappedTensor& tensor : members[member].tensors) {
        tensor.name = to[member].fill(own);
        ++own.number;
        outputs_.push_back(std::move(tensor));
      }
    }
  }

  std::vector<MappedTensor> inputs_;
  std::vector<bool> is_used_;
  std::vector<TransformProblem>& problems_;
  std::vector<MappedTensor> outputs_;
  std::vector<MappedTensor> dropped_;
  std::string idle_;  // says which rules take nothing: one of them may be misspelt
};

void collect(const TensorMap& map, std::vector<std::vector<const MapPiece*>>& of_source) {
  for (const MapPiece& piece : map.pieces) {
    if (piece.source != kFill) of_source[piece.source].push_back(&piece);
  }
}

// The first element of a source that no target has. Targets may share elements, as tied weights do.
std::optional<CoverDefect> unused_element(const Sizes& shape, const std::vector<const MapPiece*>& pieces) {
  // Which elements a piece has, whatever becomes of them; repeated ones are used where their first copy is.
  std::vector<MapPiece> used;
  used.reserve(pieces.size());
  for (const MapPiece* piece : pieces) {
    MapPiece elements{0, {0, piece->starts[kSource]}, {}};
    for (const MapLoop& loop : piece->loops) {
      if (loop.strides[kSource] != 0) elements.loops.push_back({loop.count, {0, loop.strides[kSource]}});
    }
    if (elements.num_elements() == num_elements(shape)) return std::nullopt;
    std::ranges::sort(elements.loops, {}, [](const MapLoop& loop) { return loop.strides[kSource]; });
    used.push_back(std::move(elements));
  }
  std::vector<const MapPiece*> unique;
  std::set<std::pair<int64_t, std::vector<std::pair<int64_t, int64_t>>>> seen;
  for (const MapPiece& piece : used) {
    std::vector<std::pair<int64_t, int64_t>> loops;
    for (const MapLoop& loop : piece.loops) loops.emplace_back(loop.count, loop.strides[kSource]);
    if (seen.emplace(piece.starts[kSource], std::move(loops)).second) unique.push_back(&piece);
  }
  return find_gap(shape, unique, kSource);
}

// What a search finds; a tensor that cannot be searched is a problem.
template <typename Search>
std::optional<CoverDefect> proved(const std::string& name, ResolvedTransform& resolved, const Search& search) {
  try {
    return search();
  } catch (const std::invalid_argument& error) {
    resolved.problems.push_back({name, error.what()});
    return std::nullopt;
  }
}

// Whether each element of a target, or of its scales, comes from one element.
void prove_filled(const std::vector<TransformSource>& sources, const std::string& name, const TensorMap& map,
                  const char* whose, ResolvedTransform& resolved) {
  std::vector<const MapPiece*> pieces;
  for (const MapPiece& piece : map.pieces) pieces.push_back(&piece);
  const std::optional<CoverDefect> defect =
      proved(name, resolved, [&] { return find_defect(map.shape, pieces, kTarget); });
  if (!defect) return;
  std::set<std::string> names;
  for (const size_t piece : defect->chunks) {
    const uint32_t source = pieces[piece]->source;
    names.insert(source == kFill ? "a pad" : sources[source].name);
  }
  const std::vector<std::string> listed(names.begin(), names.end());
  const std::string text =
      defect->kind == CoverDefect::Kind::kGap ? "nothing fills element " : "is filled twice at element ";
  resolved.problems.push_back({name, concat(text, list_text(defect->element), whose, list_text(map.shape),
                                            listed.empty() ? "" : ", from " + joined(listed))});
}

void prove(const std::vector<TransformSource>& sources, const std::vector<MappedTensor>& dropped,
           ResolvedTransform& resolved) {
  std::vector<std::vector<const MapPiece*>> of_source(sources.size());
  for (const std::vector<MappedTensor>& tensors : {std::cref(resolved.targets), std::cref(dropped)}) {
    for (const MappedTensor& tensor : tensors) {
      collect(tensor.values, of_source);
      if (tensor.scales) collect(*tensor.scales, of_source);
    }
  }
  for (const MappedTensor& target : resolved.targets) {
    if (target.dtypes.empty()) continue;
    prove_filled(sources, target.name, target.values, " of its shape ", resolved);
    if (target.scales) prove_filled(sources, target.name, *target.scales, " of its scales, for shape ", resolved);
  }
  for (uint32_t source = 0; source < sources.size(); ++source) {
    if (sources[source].dtype.empty()) continue;
    const std::optional<CoverDefect> gap = proved(
        sources[source].name, resolved, [&] { return unused_element(sources[source].shape, of_source[source]); });
    if (!gap) continue;
    resolved.problems.push_back({sources[source].name, concat("its element ", list_text(gap->element), " of shape ",
                                                              list_text(sources[source].shape),
                                                              " goes nowhere; use it, or name the key in drop")});
  }
}

}  // namespace

ResolvedTransform resolve(const std::vector<TransformStage>& stages, const std::vector<TransformSource>& sources) {
  ResolvedTransform resolved;
  for (uint32_t source = 0; source < sources.size(); ++source) {
    const auto& [name, dtype, shape] = sources[source];
    MappedTensor tensor{name, {}, {}, std::nullopt, source};
    if (!dtype.empty()) {
      tensor.dtypes = {dtype};
      tensor.values = TensorMap::whole(source, shape);
    }
    resolved.targets.push_back(std::move(tensor));
  }
  std::vector<MappedTensor> dropped;
  for (const TransformStage& stage : stages) {
    Stage followed(stage, std::move(resolved.targets), resolved.problems);
    std::ranges::move(followed.take_dropped(), std::back_inserter(dropped));
    resolved.targets = followed.take();
    std::unordered_map<std::string, size_t> seen;
    for (const MappedTensor& target : resolved.targets) {
      if (++seen[target.name] == 2)
        resolved.problems.push_back({target.name, "several rules fill it; leave one of them"});
    }
    if (!resolved.problems.empty()) return resolved;  // what else is wrong follows from it
  }
  prove(sources, dropped, resolved);
  return resolved;
}

}  // namespace torchtitan_ext::core
