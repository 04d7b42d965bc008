// Looks through a pickle of `torch.save` without making a Python object: can it be read in time, and which storages
// do its tensors need?
//
// A key of tuples in tuples, each of which holds the one before twice, is a few bytes of a pickle and takes for ever to
// hash. So hashing is counted instead: a tuple costs one more than its members together, anything else costs one. What a
// call is given is counted too: many calls may have the same arguments.
//
// `PickleGraph` reads the few operations that metadata needs and refuses all others; these pickles are other people's, of
// any protocol, so this machine follows every operation that `pickle` knows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torchtitan_ext::core {

// Reads up to `num_pickles` pickles that stand behind each other; other bytes may follow them.
//
// Throws std::invalid_argument if keys of dicts, members of sets, or members of lists that are arguments of a call take
// too long to hash, or calls have arguments that take too long to read. Reading stops without an error at what else is wrong with a pickle: unpickling it reports that.
void check_pickle_keys(std::string_view data, int num_pickles);

// A storage, or a tensor in it, of a pickle of `torch.save`.
struct PickledTensor {
  std::string storage;        // its name in the archive
  std::string storage_class;  // such as "FloatStorage"
  std::string dtype;          // of what lies in an untyped storage, such as "float32"; empty where none is named
  int64_t num_elements;       // as many as the storage has, or as the tensor needs of it
};

// All storages and tensors of a pickle. Throws std::invalid_argument if its keys take too long to hash, if it is damaged,
// or if it names storages otherwise than `torch.save` does.
std::vector<PickledTensor> find_pickled_tensors(std::string_view data);

}  // namespace torchtitan_ext::core
