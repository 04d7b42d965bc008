// NumPy's arrays of one dim, for bindings.
#pragma once

#include <pybind11/numpy.h>

#include <span>

namespace torchtitan_ext::bindings {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

template <typename T>
Array<T> array_of(std::span<const T> elements) {
  return Array<T>(static_cast<pybind11::ssize_t>(elements.size()), elements.data());
}

// Memory of a C++ object as an array, which keeps the object of Python that owns it.
template <typename T>
Array<T> view_of(const T* data, size_t count, const pybind11::object& owner) {
  return Array<T>(static_cast<pybind11::ssize_t>(count), data, owner);
}

}  // namespace torchtitan_ext::bindings
