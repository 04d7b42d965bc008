// Plain values (None, numbers, texts, and tuples, lists and dicts of them) between Python and the files of a checkpoint.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "core/pickle_graph.h"
#include "core/pickle_writer.h"
#include "storage/bytes.h"

namespace torchtitan_ext::bindings {

// A value is none of the plain ones, or nested too deeply.
class NotPlain : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Takes a value apart. Containers that are one object stay one. Throws NotPlain.
void write_plain(const pybind11::handle& value, core::PickleWriter& out);

// A value of a pickle; None where it is absent. Throws std::invalid_argument where it is not plain, is nested too deeply
// or contains itself. Values that were one object in the stream are one object again, so that a small file cannot
// become a large value. A path comes out as the tuple of its parts.
pybind11::object plain_of_pickle(const core::PickleGraph& graph, core::PickleGraph::Id value);

// A value of the tables of an index: a kind (u8), then
//     bool u8 | int i64 | float u64 | text, bytes: u32 length, the bytes | same: u32 number
//     tuple, list, dict: whether it is shared u8, number of members u64, members (of a dict keys and values in turn)
// Shared containers are numbered in the order in which they end; `same` stands for one of them. Throws
// storage::FormatError.
pybind11::object plain_of_bytes(storage::ByteReader& reader);

}  // namespace torchtitan_ext::bindings
