// Shared reads for Python: read items as boxes, and parts of them as the columns of read items. Like core.cpp it decides
// nothing.
#include "bindings/shared_reads.h"

#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "core/check.h"
#include "core/shared_reads.h"

namespace torchtitan_ext::bindings {

namespace py = pybind11;
using core::SharedPart;
using core::SharePlan;
using core::ShareTag;
using core::Sizes;
using core::WantedRead;

namespace {

// The read items of one rank that others may want too, of one checkpoint after the other.
class WantedReads {
 public:
  // Args:
  //   tag_of: per item the position of its tag, or -1 if nobody else gets it;
  //   keys: the numbers of saved keys.
  void add(const py::list& items, const std::vector<int64_t>& tag_of, const py::dict& keys) {
    TTE_CHECK(tag_of.size() == items.size(), "WantedReads", "got ", tag_of.size(), " tags of ", items.size(), " items");
    for (size_t position = 0; position < items.size(); ++position, ++num_items_) {
      if (tag_of[position] < 0) continue;
      const py::handle item = items[position];
      const py::object index = item.attr("storage_index");
      reads_.push_back({num_items_, static_cast<uint64_t>(tag_of[position]), keys[index.attr("fqn")].cast<uint64_t>(),
                        index.attr("index").cast<uint64_t>(), item.attr("storage_offsets").cast<Sizes>(),
                        item.attr("lengths").cast<Sizes>()});
    }
  }

  py::bytes message(const std::vector<std::tuple<std::string, std::string, int64_t, bool, bool>>& tags) const {
    std::vector<ShareTag> of_reads;
    for (const auto& [name, device, item_bytes, is_cut, is_overwritten] : tags) {
      of_reads.push_back({name, device, item_bytes, is_cut, is_overwritten});
    }
    return core::encode_wanted(of_reads, reads_);
  }

 private:
  std::vector<WantedRead> reads_;
  uint64_t num_items_ = 0;
};

SharePlan plan_shared_reads(const std::vector<py::bytes>& wanted, std::vector<int64_t> own_bytes,
                            std::vector<uint32_t> hosts, bool is_per_host) {
  std::vector<std::string_view> messages;
  for (const py::bytes& message : wanted) messages.push_back(static_cast<std::string_view>(message));
  const py::gil_scoped_release release;
  return {messages, std::move(own_bytes), std::move(hosts), is_per_host};
}

// Parts of items, as the columns of the read items that they are.
struct PartColumns {
  std::vector<uint64_t> items;
  py::list types, dest_indices, dest_offsets, storage_indices, storage_offsets, lengths;
};

PartColumns cut_items(const std::vector<SharedPart::Row>& rows, const py::list& items, const py::object& size_class) {
  PartColumns columns;
  const auto moved = [&size_class](const py::object& offsets, const Sizes& by) {
    Sizes sum = offsets.cast<Sizes>();
    TTE_CHECK(sum.size() == by.size(), "SharedPart", "an item has ", sum.size(), " dims, its part ", by.size());
    for (size_t dim = 0; dim < sum.size(); ++dim) sum[dim] += by[dim];
    return size_class(to_tuple(sum));
  };
  for (const SharedPart::Row& row : rows) {
    const py::handle item = items[static_cast<size_t>(row.item)];
    columns.items.push_back(row.item);
    columns.types.append(item.attr("type"));
    columns.dest_indices.append(item.attr("dest_index"));
    columns.dest_offsets.append(moved(item.attr("dest_offsets"), row.offsets));
    columns.storage_indices.append(item.attr("storage_index"));
    columns.storage_offsets.append(moved(item.attr("storage_offsets"), row.offsets));
    columns.lengths.append(size_class(to_tuple(row.sizes)));
  }
  return columns;
}

py::bytes bytes_of(const std::vector<int64_t>& table) {
  return {reinterpret_cast<const char*>(table.data()), table.size() * sizeof(int64_t)};
}

}  // namespace

void define_shared_reads(py::module_& module) {
  py::class_<WantedReads>(module, "WantedReads", "What one rank wants to read; see csrc/core/shared_reads.h.")
      .def(py::init<>())
      .def("add", &WantedReads::add, py::arg("items"), py::arg("tag_of"), py::arg("keys"))
      .def("message", &WantedReads::message, py::arg("tags"));
  py::class_<SharePlan>(module, "SharePlan", "Who reads what for whom; see csrc/core/shared_reads.h.")
      .def(py::init(&plan_shared_reads), py::arg("wanted"), py::arg("own_bytes"), py::arg("hosts"),
           py::arg("is_per_host"))
      .def_property_readonly("wanted_bytes", &SharePlan::wanted_bytes)
      .def_property_readonly("repeated_bytes", &SharePlan::repeated_bytes)
      .def_property_readonly("shared_bytes", &SharePlan::shared_bytes)
      .def_property_readonly("sample_bytes", &SharePlan::sample_bytes)
      .def_property_readonly("devices", &SharePlan::devices)
      .def_property_readonly("bytes_between", &SharePlan::bytes_between)
      .def(
          "assign",
          [](SharePlan& plan, std::vector<double> sample, int64_t most_rounds) {
            plan.assign({std::move(sample), most_rounds});
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("sample"), py::arg("most_rounds"))
      .def("part_message", [](const SharePlan& plan, int64_t rank) { return py::bytes(plan.part_message(rank)); });
  py::class_<PartColumns>(module, "PartColumns")
      .def_readonly("items", &PartColumns::items)
      .def_readonly("types", &PartColumns::types)
      .def_readonly("dest_indices", &PartColumns::dest_indices)
      .def_readonly("dest_offsets", &PartColumns::dest_offsets)
      .def_readonly("storage_indices", &PartColumns::storage_indices)
      .def_readonly("storage_offsets", &PartColumns::storage_offsets)
      .def_readonly("lengths", &PartColumns::lengths);
  py::class_<SharedPart::Exchange>(module, "SharedExchange", "Tables of ops.exchange_runs_, and their tensors.")
      .def_readonly("sources", &SharedPart::Exchange::sources)
      .def_readonly("targets", &SharedPart::Exchange::targets)
      .def_property_readonly("sends", [](const SharedPart::Exchange& one) { return bytes_of(one.sends); })
      .def_property_readonly("receives", [](const SharedPart::Exchange& one) { return bytes_of(one.receives); });
  py::class_<SharedPart>(module, "SharedPart", "What one rank reads, sends and receives; see csrc/core/shared_reads.h.")
      .def(py::init([](const py::bytes& message) { return SharedPart(static_cast<std::string_view>(message)); }),
           py::arg("message"))
      .def_property_readonly("num_rounds", [](const SharedPart& part) { return part.rounds().size(); })
      .def_property_readonly("items", &SharedPart::items)
      .def(
          "reads",
          [](const SharedPart& part, size_t round, const py::list& items, const py::object& size_class) {
            return cut_items(part.rounds().at(round).reads, items, size_class);
          },
          py::arg("round"), py::arg("items"), py::arg("size_class"))
      .def(
          "receives",
          [](const SharedPart& part, size_t round, const py::list& items, const py::object& size_class) {
            return cut_items(part.rounds().at(round).receives, items, size_class);
          },
          py::arg("round"), py::arg("items"), py::arg("size_class"))
      .def("exchange", &SharedPart::exchange, py::arg("round"), py::arg("device"));
}

}  // namespace torchtitan_ext::bindings
