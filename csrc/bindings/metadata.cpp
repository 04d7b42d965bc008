// A checkpoint's metadata for Python: columns that give plain values for what is asked, no objects of torch.
#include "bindings/metadata.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/plain_values.h"
#include "core/check.h"
#include "core/metadata_pickle.h"
#include "core/metadata_summary.h"
#include "storage/element_types.h"
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

// ---- what Python gets, by name ----
struct TensorKey {
  py::tuple sizes;
  py::str dtype, layout;
  int64_t memory_format;
  bool requires_grad, pin_memory;
  uint32_t chunk_list;
  py::object strides;
};

struct Part {
  py::str fqn;
  py::object offsets, index;
  py::str path;
  int64_t offset, num_bytes;
  py::object transforms;
};

struct KeySummary {
  py::str fqn;
  py::object dtype, sizes;
  int64_t num_bytes, num_chunks;
};

struct ChunkSummary {
  py::object offsets, sizes, file, offset, num_bytes;
};

struct FileSummary {
  py::str path;
  int64_t num_parts, num_bytes, end;
};

struct UnplacedPart {
  py::str fqn;
  py::object offsets;
};

struct Uncovered {
  py::str fqn;
  py::tuple sizes;
  std::string defect;
};

struct ParsedMetadata {
  MetadataColumns columns;
  py::object planner_data, storage_meta, version;
  int64_t num_unknown_properties = 0;
};

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

// The entries of a metadata; null where one is of another class than these. The class of sizes is torch.Size, and each
// memory format has DCP's number.
std::unique_ptr<MetadataColumns> columns_of(const py::object& entries, const py::handle& bytes_class,
                                            const py::handle& tensor_class, const py::handle& properties_class,
                                            const py::handle& chunk_class, const py::handle& size_class,
                                            const py::dict& memory_formats) {
  const auto is_a = [](const py::handle& value, const py::handle& of_class) {
    return py::type::handle_of(value).is(of_class);
  };
  auto columns = std::make_unique<MetadataColumns>();
  std::unordered_map<PyObject*, std::optional<uint32_t>> lists;
  for (const py::handle item : entries.attr("items")()) {
    const auto [fqn, entry] = item.cast<std::pair<py::object, py::object>>();
    if (!PyUnicode_CheckExact(fqn.ptr())) return nullptr;
    if (is_a(entry, bytes_class)) {
      columns->add_key({.fqn = add_name(*columns, fqn)});
      continue;
    }
    if (!is_a(entry, tensor_class)) return nullptr;
    const py::object chunks = entry.attr("chunks");
    if (!PyList_CheckExact(chunks.ptr())) return nullptr;
    const auto [list, is_new] = lists.try_emplace(chunks.ptr());
    if (is_new) list->second = add_chunk_list(*columns, py::list(chunks), chunk_class, size_class);
    const py::object properties = entry.attr("properties");
    if (!list->second || !is_a(properties, properties_class)) return nullptr;
    const py::object requires_grad = properties.attr("requires_grad"), pin_memory = properties.attr("pin_memory");
    const std::optional<uint32_t> sizes = add_sizes(*columns, entry.attr("size"), size_class);
    if (!sizes || !PyBool_Check(requires_grad.ptr()) || !PyBool_Check(pin_memory.ptr())) return nullptr;
    const py::str dtype = py::str(properties.attr("dtype")).attr("removeprefix")("torch.");
    columns->add_key({.fqn = add_name(*columns, fqn),
                      .is_tensor = true,
                      .sizes = *sizes,
                      .dtype = add_name(*columns, dtype),
                      .layout = add_name(*columns, py::str(properties.attr("layout"))),
                      .memory_format = memory_formats[properties.attr("memory_format")].cast<int64_t>(),
                      .requires_grad = requires_grad.cast<bool>(),
                      .pin_memory = pin_memory.cast<bool>(),
                      .chunk_list = *list->second});
  }
  return columns;
}

uint32_t add_boxes(MetadataColumns& columns, const std::vector<BoxTuple>& boxes) {
  std::vector<SavedChunk> chunks;
  for (const auto& [offsets, sizes] : boxes) chunks.push_back({columns.sizes.add(offsets), columns.sizes.add(sizes)});
  return columns.add_chunk_list(chunks);
}

void add_tensor(MetadataColumns& columns, const py::str& fqn, const std::string& dtype, const Sizes& sizes,
                uint32_t chunk_list, const std::optional<TensorKey>& like) {
  if (chunk_list >= columns.chunk_lists().size()) throw py::index_error("there is no such chunk list");
  SavedKey key{.fqn = add_name(columns, fqn),
               .is_tensor = true,
               .sizes = columns.sizes.add(sizes),
               .dtype = columns.names.add(dtype),
               .layout = like ? add_name(columns, like->layout) : columns.names.add("torch.strided"),
               .chunk_list = chunk_list};
  if (like) {
    key.memory_format = like->memory_format;
    key.requires_grad = like->requires_grad;
    key.pin_memory = like->pin_memory;
  }
  columns.add_key(key);
}

void add_records(MetadataColumns& columns, const storage::SavedFile& file) {
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

std::optional<TensorKey> key_at(const MetadataColumns& columns, size_t number) {
  const SavedKey& key = at(columns.keys(), number);
  if (!key.is_tensor) return std::nullopt;
  return TensorKey{
      to_tuple(columns.sizes[key.sizes]),
      to_str(columns.names[key.dtype]),
      to_str(columns.names[key.layout]),
      key.memory_format,
      key.requires_grad,
      key.pin_memory,
      key.chunk_list,
      key.strides == SavedKey::kNoStrides ? py::object(py::none()) : to_tuple(columns.strides[key.strides])};
}

// Nothing where there is no such key.
std::optional<bool> is_tensor(const MetadataColumns& columns, const py::str& fqn) {
  const uint32_t number = columns.find_key(to_utf8(fqn));
  return number == HashedNumbers::kNone ? std::nullopt : std::optional(columns.keys()[number].is_tensor);
}

// Of all keys; a value counts as one.
size_t num_chunks(const MetadataColumns& columns) {
  size_t sum = 0;
  for (const SavedKey& key : columns.keys()) sum += key.is_tensor ? columns.chunk_lists()[key.chunk_list].size() : 1;
  return sum;
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

Part part_at(const MetadataColumns& columns, size_t number) {
  const SavedPart& part = at(columns.parts(), number);
  py::object transforms = py::none();
  if (part.transforms != SavedPart::kNone) {
    py::list names;
    for (const uint32_t name : columns.transforms()[part.transforms]) names.append(to_str(columns.names[name]));
    transforms = names;
  }
  return {to_str(columns.names[part.fqn]),
          to_offsets(columns, part.offsets),
          part.index == SavedPart::kNoIndex ? py::object(py::none()) : py::int_(part.index),
          to_str(columns.names[part.path]),
          part.offset_bytes,
          part.length_bytes,
          transforms};
}

std::vector<KeySummary> describe_keys(const MetadataColumns& columns) {
  const std::vector<PartSum> sums = sum_parts_by_key(columns);
  // Many keys share dtype and sizes: one object each.
  std::unordered_map<uint32_t, py::object> dtypes, sizes;
  const auto shared = [](auto& known, uint32_t number, const auto& make) -> const py::object& {
    const auto [at, is_new] = known.try_emplace(number);
    if (is_new) at->second = make();
    return at->second;
  };
  std::vector<KeySummary> rows;
  for (size_t number = 0; number < sums.size(); ++number) {
    const SavedKey& key = columns.keys()[number];
    const auto [num_parts, num_bytes, end] = sums[number];
    KeySummary& row =
        rows.emplace_back(KeySummary{to_str(columns.names[key.fqn]), py::none(), py::none(), num_bytes, num_parts});
    if (!key.is_tensor) continue;
    row.dtype = shared(dtypes, key.dtype, [&] { return to_str(columns.names[key.dtype]); });
    row.sizes = shared(sizes, key.sizes, [&] { return to_tuple(columns.sizes[key.sizes]); });
    row.num_chunks = static_cast<int64_t>(columns.chunk_lists()[key.chunk_list].size());
    const storage::ElementType* type = storage::find_element_type(columns.names[key.dtype]);
    if (type == nullptr) continue;
    row.num_bytes = type->item_bytes;
    for (const int64_t size : columns.sizes[key.sizes]) row.num_bytes = storage::capped_mul(row.num_bytes, size);
  }
  return rows;
}

std::vector<FileSummary> describe_files(const MetadataColumns& columns) {
  std::vector<FileSummary> rows;
  for (const auto& [path, sum] : sum_parts_by_file(columns)) {
    rows.push_back({to_str(columns.names[path]), sum.num_parts, sum.num_bytes, sum.end});
  }
  return rows;
}

std::vector<UnplacedPart> unplaced_chunks(const MetadataColumns& columns, size_t limit) {
  std::vector<UnplacedPart> rows;
  for (const auto& [key, offsets] : find_unplaced(columns, limit)) {
    rows.push_back({to_str(columns.names[columns.keys()[key].fqn]), to_offsets(columns, offsets)});
  }
  return rows;
}

std::vector<Uncovered> cover_defects(const MetadataColumns& columns) {
  std::vector<UncoveredKey> found;
  {
    py::gil_scoped_release release;
    found = find_uncovered(columns);
  }
  std::vector<Uncovered> rows;
  for (const auto& [number, defect] : found) {
    const SavedKey& key = columns.keys()[number];
    rows.push_back({to_str(columns.names[key.fqn]), to_tuple(columns.sizes[key.sizes]), defect_text(defect)});
  }
  return rows;
}

std::optional<size_t> found(uint32_t number) {
  return number == HashedNumbers::kNone ? std::nullopt : std::optional<size_t>(number);
}

// The chunks of a tensor, or the one place of a value.
std::vector<ChunkSummary> describe_chunks(const MetadataColumns& columns, const py::str& fqn) {
  std::vector<ChunkSummary> rows;
  const auto add = [&](uint32_t name, uint32_t offsets, py::object sizes) {
    ChunkSummary& row = rows.emplace_back(
        ChunkSummary{to_offsets(columns, offsets), std::move(sizes), py::none(), py::none(), py::none()});
    const std::optional<size_t> number = found(columns.find_part(name, offsets));
    if (!number) return;
    const SavedPart& part = columns.parts()[*number];
    row.file = to_str(columns.names[part.path]);
    row.offset = py::int_(part.offset_bytes);
    row.num_bytes = py::int_(part.length_bytes);
  };
  const SavedKey& key = at(columns.keys(), columns.find_key(to_utf8(fqn)));
  if (!key.is_tensor) {
    add(key.fqn, SavedPart::kNone, py::none());
    return rows;
  }
  for (const SavedChunk& chunk : columns.chunk_lists()[key.chunk_list]) {
    add(key.fqn, chunk.offsets, to_tuple(columns.sizes[chunk.sizes]));
  }
  return rows;
}

// SavedParts with the columns that it looks at.
struct PartsOfFiles {
  explicit PartsOfFiles(const MetadataColumns& columns) : columns(columns), parts(columns) {}

  std::vector<Part> of_file(const py::str& path) {
    std::vector<Part> found;
    for (const uint32_t number : parts.of_file(to_utf8(path))) found.push_back(part_at(columns, number));
    return found;
  }

  std::optional<std::pair<py::str, py::tuple>> chunk_of(const Part& part) {
    const uint32_t number = columns.find_key(to_utf8(part.fqn));
    if (number == HashedNumbers::kNone || part.offsets.is_none() || !columns.keys()[number].is_tensor) {
      return std::nullopt;
    }
    const SavedKey& key = columns.keys()[number];
    const uint32_t sizes = parts.sizes_of_chunk(key, columns.sizes.find(part.offsets.cast<Sizes>()));
    if (sizes == SavedPart::kNone) return std::nullopt;
    return std::pair(to_str(columns.names[key.dtype]), to_tuple(columns.sizes[sizes]));
  }

  const MetadataColumns& columns;
  SavedParts parts;
};

// ---- files ----
ParsedMetadata read_metadata_pickle(const py::bytes& data) {
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
  return {std::move(columns), plain_of_pickle(*graph, plain.planner_data), plain_of_pickle(*graph, plain.storage_meta),
          version, plain.num_unknown_properties};
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

PlainWriters plain_writers(const py::object& planner_data, const py::dict& storage_meta, const std::string& version) {
  return {[&](PickleWriter& out) { write_plain(planner_data, out); },
          [&](PickleWriter& out) { write_storage_meta(storage_meta, out); }, version};
}

py::object write_metadata_pickle(const MetadataColumns& columns, const py::object& planner_data,
                                 const py::dict& storage_meta, const std::string& version) {
  try {
    return py::bytes(write_metadata(columns, plain_writers(planner_data, storage_meta, version)));
  } catch (const NotPlain&) {
    return py::none();
  }
}

ParsedMetadata read_tables(const py::bytes& data, const std::string& where) {
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
  return {std::move(columns), plain[py::int_(0)], plain[py::int_(1)], plain[py::int_(2)]};
}

void define_rows(py::module_& module) {
  py::class_<TensorKey>(module, "TensorKey")
      .def_readonly("sizes", &TensorKey::sizes)
      .def_readonly("dtype", &TensorKey::dtype)
      .def_readonly("layout", &TensorKey::layout)
      .def_readonly("memory_format", &TensorKey::memory_format)
      .def_readonly("requires_grad", &TensorKey::requires_grad)
      .def_readonly("pin_memory", &TensorKey::pin_memory)
      .def_readonly("chunk_list", &TensorKey::chunk_list)
      .def_readonly("strides", &TensorKey::strides);
  py::class_<Part>(module, "Part")
      .def(py::init([](py::str fqn, py::object offsets, py::str path, int64_t offset, int64_t num_bytes) {
             return Part{std::move(fqn), std::move(offsets), py::none(), std::move(path),
                         offset,         num_bytes,          py::none()};
           }),
           py::arg("fqn"), py::arg("offsets"), py::arg("path"), py::arg("offset"), py::arg("num_bytes"))
      .def_readonly("fqn", &Part::fqn)
      .def_readonly("offsets", &Part::offsets)
      .def_readonly("index", &Part::index)
      .def_readonly("path", &Part::path)
      .def_readonly("offset", &Part::offset)
      .def_readonly("num_bytes", &Part::num_bytes)
      .def_readonly("transforms", &Part::transforms);
  py::class_<KeySummary>(module, "KeySummary")
      .def(py::init<py::str, py::object, py::object, int64_t, int64_t>(), py::arg("fqn"), py::arg("dtype"),
           py::arg("sizes"), py::arg("num_bytes"), py::arg("num_chunks"))
      .def_readonly("fqn", &KeySummary::fqn)
      .def_readonly("dtype", &KeySummary::dtype)
      .def_readonly("sizes", &KeySummary::sizes)
      .def_readonly("num_chunks", &KeySummary::num_chunks)
      .def_readonly("num_bytes", &KeySummary::num_bytes);
  py::class_<ChunkSummary>(module, "ChunkSummary")
      .def(py::init<py::object, py::object, py::object, py::object, py::object>(), py::arg("offsets"), py::arg("sizes"),
           py::arg("file"), py::arg("offset"), py::arg("num_bytes"))
      .def_readonly("offsets", &ChunkSummary::offsets)
      .def_readonly("sizes", &ChunkSummary::sizes)
      .def_readonly("file", &ChunkSummary::file)
      .def_readonly("offset", &ChunkSummary::offset)
      .def_readonly("num_bytes", &ChunkSummary::num_bytes);
  py::class_<FileSummary>(module, "FileSummary")
      .def_readonly("path", &FileSummary::path)
      .def_readonly("num_parts", &FileSummary::num_parts)
      .def_readonly("num_bytes", &FileSummary::num_bytes)
      .def_readonly("end", &FileSummary::end);
  py::class_<UnplacedPart>(module, "UnplacedPart")
      .def_readonly("fqn", &UnplacedPart::fqn)
      .def_readonly("offsets", &UnplacedPart::offsets);
  py::class_<Uncovered>(module, "UncoveredKey")
      .def_readonly("fqn", &Uncovered::fqn)
      .def_readonly("sizes", &Uncovered::sizes)
      .def_readonly("defect", &Uncovered::defect);
  py::class_<ParsedMetadata>(module, "ParsedMetadata")
      .def_readonly("columns", &ParsedMetadata::columns)
      .def_readonly("planner_data", &ParsedMetadata::planner_data)
      .def_readonly("storage_meta", &ParsedMetadata::storage_meta)
      .def_readonly("version", &ParsedMetadata::version)
      .def_readonly("num_unknown_properties", &ParsedMetadata::num_unknown_properties);
}

}  // namespace

void define_metadata(py::module_& module) {
  define_rows(module);
  py::class_<MetadataColumns>(module, "MetadataColumns")
      .def(py::init<>())
      .def("add_records", &add_records, py::arg("file"))
      .def("add_chunk_list", &add_boxes, py::arg("boxes"))
      .def("add_tensor", &add_tensor, py::arg("fqn"), py::arg("dtype"), py::arg("sizes"), py::arg("chunk_list"),
           py::arg("like") = py::none())
      .def(
          "add_value", [](MetadataColumns& self, const py::str& fqn) { self.add_key({.fqn = add_name(self, fqn)}); },
          py::arg("fqn"))
      .def_property_readonly("num_keys", [](const MetadataColumns& self) { return self.keys().size(); })
      .def_property_readonly("num_parts", [](const MetadataColumns& self) { return self.parts().size(); })
      .def_property_readonly("num_chunks", &num_chunks)
      .def("keys_only", &MetadataColumns::keys_only)
      .def("names_of_keys", &names_of_keys)
      .def("find_key",
           [](const MetadataColumns& self, const py::str& fqn) { return found(self.find_key(to_utf8(fqn))); })
      .def("is_tensor", &is_tensor, py::arg("fqn"))
      .def("key", &key_at)
      .def("chunk_list", &chunk_list_at)
      .def("describe_keys", &describe_keys)
      .def("describe_chunks", &describe_chunks, py::arg("fqn"))
      .def("describe_files", &describe_files)
      .def("unplaced_chunks", &unplaced_chunks, py::arg("limit"))
      .def("cover_defects", &cover_defects)
      .def("find_part",
           [](const MetadataColumns& self, const py::str& fqn, const std::optional<Sizes>& offsets) {
             return found(self.find_part(to_utf8(fqn), offsets));
           })
      .def("part", &part_at)
      .def("to_pickle", &write_metadata_pickle, py::arg("planner_data"), py::arg("storage_meta"), py::arg("version"));
  py::class_<PartsOfFiles>(module, "SavedParts")
      .def(py::init<const MetadataColumns&>(), py::arg("columns"), py::keep_alive<1, 2>())
      .def("of_file", &PartsOfFiles::of_file, py::arg("path"))
      .def("chunk_of", &PartsOfFiles::chunk_of, py::arg("part"));
  module.def("columns_of", &columns_of, py::arg("entries"), py::arg("bytes_class"), py::arg("tensor_class"),
             py::arg("properties_class"), py::arg("chunk_class"), py::arg("size_class"), py::arg("memory_formats"));
  module.attr("NUM_PROPERTIES") = kKnownProperties;
  module.def("read_metadata_pickle", &read_metadata_pickle, py::arg("data"));
  module.def("read_metadata_tables", &read_tables, py::arg("data"), py::arg("where"));
  module.def("leads_outside", &leads_outside, py::arg("path"));
}

}  // namespace torchtitan_ext::bindings
