// A checkpoint's metadata for Python: columns that give plain values for what is asked, no objects of torch.
#include "bindings/metadata.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/convert.h"
#include "bindings/plain_values.h"
#include "core/check.h"
#include "core/metadata_pickle.h"
#include "core/metadata_summary.h"
#include "storage/metadata_tables.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using namespace core;  // NOLINT: this file only translates that namespace

template <typename Member>
const Member& at(const std::vector<Member>& members, size_t number) {
  if (number >= members.size()) throw py::index_error("metadata has " + std::to_string(members.size()) + " of them");
  return members[number];
}

// Throws UnicodeDecodeError, a ValueError, here and not when an entry is asked for.
void check_names(const MetadataColumns& columns, size_t first = 0) {
  for (size_t number = first; number < columns.names.size(); ++number) {
    to_str(columns.names[static_cast<uint32_t>(number)]);
  }
}

// ---- from Python ----
uint32_t add_name(MetadataColumns& columns, const py::handle& name) { return columns.names.add(to_utf8(name)); }

// The number of a torch.Size; none where it is something else.
std::optional<uint32_t> add_sizes(MetadataColumns& columns, const py::handle& sizes, const py::handle& size_class) {
  if (!py::type::handle_of(sizes).is(size_class)) return std::nullopt;
  std::vector<int64_t> numbers;
  for (Py_ssize_t dim = 0; dim < PyTuple_GET_SIZE(sizes.ptr()); ++dim) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), dim)));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  return columns.sizes.add(numbers);
}

std::optional<uint32_t> add_chunk_list(MetadataColumns& columns, const py::list& list, const py::handle& chunk_class,
                                       const py::handle& size_class) {
  const py::str offsets_name("offsets"), sizes_name("sizes");
  std::vector<SavedChunk> chunks;
  for (const py::handle chunk : list) {
    if (!py::type::handle_of(chunk).is(chunk_class)) return std::nullopt;
    const auto offsets = add_sizes(columns, chunk.attr(offsets_name), size_class);
    const auto sizes = add_sizes(columns, chunk.attr(sizes_name), size_class);
    if (!offsets || !sizes) return std::nullopt;
    chunks.push_back({*offsets, *sizes});
  }
  return columns.add_chunk_list(chunks);
}

void add_tensor_key(MetadataColumns& columns, const py::str& fqn, const py::handle& sizes, const py::str& dtype,
                    const py::str& layout, int64_t memory_format, bool requires_grad, bool pin_memory,
                    uint32_t chunk_list) {
  const auto of_sizes = add_sizes(columns, sizes, py::type::handle_of(sizes));
  columns.add_key({.fqn = add_name(columns, fqn),
                   .is_tensor = true,
                   .sizes = *of_sizes,
                   .dtype = add_name(columns, dtype),
                   .layout = add_name(columns, layout),
                   .memory_format = memory_format,
                   .requires_grad = requires_grad,
                   .pin_memory = pin_memory,
                   .chunk_list = chunk_list});
}

void add_records(MetadataColumns& columns, std::string name, const py::bytes& records, int64_t footer_offset) {
  storage::SavedFile file;
  file.name = std::move(name);
  file.footer_offset = footer_offset;
  file.records = static_cast<std::string_view>(records);
  const size_t num_names = columns.names.size();
  {
    py::gil_scoped_release release;
    storage::add_records(file, columns);
  }
  check_names(columns, num_names);
}

// ---- to Python ----
py::list names_of_keys(const MetadataColumns& columns) {
  py::list names;
  for (const SavedKey& key : columns.keys()) names.append(to_str(columns.names[key.fqn]));
  return names;
}

py::object key_at(const MetadataColumns& columns, size_t number) {
  const SavedKey& key = at(columns.keys(), number);
  if (!key.is_tensor) return py::none();
  return py::make_tuple(to_tuple(columns.sizes[key.sizes]), to_str(columns.names[key.dtype]),
                        to_str(columns.names[key.layout]), key.memory_format, key.requires_grad, key.pin_memory,
                        key.chunk_list);
}

py::list chunk_list_at(const MetadataColumns& columns, size_t number) {
  if (number >= columns.chunk_lists().size()) throw py::index_error("there is no such chunk list");
  py::list chunks;
  for (const SavedChunk& chunk : columns.chunk_lists()[number]) {
    chunks.append(py::make_tuple(to_tuple(columns.sizes[chunk.offsets]), to_tuple(columns.sizes[chunk.sizes])));
  }
  return chunks;
}

py::object to_offsets(const MetadataColumns& columns, uint32_t offsets) {
  return offsets == SavedPart::kNone ? py::object(py::none()) : to_tuple(columns.sizes[offsets]);
}

py::tuple index_of_part(const MetadataColumns& columns, size_t number) {
  const SavedPart& part = at(columns.parts(), number);
  const py::object index = part.index == SavedPart::kNoIndex ? py::object(py::none()) : py::int_(part.index);
  return py::make_tuple(to_str(columns.names[part.fqn]), to_offsets(columns, part.offsets), index);
}

py::tuple place_of_part(const MetadataColumns& columns, size_t number) {
  const SavedPart& part = at(columns.parts(), number);
  py::object transforms = py::none();
  if (part.transforms != SavedPart::kNone) {
    py::list names;
    for (const uint32_t name : columns.transforms()[part.transforms]) names.append(to_str(columns.names[name]));
    transforms = names;
  }
  return py::make_tuple(to_str(columns.names[part.path]), part.offset_bytes, part.length_bytes, transforms);
}

py::list describe_keys(const MetadataColumns& columns) {
  const std::vector<PartSum> sums = sum_parts_by_key(columns);
  // Many keys share dtype and sizes: one object each.
  std::unordered_map<uint32_t, py::object> dtypes, sizes;
  const auto shared = [](auto& known, uint32_t number, const auto& make) -> const py::object& {
    const auto [at, is_new] = known.try_emplace(number);
    if (is_new) at->second = make();
    return at->second;
  };
  py::list rows;
  for (size_t number = 0; number < sums.size(); ++number) {
    const SavedKey& key = columns.keys()[number];
    const py::str name = to_str(columns.names[key.fqn]);
    if (!key.is_tensor) {
      rows.append(py::make_tuple(name, py::none(), py::none(), sums[number].num_parts, sums[number].num_bytes));
      continue;
    }
    rows.append(py::make_tuple(name, shared(dtypes, key.dtype, [&] { return to_str(columns.names[key.dtype]); }),
                               shared(sizes, key.sizes, [&] { return to_tuple(columns.sizes[key.sizes]); }),
                               columns.chunk_lists()[key.chunk_list].size(), sums[number].num_bytes));
  }
  return rows;
}

py::list describe_files(const MetadataColumns& columns) {
  py::list rows;
  for (const auto& [path, sum] : sum_parts_by_file(columns)) {
    rows.append(py::make_tuple(to_str(columns.names[path]), sum.num_parts, sum.num_bytes, sum.end));
  }
  return rows;
}

py::list unplaced_chunks(const MetadataColumns& columns, size_t limit) {
  py::list rows;
  for (const auto& [key, offsets] : find_unplaced(columns, limit)) {
    rows.append(py::make_tuple(to_str(columns.names[columns.keys()[key].fqn]), to_offsets(columns, offsets)));
  }
  return rows;
}

py::list cover_defects(const MetadataColumns& columns) {
  std::vector<UncoveredKey> found;
  {
    py::gil_scoped_release release;
    found = find_uncovered(columns);
  }
  py::list rows;
  for (const auto& [key, defect] : found)
    rows.append(py::make_tuple(key, name_of(defect.kind), to_tuple(defect.element)));
  return rows;
}

// As bytes of uint32, for numpy.
py::bytes paths_of_parts(const MetadataColumns& columns, size_t number) {
  const std::vector<uint32_t> paths = columns.paths_of_parts(at(columns.keys(), number));
  return py::bytes(reinterpret_cast<const char*>(paths.data()), paths.size() * sizeof(uint32_t));
}

std::optional<size_t> found(uint32_t number) {
  return number == HashedNumbers::kNone ? std::nullopt : std::optional<size_t>(number);
}

// ---- files ----
py::tuple read_metadata_pickle(const py::bytes& data) {
  const std::string_view view(data);
  std::optional<PickleGraph> graph;
  MetadataColumns columns;
  PlainMetadata plain;
  {
    py::gil_scoped_release release;
    graph.emplace(view);
    plain = read_metadata(*graph, columns);
  }
  check_names(columns);
  const py::object version = plain.version.empty() ? py::object(py::none()) : py::object(to_str(plain.version));
  return py::make_tuple(std::move(columns), plain_of_pickle(*graph, plain.planner_data),
                        plain_of_pickle(*graph, plain.storage_meta), version);
}

void write_storage_meta(const py::dict& fields, PickleWriter& out) {
  for (const auto& [name, value] : fields) {
    write_plain(name, out);
    if (py::isinstance<py::tuple>(value)) {
      write_path(out, to_utf8(value[py::int_(0)]));
    } else {
      write_plain(value, out);
    }
  }
}

py::object write_metadata_pickle(const MetadataColumns& columns, const py::object& planner_data,
                                 const py::dict& storage_meta, const std::string& version) {
  const PlainWriters plain{[&](PickleWriter& out) { write_plain(planner_data, out); },
                           [&](PickleWriter& out) { write_storage_meta(storage_meta, out); }, version};
  try {
    return py::bytes(write_metadata(columns, plain));
  } catch (const NotPlain&) {
    return py::none();
  }
}

py::object write_tables(const MetadataColumns& columns, const py::object& planner_data, const py::dict& storage_meta,
                        const std::string& version) {
  storage::ByteWriter out;
  storage::encode_columns(columns, out);
  storage::PlainEncoder plain(out);
  try {
    write_plain(py::make_tuple(planner_data, storage_meta, version), plain);
  } catch (const NotPlain&) {
    return py::none();
  }
  return py::bytes(out.bytes());
}

py::tuple read_tables(const py::bytes& data, const std::string& where) {
  storage::ByteReader reader(data, where + ", tables");
  MetadataColumns columns = storage::parse_columns(reader);
  check_names(columns);
  const py::object plain = plain_of_bytes(reader);
  const auto is_whole = [&] {
    return py::isinstance<py::tuple>(plain) && py::len(plain) == 3 && py::isinstance<py::dict>(plain[py::int_(1)]) &&
           py::isinstance<py::str>(plain[py::int_(2)]);
  };
  if (!is_whole() || reader.left() != 0) {
    storage::throw_format_error(reader.where(), reader.byte(), "the tables do not end with their three plain values");
  }
  return py::make_tuple(std::move(columns), plain[py::int_(0)], plain[py::int_(1)], plain[py::int_(2)]);
}

}  // namespace

void define_metadata(py::module_& module) {
  py::class_<MetadataColumns>(module, "MetadataColumns")
      .def(py::init<>())
      .def("add_chunk_list", &add_chunk_list, py::arg("chunks"), py::arg("chunk_class"), py::arg("size_class"))
      .def("add_bytes_key",
           [](MetadataColumns& self, const py::str& fqn) { self.add_key({.fqn = add_name(self, fqn)}); })
      .def("add_tensor_key", &add_tensor_key)
      .def("add_records", &add_records, py::arg("name"), py::arg("records"), py::arg("footer_offset"))
      .def_property_readonly("num_keys", [](const MetadataColumns& self) { return self.keys().size(); })
      .def_property_readonly("num_parts", [](const MetadataColumns& self) { return self.parts().size(); })
      .def("names_of_keys", &names_of_keys)
      .def("find_key",
           [](const MetadataColumns& self, const py::str& fqn) { return found(self.find_key(to_utf8(fqn))); })
      .def("key", &key_at)
      .def("chunk_list", &chunk_list_at)
      .def("describe_keys", &describe_keys)
      .def("describe_files", &describe_files)
      .def("unplaced_chunks", &unplaced_chunks, py::arg("limit"))
      .def("cover_defects", &cover_defects)
      .def("find_part",
           [](const MetadataColumns& self, const py::str& fqn, const std::optional<Sizes>& offsets) {
             return found(self.find_part(to_utf8(fqn), offsets));
           })
      .def("index_of_part", &index_of_part)
      .def("place_of_part", &place_of_part)
      .def("paths_of_parts", &paths_of_parts)
      .def("to_pickle", &write_metadata_pickle, py::arg("planner_data"), py::arg("storage_meta"), py::arg("version"))
      .def("to_tables", &write_tables, py::arg("planner_data"), py::arg("storage_meta"), py::arg("version"));
  module.def("read_metadata_pickle", &read_metadata_pickle, py::arg("data"));
  module.def("read_metadata_tables", &read_tables, py::arg("data"), py::arg("where"));
  module.def("leads_outside", &leads_outside, py::arg("path"));
}

}  // namespace torchtitan_ext::bindings
