// Tables of exchanges and changes that travel over them, for Python. Like core.cpp it converts and decides nothing.
#include "bindings/box_changes.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/convert.h"
#include "core/box_changes.h"
#include "core/exchange_table.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::BoxChanges;
using core::ExchangeBox;
using core::ExchangeTable;
using core::IncomingChanges;
using core::OutgoingChanges;
using core::PackedBoxes;
using core::Sizes;

namespace {

using ChunkTuple = std::tuple<Sizes, Sizes, Sizes>;           // offsets, sizes, local offsets
using HeldTuple = std::pair<Sizes, std::vector<ChunkTuple>>;  // of the global tensor, and what is held of it

std::vector<core::HeldPart> to_parts(const std::vector<HeldTuple>& tuples) {
  std::vector<core::HeldPart> parts;
  for (const auto& [global_sizes, chunks] : tuples) {
    parts.push_back({global_sizes, {}});
    for (const auto& [offsets, sizes, local_offsets] : chunks) {
      parts.back().chunks.push_back({offsets, sizes, local_offsets});
    }
  }
  return parts;
}

Array<int64_t> to_array(const std::vector<int64_t>& numbers) { return array_of(std::span<const int64_t>(numbers)); }

// A new array that `fill` writes.
template <typename T, typename Fill>
Array<T> filled(int64_t size, const Fill& fill) {
  Array<T> array(size);
  const std::span<T> items(array.mutable_data(), static_cast<size_t>(size));
  const py::gil_scoped_release released;
  fill(items);
  return array;
}

void register_tables(py::module_& module) {
  py::class_<ExchangeBox>(module, "ExchangeBox", "A box of a table; see csrc/core/exchange_schedule.h.")
      .def_readonly("peer", &ExchangeBox::peer)
      .def_readonly("tensor", &ExchangeBox::tensor)
      .def_readonly("dtype", &ExchangeBox::dtype)
      .def_property_readonly("offsets", [](const ExchangeBox& box) { return to_tuple(box.offsets); })
      .def_property_readonly("sizes", [](const ExchangeBox& box) { return to_tuple(box.sizes); });
  py::class_<ExchangeTable, std::shared_ptr<ExchangeTable>>(module, "ExchangeTable",
                                                            "A side of an exchange; see csrc/core/exchange_table.h.")
      .def(py::init([](const Array<int64_t>& entries, const std::vector<Sizes>& shapes) {
             return std::make_shared<ExchangeTable>(vector_of(entries), shapes);
           }),
           py::arg("entries"), py::arg("shapes"))
      .def("__len__", [](const ExchangeTable& table) { return table.boxes().size(); })
      .def_property_readonly("boxes", &ExchangeTable::boxes, py::return_value_policy::reference_internal)
      .def(
          "flat_entries",
          [](const ExchangeTable& table, const Array<int64_t>& sizes) {
            return to_array(table.flat_entries(span_of(sizes)));
          },
          py::arg("sizes"))
      .def(
          "distinct",
          [](const ExchangeTable& table, const std::vector<int64_t>& identities) {
            ExchangeTable::Distinct distinct = table.distinct(identities);
            return py::make_tuple(std::move(distinct.firsts), std::move(distinct.of_boxes));
          },
          py::arg("identities"));
}

void register_packed(py::module_& module) {
  using Numbers = std::vector<int64_t>;
  py::class_<PackedBoxes, std::shared_ptr<PackedBoxes>>(module, "PackedBoxes",
                                                        "Changes of boxes, to be sent; see csrc/core/box_changes.h.")
      .def(py::init<>())
      .def("__len__", &PackedBoxes::size)
      .def(
          "add_compared",
          [](PackedBoxes& packed, const Numbers& item_bytes, const Numbers& counts, const Numbers& whole,
             const Array<int64_t>& positions, const Array<uint8_t>& values, const Numbers& old_sums) {
            const auto found = core::split_changes(item_bytes, counts, whole, span_of(positions), span_of(values));
            const py::gil_scoped_release released;
            packed.add_compared(found, old_sums);
          },
          py::arg("item_bytes"), py::arg("counts"), py::arg("whole"), py::arg("positions"), py::arg("values"),
          py::arg("old_sums"))
      .def(
          "add_parts",
          [](PackedBoxes& packed, const Numbers& item_bytes, const Numbers& counts, const Numbers& whole,
             const Array<int64_t>& positions, const Array<uint8_t>& values, const ExchangeTable& table,
             const std::vector<HeldTuple>& held) {
            const auto found = core::split_changes(item_bytes, counts, whole, span_of(positions), span_of(values));
            const std::vector<core::HeldPart> parts = to_parts(held);
            const py::gil_scoped_release released;
            packed.add_parts(table, found, parts);
          },
          py::arg("item_bytes"), py::arg("counts"), py::arg("whole"), py::arg("positions"), py::arg("values"),
          py::arg("table"), py::arg("held"))
      .def_property_readonly("positions", [](const PackedBoxes& packed) { return array_of(packed.positions()); })
      .def_property_readonly("counts", &PackedBoxes::counts)
      .def(
          "set_old_sums", [](PackedBoxes& packed, const Numbers& sums) { packed.set_old_sums(sums); }, py::arg("sums"));
}

}  // namespace

void register_box_changes(py::module_& module) {
  register_tables(module);
  register_packed(module);
  py::class_<BoxChanges>(module, "BoxChanges", "Changes on their way, of one side; see csrc/core/box_changes.h.")
      .def_property_readonly("headers_table", [](const BoxChanges& side) { return to_array(side.headers_table()); })
      .def_property_readonly("data_table", [](const BoxChanges& side) { return to_array(side.data_table()); })
      .def_property_readonly("whole_table", [](const BoxChanges& side) { return to_array(side.whole_table()); })
      .def_property_readonly("num_header_numbers", &BoxChanges::num_header_numbers)
      .def_property_readonly("num_data_bytes", &BoxChanges::num_data_bytes)
      .def_property_readonly("bytes_of_peer", &BoxChanges::bytes_of_peer);
  py::class_<OutgoingChanges, BoxChanges>(module, "OutgoingChanges")
      .def(py::init([](std::shared_ptr<ExchangeTable> table, std::shared_ptr<PackedBoxes> packed,
                       std::vector<size_t> packed_as) {
             return OutgoingChanges(std::move(table), std::move(packed), std::move(packed_as));
           }),
           py::arg("table"), py::arg("packed"), py::arg("packed_as"))
      .def_property_readonly("headers",
                             [](const OutgoingChanges& changes) {
                               return filled<int64_t>(changes.num_header_numbers(), [&](std::span<int64_t> numbers) {
                                 changes.write_headers(numbers);
                               });
                             })
      .def_property_readonly("data", [](const OutgoingChanges& changes) {
        return filled<uint8_t>(changes.num_data_bytes(), [&](std::span<uint8_t> data) { changes.write_data(data); });
      });
  py::class_<IncomingChanges, BoxChanges>(module, "IncomingChanges")
      .def(py::init([](std::shared_ptr<ExchangeTable> table, const std::vector<int64_t>& item_bytes) {
             return IncomingChanges(std::move(table), item_bytes);
           }),
           py::arg("table"), py::arg("item_bytes"))
      .def(
          "take_headers",
          [](IncomingChanges& changes, const Array<int64_t>& numbers) { changes.take_headers(span_of(numbers)); },
          py::arg("numbers"))
      .def_property_readonly("counts", &IncomingChanges::counts)
      .def(
          "unpack",
          [](const IncomingChanges& changes, const Array<uint8_t>& data) {
            const core::ListOffsets sizes = changes.list_offsets();
            Array<int64_t> positions(sizes.elements.back());
            Array<uint8_t> values(sizes.value_bytes.back());
            const std::span<int64_t> to_positions(positions.mutable_data(), static_cast<size_t>(positions.size()));
            const std::span<uint8_t> to_values(values.mutable_data(), static_cast<size_t>(values.size()));
            const std::span<const uint8_t> from = span_of(data);
            {
              const py::gil_scoped_release released;
              changes.unpack(from, to_positions, to_values);
            }
            return py::make_tuple(std::move(positions), std::move(values));
          },
          py::arg("data"))
      .def(
          "tensors_of_other_base",
          [](const IncomingChanges& changes, const std::vector<int64_t>& sums) {
            return changes.tensors_of_other_base(sums);
          },
          py::arg("sums"));
}

}  // namespace torchtitan_ext::bindings
