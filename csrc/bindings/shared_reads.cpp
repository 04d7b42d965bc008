// Shared reads for Python: the read items of one rank, whole or in parts, as others want them too and as rounds read and
// exchange them. What goes where is decided in core/shared_reads.h.
#include "bindings/shared_reads.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
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

struct ItemsToRead {
  py::list items;
  int64_t num_bytes = 0;
};

// The arguments of ops.exchange_runs_; its tensors are those of items.
struct Exchange {
  py::list sources, targets;
  Array<int64_t> sends, receives;
};

// What one rank reads of the tensors of a checkpoint.
class RankReads {
 public:
  using Tag = std::tuple<std::string, std::string, int64_t, bool, bool>;  // as ShareTag

  // Args: the items in the order of reading, and the metadata of their keys.
  RankReads(const py::list& items, const py::object& metadata) {
    std::map<std::string, uint64_t> numbers;  // equal on all ranks that have read the same metadata
    for (const py::handle key : metadata) numbers.emplace(to_utf8(key), 0);
    uint64_t number = 0;
    for (auto& [_, of_key] : numbers) of_key = number++;
    for (const py::handle item : items) {
      const py::object key = item.attr("storage_index").attr("fqn");
      const auto item_bytes = metadata[key].attr("properties").attr("dtype").attr("itemsize").cast<int64_t>();
      items_.push_back({py::reinterpret_borrow<py::object>(item), numbers.at(to_utf8(key)), item_bytes,
                        item.attr("lengths").cast<Sizes>()});
    }
  }

  py::list items() const {
    py::list items;
    for (const Item& item : items_) items.append(item.item);
    return items;
  }

  // The message to the coordinator. Args: per item its tag, or none if nobody else gets it.
  py::bytes wanted(const std::vector<std::optional<Tag>>& tag_of) {
    TTE_CHECK(tag_of.size() == items_.size(), "RankReads", "got ", tag_of.size(), " tags of ", items_.size(), " items");
    std::map<Tag, uint64_t> numbers;
    std::vector<ShareTag> tags;
    std::vector<WantedRead> reads;
    own_bytes_ = 0;
    for (size_t position = 0; position < items_.size(); ++position) {
      const Item& item = items_[position];
      const py::object chunk = item.item.attr("storage_index").attr("index");
      if (!tag_of[position] || chunk.is_none()) {
        own_bytes_ = core::checked_add(own_bytes_, item.num_bytes());
        continue;
      }
      auto [name, device, item_bytes, is_cut, is_overwritten] = *tag_of[position];
      const auto [tag, is_new] = numbers.try_emplace({name, device, item_bytes, is_cut, is_overwritten}, tags.size());
      if (is_new) tags.push_back({name, device, item_bytes, is_cut, is_overwritten});
      reads.push_back({position, tag->second, item.key, chunk.cast<uint64_t>(),
                       item.item.attr("storage_offsets").cast<Sizes>(), item.sizes});
    }
    return core::encode_wanted(tags, reads);
  }

  // The bytes of the items that were not wanted by a message.
  int64_t own_bytes() const { return own_bytes_; }

  // Takes the coordinator's answer. What the rank reads for itself comes in equal parts.
  void share(const py::bytes& message) {
    part_.emplace(static_cast<std::string_view>(message));
    own_.assign(num_rounds(), {});
    std::vector<size_t> own;
    double total = 0, before = 0;
    for (size_t position = 0; position < items_.size(); ++position) {
      if (std::ranges::binary_search(part_->items(), position)) continue;
      own.push_back(position);
      total += static_cast<double>(items_[position].num_bytes());
    }
    const size_t last = num_rounds() - 1;
    for (const size_t position : own) {
      const double fraction = total > 0 ? before / total : 0;
      own_[std::min(last, static_cast<size_t>(fraction * static_cast<double>(num_rounds())))].push_back(position);
      before += static_cast<double>(items_[position].num_bytes());
    }
  }

  size_t num_rounds() const { return part_->rounds().size(); }
  // The items of which the rounds have all parts; the rank reads the others whole.
  const std::vector<uint64_t>& shared_items() const { return part_->items(); }

  // What the rank reads in a round.
  ItemsToRead reads(size_t round) const {
    ItemsToRead found;
    for (const SharedPart::Row& row : part_->rounds().at(round).reads) {
      append(found, items_.at(row.item), row.offsets, row.sizes);
    }
    for (const size_t position : own_.at(round)) {
      append(found, items_[position], Sizes(items_[position].sizes.size()), items_[position].sizes);
    }
    return found;
  }

  // What a round sends to those who want it too, once it is read. Args: device: the position of its name in the plan.
  Exchange exchange(size_t round, uint32_t device) const {
    const SharedPart::Exchange tables = part_->exchange(round, device);
    const auto tensors = [this](const std::vector<SharedPart::Row>& rows, const std::vector<size_t>& of_rows) {
      py::list list;
      for (const size_t position : of_rows) {
        const Item& item = items_.at(rows[position].item);
        list.append(part_of(item, rows[position].offsets, rows[position].sizes));
      }
      return list;
    };
    const auto& [reads, receives] = part_->rounds().at(round);
    return {tensors(reads, tables.sources), tensors(receives, tables.targets),
            array_of(std::span<const int64_t>(tables.sends)), array_of(std::span<const int64_t>(tables.receives))};
  }

 private:
  struct Item {
    py::object item;
    uint64_t key = 0;
    int64_t item_bytes = 1;
    Sizes sizes;

    int64_t num_bytes() const { return core::checked_mul(core::num_elements(sizes), item_bytes); }
  };

  // A box of an item's box as a read item.
  py::object part_of(const Item& of, const Sizes& offsets, const Sizes& sizes) const {
    if (sizes == of.sizes) return of.item;
    const py::object size_class = py::type::of(of.item.attr("lengths"));
    const auto moved = [&](const char* name) {
      Sizes sum = of.item.attr(name).cast<Sizes>();
      TTE_CHECK(sum.size() == offsets.size(), "RankReads", "an item has ", sum.size(), " dims, its part ",
                offsets.size());
      for (size_t dim = 0; dim < sum.size(); ++dim) sum[dim] += offsets[dim];
      return size_class(to_tuple(sum));
    };
    return replace_(of.item, py::arg("dest_offsets") = moved("dest_offsets"),
                    py::arg("storage_offsets") = moved("storage_offsets"),
                    py::arg("lengths") = size_class(to_tuple(sizes)));
  }

  void append(ItemsToRead& to, const Item& item, const Sizes& offsets, const Sizes& sizes) const {
    to.items.append(part_of(item, offsets, sizes));
    to.num_bytes = core::checked_add(to.num_bytes, core::checked_mul(core::num_elements(sizes), item.item_bytes));
  }

  py::object replace_ = py::module_::import("dataclasses").attr("replace");
  std::vector<Item> items_;
  int64_t own_bytes_ = 0;
  std::optional<SharedPart> part_;
  std::vector<std::vector<size_t>> own_;  // per round, positions of items
};

SharePlan plan_shared_reads(const std::vector<py::bytes>& wanted, std::vector<int64_t> own_bytes,
                            std::vector<uint32_t> hosts) {
  std::vector<std::string_view> messages;
  for (const py::bytes& message : wanted) messages.push_back(static_cast<std::string_view>(message));
  const py::gil_scoped_release release;
  return {messages, std::move(own_bytes), std::move(hosts)};
}

}  // namespace

void define_shared_reads(py::module_& module) {
  py::class_<ItemsToRead>(module, "ItemsToRead")
      .def_readonly("items", &ItemsToRead::items)
      .def_readonly("num_bytes", &ItemsToRead::num_bytes);
  py::class_<Exchange>(module, "SharedExchange", "Arguments of ops.exchange_runs_; its tensors as items.")
      .def_readonly("sources", &Exchange::sources)
      .def_readonly("targets", &Exchange::targets)
      .def_readonly("sends", &Exchange::sends)
      .def_readonly("receives", &Exchange::receives);
  py::class_<RankReads>(module, "RankReads", "What one rank reads of the tensors of a checkpoint.")
      .def(py::init<const py::list&, const py::object&>(), py::arg("items"), py::arg("metadata"))
      .def_property_readonly("items", &RankReads::items)
      .def_property_readonly("own_bytes", &RankReads::own_bytes)
      .def_property_readonly("num_rounds", &RankReads::num_rounds)
      .def_property_readonly("shared_items", &RankReads::shared_items)
      .def("wanted", &RankReads::wanted, py::arg("tag_of"))
      .def("share", &RankReads::share, py::arg("message"))
      .def("reads", &RankReads::reads, py::arg("round"))
      .def("exchange", &RankReads::exchange, py::arg("round"), py::arg("device"));
  py::class_<SharePlan>(module, "SharePlan", "Who reads what for whom; see csrc/core/shared_reads.h.")
      .def(py::init(&plan_shared_reads), py::arg("wanted"), py::arg("own_bytes"), py::arg("hosts"))
      .def_property_readonly("wanted_bytes", &SharePlan::wanted_bytes)
      .def_property_readonly("repeated_bytes", &SharePlan::repeated_bytes)
      .def_property_readonly("shared_bytes", &SharePlan::shared_bytes)
      .def_property_readonly("devices", &SharePlan::devices)
      .def_property_readonly("bytes_between", &SharePlan::bytes_between)
      .def("assign", &SharePlan::assign, py::call_guard<py::gil_scoped_release>(), py::arg("most_rounds"))
      .def("part_message", [](const SharePlan& plan, int64_t rank) { return py::bytes(plan.part_message(rank)); });
}

}  // namespace torchtitan_ext::bindings
