// The small values that the bindings hand to Python: texts, sizes, boxes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/boxes.h"
#include "core/chunk.h"
#include "core/shard_layout.h"

namespace torchtitan_ext::bindings {

// A key or a path, whose bytes need not be UTF-8: Python's "surrogatepass". Throws UnicodeDecodeError.
inline pybind11::str to_str(std::string_view utf8) {
  PyObject* const text = PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass");
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

inline pybind11::tuple to_texts(const std::vector<std::string>& keys) {
  pybind11::tuple texts(keys.size());
  for (size_t index = 0; index < keys.size(); ++index) texts[index] = to_str(keys[index]);
  return texts;
}

// The inverse of to_str.
inline std::string to_utf8(const pybind11::handle& text) {
  PyObject* const encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass");
  if (encoded == nullptr) throw pybind11::error_already_set();
  return std::string(static_cast<std::string_view>(pybind11::reinterpret_steal<pybind11::bytes>(encoded)));
}

// What a dict has for a key; a null object where it has nothing.
inline pybind11::object find_in(const pybind11::dict& values, const pybind11::handle& key) {
  return pybind11::reinterpret_borrow<pybind11::object>(PyDict_GetItemWithError(values.ptr(), key.ptr()));
}

// The inverse of to_tuple.
inline core::Sizes to_sizes(const pybind11::handle& numbers) {
  const auto tuple = pybind11::reinterpret_borrow<pybind11::tuple>(numbers);
  if (!PyTuple_Check(numbers.ptr())) throw pybind11::type_error("expected a tuple of numbers");
  core::Sizes sizes(tuple.size());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    sizes[dim] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.ptr(), static_cast<Py_ssize_t>(dim)));
    if (sizes[dim] == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  }
  return sizes;
}

inline pybind11::tuple to_tuple(std::span<const int64_t> numbers) {
  pybind11::tuple result(numbers.size());
  for (size_t index = 0; index < numbers.size(); ++index) result[index] = pybind11::int_(numbers[index]);
  return result;
}

using StepTuple = std::tuple<int64_t, int64_t, int64_t>;  // axis, dim, split_factor
using PlacementTuple = std::pair<int64_t, int64_t>;       // dim or -1, split_factor
using BoxTuple = std::pair<core::Sizes, core::Sizes>;     // offsets, sizes

inline std::vector<core::ShardStep> to_steps(const std::vector<StepTuple>& tuples) {
  std::vector<core::ShardStep> steps;
  for (const auto& [axis, dim, split_factor] : tuples) steps.push_back({axis, dim, split_factor});
  return steps;
}

inline std::vector<core::Placement> to_placements(const std::vector<PlacementTuple>& tuples) {
  std::vector<core::Placement> placements;
  for (const auto& [dim, split_factor] : tuples) placements.push_back({dim, split_factor});
  return placements;
}

inline std::vector<core::Chunk> to_chunks(const std::vector<BoxTuple>& boxes) {
  std::vector<core::Chunk> chunks;
  chunks.reserve(boxes.size());
  for (const auto& [offsets, sizes] : boxes) chunks.push_back({offsets, sizes, {}});
  return chunks;
}

inline pybind11::tuple to_tuple(std::span<const core::ShardStep> steps) {
  pybind11::tuple result(steps.size());
  for (size_t index = 0; index < steps.size(); ++index) {
    result[index] = pybind11::make_tuple(steps[index].axis, steps[index].dim, steps[index].split_factor);
  }
  return result;
}

// Offsets, sizes, and per dim of the view the dim of the tensor and its step there.
inline pybind11::tuple to_view(const core::BoxView& view, std::span<const int64_t> sizes) {
  pybind11::list steps;
  for (const core::ViewStep& step : view.steps) steps.append(pybind11::make_tuple(step.dim, step.elements));
  return pybind11::make_tuple(to_tuple(view.offsets), to_tuple(sizes), std::move(steps));
}

// Offsets and sizes.
inline pybind11::tuple to_box(const core::Chunk& chunk) {
  return pybind11::make_tuple(to_tuple(chunk.offsets), to_tuple(chunk.sizes));
}

inline pybind11::tuple to_boxes(const std::vector<core::Chunk>& chunks) {
  pybind11::tuple boxes(chunks.size());
  for (size_t index = 0; index < chunks.size(); ++index) boxes[index] = to_box(chunks[index]);
  return boxes;
}

}  // namespace torchtitan_ext::bindings
