// Files for Python: converts arguments, releases the GIL, decides nothing. Addresses of tensors travel as integers; the
// caller keeps the tensors alive.
#include "bindings/storage.h"

#include <pybind11/complex.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/convert.h"
#include "core/block_ledger.h"
#include "core/torch_pickle.h"
#include "storage/casts.h"
#include "storage/digest.h"
#include "storage/element_types.h"
#include "storage/errors.h"
#include "storage/file.h"
#include "storage/footer.h"
#include "storage/index.h"
#include "storage/numbers.h"
#include "storage/parallel.h"
#include "storage/record_writer.h"
#include "storage/run_reader.h"
#include "storage/run_writer.h"
#include "storage/tensor_record.h"

namespace py = pybind11;

namespace torchtitan_ext::bindings {
namespace {

using core::Sizes;
using namespace storage;  // NOLINT: this file only translates that namespace

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Key = std::tuple<py::str, std::optional<Sizes>, std::optional<int64_t>>;  // fqn, offsets, index hint
using Notes = std::vector<std::pair<std::string, std::string>>;

SaveId to_save_id(std::string_view bytes) {
  SaveId id{};
  TTE_CHECK(bytes.size() == id.size(), "save_id", "has ", bytes.size(), " bytes, expected ", id.size());
  std::ranges::copy(bytes, id.begin());
  return id;
}

py::bytes to_bytes(const SaveId& id) { return py::bytes(reinterpret_cast<const char*>(id.data()), id.size()); }

SavedRecord to_record(const Key& key, std::string dtype, Sizes sizes) {
  SavedRecord record;
  record.fqn = to_utf8(std::get<0>(key));
  record.has_offsets = std::get<1>(key).has_value();
  record.offsets = std::get<1>(key).value_or(Sizes(sizes.size(), 0));
  record.index_hint = std::get<2>(key).value_or(-1);
  record.dtype = std::move(dtype);
  record.sizes = std::move(sizes);
  TTE_CHECK(record.offsets.size() == record.sizes.size(), record.fqn, "has ", record.offsets.size(), " offsets and ",
            record.sizes.size(), " sizes");
  return record;
}

void define_writer(py::module_& module) {
  py::class_<ElementType>(module, "ElementType")
      .def(py::init<std::string, std::string, int64_t>(), py::arg("storage_class"), py::arg("dtype"),
           py::arg("item_bytes"))
      .def_readonly("item_bytes", &ElementType::item_bytes);
  module.def("element_types", [] {
    py::dict types;
    for (const auto& [dtype, type] : element_types()) types[py::str(dtype)] = type;
    return types;
  });
  py::class_<RecordWriter>(module, "RecordWriter")
      .def(py::init([](std::string path, uint32_t block_bytes, int num_threads, bool sync, bool to_memory) {
             TTE_CHECK(block_bytes > 0 && num_threads > 0, path, "got blocks of ", block_bytes, " bytes and ",
                       num_threads, " threads, expected at least 1");
             return RecordWriter(std::move(path), {block_bytes, num_threads, sync, to_memory});
           }),
           py::arg("path"), py::arg("block_bytes"), py::arg("num_threads"), py::arg("sync"),
           py::arg("to_memory") = false)
      .def(
          "add_tensor",
          [](RecordWriter& self, const Key& key, std::string dtype, Sizes sizes, const ElementType& type,
             uintptr_t address, const Sizes& strides, const std::optional<Sizes>& global_sizes) {
            self.add_tensor(to_record(key, std::move(dtype), std::move(sizes)), type, address, strides, global_sizes);
          },
          py::arg("key"), py::arg("dtype"), py::arg("sizes"), py::arg("type"), py::arg("address"), py::arg("strides"),
          py::arg("global_sizes") = py::none())
      .def(
          "begin_tensor",
          [](RecordWriter& self, const Key& key, std::string dtype, Sizes sizes, const ElementType& type,
             const std::optional<Sizes>& global_sizes) {
            self.begin_tensor(to_record(key, std::move(dtype), std::move(sizes)), type, global_sizes);
          },
          py::arg("key"), py::arg("dtype"), py::arg("sizes"), py::arg("type"), py::arg("global_sizes") = py::none())
      .def("add_bytes", &RecordWriter::add_bytes)
      .def("end_tensor", &RecordWriter::end_tensor)
      .def(
          "add_record",
          [](RecordWriter& self, const Key& key, std::string dtype, Sizes sizes, uintptr_t address, int64_t num_bytes) {
            self.add_record(to_record(key, std::move(dtype), std::move(sizes)), address, num_bytes);
          })
      .def_property_readonly("queued_bytes", &RecordWriter::queued_bytes)
      .def("write_queued", &RecordWriter::write_queued, Unlocked())
      .def("write_part", &RecordWriter::write_part, Unlocked())
      .def_property_readonly("rest", [](const RecordWriter& self) { return py::bytes(self.rest()); })
      .def("finish", [](RecordWriter& self, std::string name, std::string_view save_id, uint32_t rank) {
        const SaveId id = to_save_id(save_id);
        py::gil_scoped_release release;
        SavedFile file = self.finish(id, rank);
        file.name = std::move(name);
        return file;
      });
}

SavedFile make_file(std::string name, uint32_t rank, int64_t num_bytes, int64_t footer_offset, uint64_t footer_digest,
                    const py::bytes& records, const py::bytes& sums, const std::optional<py::bytes>& save_id) {
  SavedFile file{std::move(name),   rank, num_bytes, footer_offset, footer_digest, std::string(records),
                 std::string(sums), {}};
  if (save_id) file.save_id = to_save_id(std::string_view(*save_id));
  return file;
}

PlainTensor make_tensor(std::string dtype, Sizes sizes, std::optional<Sizes> strides, int64_t data_offset) {
  const ElementType* const type = find_element_type(dtype);
  TTE_CHECK(type != nullptr, dtype, "is no dtype of plain memory");
  TTE_CHECK(!strides || strides->size() == sizes.size(), dtype, "has other strides than sizes");
  if (!strides) strides = capped_strides(sizes);
  return {std::move(dtype), std::move(sizes), std::move(*strides), data_offset, type->item_bytes};
}

// The plain tensors in a rank file, by the offset of their records.
std::map<int64_t, PlainTensor> plain_tensors(const SavedFile& file) {
  std::map<int64_t, PlainTensor> tensors;
  parse_records(file.records, file.footer_offset, file.name, [&](const SavedRecord& one) {
    if (find_element_type(one.dtype) != nullptr) {
      tensors.insert_or_assign(one.offset, make_tensor(one.dtype, one.sizes, std::nullopt, one.data_offset));
    }
  });
  return tensors;
}

// The sums of a rank file, by the offsets of its records.
class SumsOfFile {
 public:
  explicit SumsOfFile(const SavedFile& file) : sums_(file.sums, file.name) {
    if (sums_.size() == 0) return;
    size_t position = 0;
    parse_records(file.records, file.footer_offset, file.name, [&](const SavedRecord& one) {
      if (one.is_tensor) position_of_.emplace(one.offset, position++);
    });
  }

  std::optional<uint64_t> of(int64_t record_offset, std::string_view fqn) const {
    const auto found = position_of_.find(record_offset);
    return found == position_of_.end() ? std::nullopt : sums_.of(found->second, fqn);
  }

 private:
  StoredSums sums_;
  std::unordered_map<int64_t, size_t> position_of_;
};

// An index, with its parts as Python asks for them again and again.
struct ReadIndex {
  // Throws UnicodeDecodeError where a name is no UTF-8.
  explicit ReadIndex(Index parsed) : index(std::move(parsed)) {
    for (const auto& [name, note] : index.notes) notes[py::cast(name)] = note;
    for (const SavedFile& file : index.files) files[py::cast(file.name)] = file;
  }

  py::object tensors_of(const py::str& name) const {
    if (!tensors.contains(name)) tensors[name] = plain_tensors(files[name].cast<const SavedFile&>());
    return tensors[name];
  }

  std::optional<uint64_t> sum_of(const py::str& name, int64_t offset, const std::string& fqn) {
    auto found = sums.find(name);
    if (found == sums.end()) {
      if (!files.contains(name)) return std::nullopt;
      found = sums.emplace(name, SumsOfFile(files[name].cast<const SavedFile&>())).first;
    }
    return found->second.of(offset, fqn);
  }

  Index index;
  py::dict notes, files, tensors;
  std::map<std::string, SumsOfFile> sums;
};

void define_index(py::module_& module) {
  const auto records = [](const SavedFile& self) { return py::bytes(self.records); };
  const auto sums = [](const SavedFile& self) { return py::bytes(self.sums); };
  const auto save_id = [](const SavedFile& self) {
    return self.save_id ? std::optional(to_bytes(*self.save_id)) : std::nullopt;
  };
  py::class_<SavedFile>(module, "RankFile")
      .def(py::init(&make_file), py::arg("name"), py::arg("rank"), py::arg("num_bytes"), py::arg("footer_offset"),
           py::arg("footer_digest"), py::arg("records"), py::arg("sums") = py::bytes(), py::arg("save_id") = py::none())
      .def_readonly("name", &SavedFile::name)
      .def_readonly("rank", &SavedFile::rank)
      .def_readonly("num_bytes", &SavedFile::num_bytes)
      .def_readonly("footer_offset", &SavedFile::footer_offset)
      .def_readonly("footer_digest", &SavedFile::footer_digest)
      .def_property_readonly("records", records)
      .def_property_readonly("sums", sums)
      .def_property_readonly("save_id", save_id)
      .def(py::pickle(
          [records, sums, save_id](const SavedFile& self) {
            return py::make_tuple(self.name, self.rank, self.num_bytes, self.footer_offset, self.footer_digest,
                                  records(self), sums(self), save_id(self));
          },
          [](const py::tuple& state) {
            return make_file(state[0].cast<std::string>(), state[1].cast<uint32_t>(), state[2].cast<int64_t>(),
                             state[3].cast<int64_t>(), state[4].cast<uint64_t>(), state[5].cast<py::bytes>(),
                             state[6].cast<py::bytes>(), state[7].cast<std::optional<py::bytes>>());
          }));
  py::class_<SavedRecord>(module, "SavedRecord")
      .def_property_readonly("fqn", [](const SavedRecord& self) { return to_str(self.fqn); })
      .def_property_readonly("offsets",
                             [](const SavedRecord& self) {
                               return self.has_offsets ? std::optional<py::tuple>(to_tuple(self.offsets))
                                                       : std::nullopt;
                             })
      .def_property_readonly("index",
                             [](const SavedRecord& self) {
                               return self.index_hint < 0 ? std::nullopt : std::optional<int64_t>(self.index_hint);
                             })
      .def_readonly("dtype", &SavedRecord::dtype)
      .def_property_readonly("sizes", [](const SavedRecord& self) { return to_tuple(self.sizes); })
      .def_readonly("offset", &SavedRecord::offset)
      .def_readonly("num_bytes", &SavedRecord::num_bytes)
      .def_readonly("data_offset", &SavedRecord::data_offset)
      .def_readonly("sum", &SavedRecord::sum);
  py::class_<ReadIndex>(module, "Index")
      .def_property_readonly("save_id", [](const ReadIndex& self) { return to_bytes(self.index.save_id); })
      .def_property_readonly("metadata_bytes", [](const ReadIndex& self) { return self.index.metadata_bytes; })
      .def_property_readonly("metadata_digest", [](const ReadIndex& self) { return self.index.metadata_digest; })
      .def_property_readonly("tables", [](const ReadIndex& self) { return py::bytes(self.index.tables); })
      .def_readonly("notes", &ReadIndex::notes)
      .def_readonly("files", &ReadIndex::files)
      .def("tensors", &ReadIndex::tensors_of, py::arg("name"))
      .def_property_readonly("has_sums", [](const ReadIndex& self) { return self.index.has_sums; })
      .def("sum_of", &ReadIndex::sum_of, py::arg("name"), py::arg("offset"), py::arg("fqn"))
      .def(py::pickle([](const ReadIndex& self) { return py::bytes(encode_index(self.index)); },
                      [](const py::bytes& state) { return ReadIndex(parse_index(std::string_view(state), "index")); }));
}

py::bytes encode_index_py(std::string_view save_id, int64_t metadata_bytes, uint64_t metadata_digest, Notes notes,
                          std::vector<SavedFile> files, bool has_sums) {
  return encode_index(
      {to_save_id(save_id), metadata_bytes, metadata_digest, std::move(notes), std::move(files), {}, has_sums});
}

// Opens a file that ends with a footer and takes the checksums from there.
int64_t add_checked_file(RunReader& reader, const std::string& path, const SavedFile& expected,
                         std::string_view save_id, int descriptor, core::BlockLedger* ledger) {
  const SaveId expected_id = expected.save_id ? *expected.save_id : to_save_id(save_id);
  File file = File::open(path, descriptor);
  if (file.num_bytes() != expected.num_bytes) {
    throw_format_error(path, std::min(expected.num_bytes, file.num_bytes()), "the file has ", file.num_bytes(),
                       " bytes, expected ", expected.num_bytes);
  }
  const std::string bytes = read_footer(file, expected.footer_offset, expected.num_bytes);
  Footer footer = parse_footer(bytes, path, expected.footer_offset);
  if (footer.save_id != expected_id) {
    throw_format_error(path, expected.footer_offset, "the file belongs to another save");
  }
  if (digest_of(bytes) != expected.footer_digest) {
    throw_format_error(path, expected.footer_offset, "the footer is not the one that the index names");
  }
  FileChecksums checksums{footer.block_bytes, footer.covered_bytes, std::move(footer.checksums)};
  if (ledger != nullptr) checksums.states = ledger->file(expected.name, checksums.checksums.size());
  return reader.add_file(std::move(file), expected.num_bytes, std::move(checksums));
}

// Whether a file has the size and the footer that an index describes.
bool has_footer(const SavedFile& expected, int descriptor) {
  const File file = File::open(expected.name, descriptor);
  if (file.num_bytes() != expected.num_bytes) return false;
  try {
    return digest_of(read_footer(file, expected.footer_offset, expected.num_bytes)) == expected.footer_digest;
  } catch (const FormatError&) {
    return false;
  }
}

// What an index would say of a file but for its records.
std::optional<SavedFile> find_footer_py(const std::string& path, std::string name, int descriptor) {
  const std::optional<FoundFooter> found = find_footer(File::open(path, descriptor));
  if (!found) return std::nullopt;
  SavedFile file;
  file.name = std::move(name);
  file.rank = found->footer.rank;
  file.num_bytes = found->num_bytes;
  file.footer_offset = found->footer.covered_bytes;
  file.footer_digest = found->digest;
  file.save_id = found->footer.save_id;
  return file;
}

int64_t add_box(RunReader& reader, int64_t file, const PlainTensor& stored, const Sizes& offsets, const Sizes& sizes,
                uintptr_t address, const Sizes& strides, const std::string& dtype) {
  const size_t num_dims = sizes.size();
  TTE_CHECK(offsets.size() == num_dims && strides.size() == num_dims, "add_box", "got ", offsets.size(), " offsets, ",
            num_dims, " sizes and ", strides.size(), " strides");
  const bool is_cast = !dtype.empty() && dtype != stored.dtype;
  const Cast* const cast = is_cast ? find_cast(stored.dtype, dtype) : nullptr;
  TTE_CHECK(!is_cast || cast != nullptr, "add_box", "got memory of ", dtype, " for elements of ", stored.dtype,
            ", which is no cast that the reader has");
  return reader.add_box(file, {stored.data_offset, stored.item_bytes, stored.sizes, stored.strides, offsets, sizes,
                               address, strides, cast});
}

Verify verify_of(const std::string& verify) {
  static const std::map<std::string, Verify> kModes = {
      {"none", Verify::kNone}, {"mostly", Verify::kMostly}, {"once", Verify::kOnce}, {"all", Verify::kAll}};
  const auto mode = kModes.find(verify);
  TTE_CHECK(mode != kModes.end(), "read", "verify is '", verify, "', expected 'none', 'mostly', 'once' or 'all'");
  return mode->second;
}

void take_py(RunReader& reader, int64_t request, const py::buffer& content) {
  const py::buffer_info info = content.request();
  TTE_CHECK(info.ndim == 1 && info.strides.front() == info.itemsize, "take", "got a buffer that is not contiguous");
  const std::span bytes(static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize));
  const py::gil_scoped_release release;
  reader.take(request, bytes);
}

// What each rank verifies, given the ledgers of all ranks.
std::vector<std::vector<core::BlockRange>> deal_blocks_py(const std::vector<py::bytes>& messages) {
  return core::deal_blocks(std::vector<std::string_view>(messages.begin(), messages.end()));
}

void define_ledger(py::module_& module) {
  using core::BlockLedger;
  using core::BlockRange;
  py::class_<BlockRange>(module, "BlockRange")
      .def_readonly("file", &BlockRange::file)
      .def_readonly("first", &BlockRange::first)
      .def_readonly("last", &BlockRange::last)
      .def(py::pickle([](const BlockRange& self) { return py::make_tuple(self.file, self.first, self.last); },
                      [](const py::tuple& state) {
                        return BlockRange{state[0].cast<std::string>(), state[1].cast<int64_t>(),
                                          state[2].cast<int64_t>()};
                      }));
  py::class_<BlockLedger>(module, "BlockLedger")
      .def(py::init<>())
      .def("unverified", &BlockLedger::unverified)
      .def("take_part", &BlockLedger::take_part)
      // What this process has read, another one has not.
      .def(py::pickle([](const BlockLedger&) { return py::tuple(); },
                      [](const py::tuple&) { return std::make_unique<BlockLedger>(); }))
      .def("message", [](const BlockLedger& self, std::string_view copy) { return py::bytes(self.message(copy)); });
  module.def("deal_blocks", &deal_blocks_py);
}

void write_box(RunWriter& writer, int64_t file, int64_t item_bytes, const Sizes& sizes, uintptr_t address,
               const Sizes& strides, int64_t offset_bytes, const Sizes& file_strides) {
  TTE_CHECK(strides.size() == sizes.size() && file_strides.size() == sizes.size(), "add_box", "got ", sizes.size(),
            " sizes, ", strides.size(), " strides and ", file_strides.size(), " strides of the file");
  writer.add_box(file, {sizes, item_bytes, address, strides, offset_bytes, file_strides});
}

void define_run_writer(py::module_& module) {
  using Packed = RunWriter::Packed;
  py::class_<Packed>(module, "PackedRuns")
      .def_readonly("counts", &Packed::counts)
      .def_property_readonly("runs",
                             [](const py::object& self) {
                               const auto& runs = self.cast<const Packed&>().runs;
                               return view_of(runs.data(), runs.size(), self);
                             })
      .def_property_readonly("data", [](const py::object& self) {
        const std::string& data = self.cast<const Packed&>().data;
        return view_of(reinterpret_cast<const uint8_t*>(data.data()), data.size(), self);
      });
  py::class_<RunWriter>(module, "RunWriter")
      .def(py::init<>())
      .def(
          "add_file",
          [](RunWriter& self, std::string path, int64_t num_bytes, bool is_written) {
            std::optional<File> file;
            if (is_written) file.emplace(File::open_for_writing(path));
            return self.add_file(std::move(file), std::move(path), num_bytes);
          },
          py::arg("path"), py::arg("num_bytes"), py::arg("is_written") = true)
      .def("add_box", &write_box)
      .def(
          "pack",
          [](RunWriter& self, const std::vector<int64_t>& rank_of_file, int64_t num_ranks) {
            return self.pack(rank_of_file, num_ranks);
          },
          Unlocked(), py::arg("rank_of_file"), py::arg("num_ranks"))
      .def("add_packed",
           [](RunWriter& self, uintptr_t runs, int64_t num_runs, uintptr_t data, int64_t num_bytes) {
             self.add_packed(std::span(reinterpret_cast<const int64_t*>(runs), static_cast<size_t>(3 * num_runs)), data,
                             num_bytes);
           })
      .def_property_readonly("queued_bytes", &RunWriter::queued_bytes)
      .def("write", &RunWriter::write, Unlocked(), py::arg("num_threads"), py::arg("starts_write_back"))
      .def("finish", &RunWriter::finish, Unlocked(), py::arg("num_threads"), py::arg("sync"));
}

void define_reader(py::module_& module) {
  py::class_<DamagedBlock>(module, "DamagedBlock")
      .def_readonly("file", &DamagedBlock::file)
      .def_readonly("begin", &DamagedBlock::begin)
      .def_readonly("end", &DamagedBlock::end);
  py::class_<RunReader>(module, "RunReader")
      .def(py::init<>())
      .def(
          "add_file",
          [](RunReader& self, std::string path, int64_t num_bytes, int descriptor) {
            return self.add_file(File::open(std::move(path), descriptor), num_bytes, {});
          },
          py::arg("path"), py::arg("num_bytes"), py::arg("descriptor") = -1)
      .def("add_checked_file", &add_checked_file, py::arg("path"), py::arg("file"), py::arg("save_id"),
           py::arg("descriptor") = -1, py::arg("ledger") = nullptr)
      .def("add_box", &add_box, py::arg("file"), py::arg("stored"), py::arg("offsets"), py::arg("sizes"),
           py::arg("address"), py::arg("strides"), py::arg("dtype") = "")
      .def("add_blocks", &RunReader::add_blocks)
      .def("touch", &RunReader::touch)
      .def("add_bytes", &RunReader::add_bytes)
      .def("check_bytes", &RunReader::check_bytes, py::arg("file"), py::arg("offset"), py::arg("num_bytes"))
      .def(
          "read",
          [](RunReader& self, int num_threads, const std::string& verify) {
            return self.read(num_threads, verify_of(verify));
          },
          Unlocked())
      .def("requests",
           [](RunReader& self, const std::string& verify, int64_t max_gap, int64_t max_bytes) {
             std::vector<std::tuple<int64_t, int64_t, int64_t>> requests;
             for (const auto& [file, begin, end] : self.requests(verify_of(verify), max_gap, max_bytes)) {
               requests.emplace_back(file, begin, end);
             }
             return requests;
           })
      .def("take", &take_py)
      .def("finish", &RunReader::finish, Unlocked())
      .def("lost", [](const RunReader& self) {
        return std::vector<std::pair<int64_t, double>>(self.lost().begin(), self.lost().end());
      });
  module.def(
      "has_cast",
      [](const std::string& stored_dtype, const std::string& dtype) {
        return find_cast(stored_dtype, dtype) != nullptr;
      },
      py::arg("stored_dtype"), py::arg("dtype"));
}

// What reads a record for find_tensor: its first and last bytes by one call each, which is all that a tensor needs.
class RecordFile {
 public:
  RecordFile(const File& file, int64_t offset, int64_t num_bytes) : file_(file), offset_(offset), size_(num_bytes) {
    fill(head_, 0, std::min<int64_t>(num_bytes, 2048));
    fill(tail_, num_bytes - std::min<int64_t>(num_bytes, 1024), std::min<int64_t>(num_bytes, 1024));
  }
  std::string_view operator()(int64_t offset, int64_t num_bytes) {
    const int64_t tail_begin = size_ - static_cast<int64_t>(tail_.size());
    if (offset + num_bytes <= static_cast<int64_t>(head_.size())) return view(head_, offset, num_bytes);
    if (offset >= tail_begin) return view(tail_, offset - tail_begin, num_bytes);
    fill(other_, offset, num_bytes);
    return other_;
  }

 private:
  static std::string_view view(const std::string& bytes, int64_t offset, int64_t num_bytes) {
    return std::string_view(bytes).substr(static_cast<size_t>(offset), static_cast<size_t>(num_bytes));
  }
  void fill(std::string& bytes, int64_t offset, int64_t num_bytes) const {
    bytes.resize(static_cast<size_t>(num_bytes));
    iovec piece{bytes.data(), bytes.size()};
    file_.read_at({&piece, 1}, offset_ + offset);
  }

  const File& file_;
  int64_t offset_;
  int64_t size_;
  std::string head_, tail_, other_;
};

// The tensors in some records of a file.
std::vector<std::optional<PlainTensor>> find_tensors(const std::string& path,
                                                     const std::vector<std::tuple<int64_t, int64_t>>& places,
                                                     int num_threads, int descriptor) {
  std::vector<std::optional<StoredTensor>> found(places.size());
  const File file = File::open(path, descriptor);
  const int64_t file_bytes = file.num_bytes();
  parallel_for_items(num_threads, static_cast<int64_t>(places.size()), [&](int, int64_t item) {
    const auto [offset, num_bytes] = places[static_cast<size_t>(item)];
    if (offset < 0 || num_bytes < 0 || offset > file_bytes || num_bytes > file_bytes - offset) {
      throw_format_error(path, offset, "the file has ", file_bytes, " bytes, expected ", num_bytes, " from here on");
    }
    RecordFile record(file, offset, num_bytes);
    std::optional<StoredTensor>& tensor = found[static_cast<size_t>(item)];
    tensor = find_tensor([&](int64_t from, int64_t count) { return record(from, count); }, num_bytes,
                         core::concat(path, ", record at byte ", offset));
    if (tensor) tensor->data_offset += offset;
  });
  std::vector<std::optional<PlainTensor>> tensors(places.size());
  for (size_t item = 0; item < places.size(); ++item) {
    if (!found[item]) continue;
    tensors[item] = plain_tensor(*found[item], core::concat(path, ": record at byte ", std::get<0>(places[item])));
  }
  return tensors;
}

// The storages of a pickle of torch.save by their names in the archive, and how many bytes it needs of each. The item sizes of
// dtypes that are no plain memory, such as quantised ones, are not known: 0.
std::vector<std::pair<std::string, int64_t>> find_storages(const std::string& data) {
  std::vector<std::pair<std::string, int64_t>> needed;
  std::unordered_map<std::string, size_t> position;
  for (const core::PickledTensor& tensor : core::find_pickled_tensors(data)) {
    const auto [at, is_new] = position.try_emplace(tensor.storage, needed.size());
    if (is_new) needed.emplace_back(tensor.storage, 0);
    int64_t& num_bytes = needed[at->second].second;
    const ElementType* const type = find_element_type(dtype_of(tensor.storage_class, tensor.dtype));
    if (type != nullptr) num_bytes = std::max(num_bytes, capped_mul(type->item_bytes, tensor.num_elements));
  }
  return needed;
}

void define_tensors(py::module_& module) {
  py::class_<PlainTensor>(module, "StoredTensor")
      .def(py::init(&make_tensor), py::arg("dtype"), py::arg("sizes"), py::arg("strides"), py::arg("data_offset"))
      .def_readonly("dtype", &PlainTensor::dtype)
      .def_property_readonly("sizes", [](const PlainTensor& self) { return to_tuple(self.sizes); })
      .def_property_readonly("strides", [](const PlainTensor& self) { return to_tuple(self.strides); })
      .def("shape_defect", &shape_defect, py::arg("dtype"), py::arg("sizes"))
      .def_readonly("data_offset", &PlainTensor::data_offset)
      .def_readonly("item_bytes", &PlainTensor::item_bytes);
  module.def("shortest", &shortest, py::arg("value"), py::arg("dtype"));
  module.def("number_of", &number_of, py::arg("element"), py::arg("dtype"));
  module.def("elements_needed", [](const Sizes& sizes, const Sizes& strides, int64_t storage_offset) {
    return elements_needed(sizes, strides, storage_offset);
  });
  module.def("find_tensors", &find_tensors, py::arg("path"), py::arg("places"), py::arg("num_threads"),
             py::arg("descriptor") = -1, Unlocked());
}

}  // namespace

void define_storage(py::module_& module) {
  py::register_exception<FormatError>(module, "FormatError", PyExc_ValueError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {
      // A path need not be UTF-8: it is read as Python reads file names.
      const auto text = py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefault(error.what()));
      const auto path = py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefault(error.path().c_str()));
      const py::tuple args = py::make_tuple(error.code(), text, path);
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });
  define_index(module);
  define_writer(module);
  define_ledger(module);
  define_reader(module);
  define_run_writer(module);
  define_tensors(module);
  module.def("frame_tensor", [](const ElementType& type, const Sizes& sizes, int64_t record_offset, int64_t alignment) {
    const RecordFrame frame = frame_tensor(type, sizes, record_offset, alignment);
    return py::make_tuple(py::bytes(frame.head), py::bytes(frame.tail));
  });
  module.def("digest", [](const py::buffer& bytes) {
    const py::buffer_info memory = bytes.request();
    TTE_CHECK(PyBuffer_IsContiguous(memory.view(), 'C'), "digest", "got memory with gaps, expected one piece");
    const py::gil_scoped_release release;
    return digest_of({static_cast<const char*>(memory.ptr), static_cast<size_t>(memory.size * memory.itemsize)});
  });
  module.def("encode_index", &encode_index_py, py::arg("save_id"), py::arg("metadata_bytes"),
             py::arg("metadata_digest"), py::arg("notes"), py::arg("files"), py::arg("has_sums") = false);
  module.def("find_storages", &find_storages, py::arg("data"), Unlocked());
  module.def(
      "check_pickle_keys",
      [](const py::buffer& data, int num_pickles) {
        const py::buffer_info bytes = data.request();
        const std::string_view view(static_cast<const char*>(bytes.ptr), static_cast<size_t>(bytes.size));
        py::gil_scoped_release release;
        core::check_pickle_keys(view, num_pickles);
      },
      py::arg("data"), py::arg("num_pickles"));
  module.def(
      "parse_index",
      [](std::string_view bytes, const std::string& where) {
        std::optional<py::gil_scoped_release> unlocked(std::in_place);
        Index index = parse_index(bytes, where);
        unlocked.reset();
        return ReadIndex(std::move(index));
      },
      py::arg("bytes"), py::arg("where"));
  module.def(
      "parse_index_head",
      [](std::string_view bytes, const std::string& where) { return ReadIndex(parse_index_head(bytes, where)); },
      py::arg("bytes"), py::arg("where"));
  module.def("parse_records", &records_of, py::arg("file"));
  module.def("find_footer", &find_footer_py, py::arg("path"), py::arg("name"), py::arg("descriptor"));
  module.def("has_footer", &has_footer, py::arg("file"), py::arg("descriptor"));
  module.def("exchange_paths", &exchange_paths, Unlocked());
  module.def("is_on_fuse", &is_on_fuse, Unlocked());
  module.def("is_on_network", &is_on_network, Unlocked());
}

}  // namespace torchtitan_ext::bindings
