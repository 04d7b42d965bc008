// Plain values (None, numbers, texts, and tuples, lists and dicts of them) between Python and the files of a checkpoint.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "core/pickle_graph.h"
#include "core/plain_sink.h"
#include "storage/bytes.h"

namespace torchtitan_ext::bindings {

// A value is none of the plain ones, or nested too deeply.
class NotPlain : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Takes a value apart. Containers that are one object stay one. Throws NotPlain.
void write_plain(const pybind11::handle& value, core::PlainSink& sink);

// A value of a pickle; None where it is absent. Throws std::invalid_argument where it is not plain, is nested too deeply
// or contains itself. Values that were one object in the stream are one object again, so that a small file cannot
// become a large value. A path comes out as the tuple of its parts.
pybind11::object plain_of_pickle(const core::PickleGraph& graph, core::PickleGraph::Id value);

// A value as storage::PlainEncoder writes it. Throws storage::FormatError.
pybind11::object plain_of_bytes(storage::ByteReader& reader);

}  // namespace torchtitan_ext::bindings
