// Transforms for Python. Converts arguments and decides nothing.
#include "bindings/transforms.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/check.h"
#include "core/transform.h"
#include "storage/element_types.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using namespace core;
using storage::PlainTensor;

namespace {

using StepArguments = std::tuple<std::string, int64_t, Sizes, std::vector<Sizes>, std::string, double>;
using RuleArguments = std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<StepArguments>, bool>;
using StageArguments = std::pair<std::vector<RuleArguments>, std::vector<std::string>>;
using SourceArguments = std::tuple<std::string, std::string, Sizes>;

TransformStep to_step(const StepArguments& arguments) {
  using Op = TransformStep::Op;
  static const std::map<std::string, Op> kOps = {
      {"concat", Op::kConcat},
      {"concat_even", Op::kConcatEven},
      {"split", Op::kSplit},
      {"split_even", Op::kSplitEven},
      {"stack", Op::kStack},
      {"unstack", Op::kUnstack},
      {"permute", Op::kPermute},
      {"transpose", Op::kTranspose},
      {"reshape", Op::kReshape},
      {"slice", Op::kSlice},
      {"place", Op::kPlace},
      {"pad", Op::kPad},
      {"crop", Op::kCrop},
      {"cast", Op::kCast},
      {"dequantize", Op::kDequantize},
  };
  const auto& [op, dim, sizes, offsets, dtype, value] = arguments;
  return {kOps.at(op), dim, sizes, offsets, dtype, value};
}

ResolvedTransform resolve_py(const std::vector<StageArguments>& stages, const std::vector<SourceArguments>& sources) {
  std::vector<TransformStage> converted;
  for (const auto& [rules, drop] : stages) {
    TransformStage stage{{}, drop};
    for (const auto& [from, to, steps, of_others] : rules) {
      TransformRule rule{from, to, {}, of_others};
      for (const StepArguments& step : steps) rule.steps.push_back(to_step(step));
      stage.rules.push_back(std::move(rule));
    }
    converted.push_back(std::move(stage));
  }
  std::vector<TransformSource> tensors;
  for (const auto& [name, dtype, shape] : sources) tensors.push_back({name, dtype, shape});
  const py::gil_scoped_release release;
  return resolve(converted, tensors);
}

// Shape and chunks of each source, and Python's objects that hold these chunks.
struct MapSources {
  std::vector<MapSource> sources;
  std::vector<py::object> owners;
};

MapSources make_sources(const std::vector<std::pair<Sizes, py::object>>& sources) {
  MapSources made;
  for (const auto& [shape, chunks] : sources) {
    made.sources.push_back({shape, chunks.cast<const ChunkIndex*>()});
    made.owners.push_back(chunks);
  }
  return made;
}

// The elements of a part as a tensor of their own in the file.
PlainTensor stored_part(const MapPart& part, const PlainTensor& stored) {
  TTE_CHECK(stored.sizes.size() == part.chunk_offsets.size(), "stored", "got ", stored.sizes.size(), " dims, expected ",
            part.chunk_offsets.size());
  PlainTensor result{stored.dtype, {}, {}, stored.data_offset, stored.item_bytes};
  for (size_t dim = 0; dim < part.chunk_offsets.size(); ++dim) {
    result.data_offset += part.chunk_offsets[dim] * stored.strides[dim] * stored.item_bytes;
  }
  for (const MapPart::Loop& loop : part.loops) {
    result.sizes.push_back(loop.count);
    result.strides.push_back(loop.step == 0 ? 0 : loop.step * stored.strides[static_cast<size_t>(loop.dim)]);
  }
  return result;
}

py::tuple memory_strides(const MapPart& part) {
  Sizes strides;
  for (const MapPart::Loop& loop : part.loops) strides.push_back(loop.memory_stride);
  return to_tuple(strides);
}

}  // namespace

void define_transforms(py::module_& module) {
  py::class_<MapPart>(module, "MapPart", "What is read of one chunk; see csrc/core/tensor_map.h.")
      .def_readonly("source", &MapPart::source)
      .def_readonly("chunk", &MapPart::chunk)
      .def_readonly("memory_offset", &MapPart::memory_offset)
      .def_property_readonly("memory_strides", &memory_strides)
      .def("stored", &stored_part, py::arg("chunk"));
  py::class_<MapSources>(module, "MapSources").def(py::init(&make_sources), py::arg("sources"));
  py::class_<TensorMap>(module, "TensorMap", "See csrc/core/tensor_map.h.")
      .def_property_readonly("shape", [](const TensorMap& map) { return to_tuple(map.shape); })
      .def_property_readonly("num_pieces", [](const TensorMap& map) { return map.pieces.size(); })
      .def_property_readonly("sources",
                             [](const TensorMap& map) {
                               std::vector<uint32_t> sources;
                               for (const MapPiece& piece : map.pieces) {
                                 if (piece.source == core::kFill) continue;
                                 if (sources.empty() || sources.back() != piece.source) sources.push_back(piece.source);
                               }
                               return sources;
                             })
      .def("source_in_place", &TensorMap::source_in_place)
      .def_property_readonly("has_fills",
                             [](const TensorMap& map) {
                               return std::ranges::any_of(
                                   map.pieces, [](const MapPiece& piece) { return piece.source == core::kFill; });
                             })
      .def(
          "find_fills",
          [](const TensorMap& map, const Sizes& offsets, const Sizes& sizes) {
            py::list fills;
            for (const MapFill& fill : find_fills(map, {offsets, sizes})) {
              fills.append(py::make_tuple(fill.value, to_view(fill.dst, fill.sizes)));
            }
            return fills;
          },
          py::arg("offsets"), py::arg("sizes"))
      .def("enumerate", &core::enumerate)
      .def(
          "find_parts",
          [](const TensorMap& map, const Sizes& offsets, const Sizes& sizes, const Sizes& strides,
             const MapSources& sources) { return find_parts(map, {offsets, sizes}, strides, sources.sources); },
          py::call_guard<py::gil_scoped_release>(), py::arg("offsets"), py::arg("sizes"), py::arg("memory_strides"),
          py::arg("sources"));
  py::class_<MappedTensor>(module, "MappedTensor", "See csrc/core/transform.h.")
      .def_property_readonly("name", [](const MappedTensor& self) { return to_str(self.name); })
      .def_readonly("dtypes", &MappedTensor::dtypes)
      .def_readonly("values", &MappedTensor::values)
      .def_readonly("scales", &MappedTensor::scales)
      .def_readonly("value", &MappedTensor::value);
  py::class_<ResolvedTransform>(module, "ResolvedTransform")
      .def_readonly("targets", &ResolvedTransform::targets)
      .def_property_readonly("problems", [](const ResolvedTransform& self) {
        py::list problems;
        for (const TransformProblem& problem : self.problems) {
          problems.append(py::make_tuple(to_str(problem.key), to_str(problem.detail)));
        }
        return problems;
      });
  module.def("resolve_transform", &resolve_py, py::arg("stages"), py::arg("sources"));
}

}  // namespace torchtitan_ext::bindings
