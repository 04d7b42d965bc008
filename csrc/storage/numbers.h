// The numbers in elements of tensors, in their shortest form: 0.1 for 0.10000000149011612 of float32.
#pragma once

#include <complex>
#include <cstdint>
#include <string_view>
#include <variant>

namespace torchtitan_ext::storage {

// Nothing for a dtype whose numbers are not known here.
using Number = std::variant<std::monostate, bool, int64_t, uint64_t, double, std::complex<double>>;

// The number with the fewest digits that is the same element of a tensor of this dtype. Only numbers of floats narrower
// than float64 change.
double shortest(double value, std::string_view dtype);

// The number in the bytes of one element. Throws std::invalid_argument where they are too few.
Number number_of(std::string_view element, std::string_view dtype);

}  // namespace torchtitan_ext::storage
