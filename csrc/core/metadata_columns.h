// What a checkpoint's metadata says, as columns: numbers instead of an object for each of a million parts.
//
// Names and lists of sizes are kept once and known by their numbers. Adding keys, chunk lists and parts follows Python's
// dict: the last of equal ones counts, in the place of the first.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torchtitan_ext::core {

// Whether a file's path, relative to its checkpoint, is none: empty, absolute, with a ".." or a zero byte in it.
bool leads_outside(std::string_view path);

// Whether UTF-8, as pickle writes it, has no halves of surrogate pairs, which Python's texts may have.
bool is_text(std::string_view utf8);

// Whether there can be a tensor of these sizes, or an element at these offsets: as many bytes as an int64 counts.
bool can_be_sizes(std::span<const int64_t> sizes);

// Names that a dtype ("float32") or a layout ("torch.strided") of any torch may have.
bool is_dtype_name(std::string_view name);
bool is_layout_name(std::string_view name);

// More dims than any tensor has: a small file that repeats a list must not become large.
constexpr size_t kMaxDims = 64;
constexpr int64_t kNumMemoryFormats = 3;

// Numbers of things that are kept elsewhere, found by their hashes.
class HashedNumbers {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // The number among those of this hash for which `is_it` says so; kNone where there is none.
  template <typename IsIt>
  uint32_t find(uint64_t hash, const IsIt& is_it) const {
    if (slots_.empty()) return kNone;
    for (size_t at = place(hash);; at = (at + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[at];
      if (slot.number == kNone) return kNone;
      if (slot.hash == static_cast<uint32_t>(hash) && is_it(slot.number)) return slot.number;
    }
  }
  void add(uint64_t hash, uint32_t number);
  void reserve(size_t count);
  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[place(hash)]); }

 private:
  struct Slot {
    uint32_t hash = 0;
    uint32_t number = kNone;
  };
  size_t place(uint64_t hash) const { return static_cast<uint32_t>(hash) & (slots_.size() - 1); }

  std::vector<Slot> slots_;  // a power of two of them, at most half of them taken
  size_t num_taken_ = 0;
};

// With a secret of the process, as the hashes of all that a file chooses.
struct NameHash {
  size_t operator()(std::string_view name) const;
};

class NameTable {
 public:
  NameTable() = default;
  NameTable(NameTable&&) = default;  // a copy's views would be into the other's names
  NameTable& operator=(NameTable&&) = default;

  uint32_t add(std::string_view name);
  std::optional<uint32_t> find(std::string_view name) const;
  const std::string& operator[](uint32_t number) const { return names_[number]; }
  size_t size() const { return names_.size(); }

 private:
  std::deque<std::string> names_;
  std::unordered_map<std::string_view, uint32_t, NameHash> number_of_;
  uint32_t last_ = 0;  // was asked for
};

// Lists of offsets or sizes.
class SizesTable {
 public:
  uint32_t add(std::span<const int64_t> sizes);
  uint32_t find(std::span<const int64_t> sizes) const;  // HashedNumbers::kNone where it is unknown
  std::span<const int64_t> operator[](uint32_t number) const {
    return std::span(numbers_).subspan(begins_[number], begins_[number + 1] - begins_[number]);
  }
  size_t size() const { return begins_.size() - 1; }

 private:
  std::vector<int64_t> numbers_;
  std::vector<size_t> begins_{0};
  HashedNumbers known_;
};

// One key of the state dict. All but the flags and `chunk_list` are numbers in the tables.
struct SavedKey {
  static constexpr uint32_t kNoStrides = HashedNumbers::kNone;

  uint32_t fqn = 0;
  bool is_tensor = false;
  // Of a tensor.
  uint32_t sizes = 0;
  uint32_t dtype = 0;   // "float32"
  uint32_t layout = 0;  // "torch.strided"
  int64_t memory_format = 0;
  bool requires_grad = false;
  bool pin_memory = false;
  uint32_t chunk_list = 0;
  uint32_t strides = kNoStrides;  // since torch 2.15, of the tensor that some rank held; read and never written
};

struct SavedChunk {
  uint32_t offsets = 0;
  uint32_t sizes = 0;
  bool operator==(const SavedChunk&) const = default;
};

// Where storage put one part of a key.
struct SavedPart {
  static constexpr uint32_t kNone = HashedNumbers::kNone;
  static constexpr int64_t kNoIndex = std::numeric_limits<int64_t>::min();

  uint32_t fqn = 0;
  uint32_t offsets = kNone;  // none of a value that is no tensor
  uint32_t path = 0;         // of the file, relative to the checkpoint
  uint32_t transforms = kNone;
  int64_t index = kNoIndex;  // of the chunk in its list, a hint
  int64_t offset_bytes = 0;
  int64_t length_bytes = 0;
};

class MetadataColumns {
 public:
  NameTable names;
  SizesTable sizes;
  SizesTable strides;

  void add_key(const SavedKey& key);
  // The same keys and chunk lists, without parts, and without strides, which are never written.
  MetadataColumns keys_only() const;
  // The number of a list of chunks; equal lists are one.
  uint32_t add_chunk_list(const std::vector<SavedChunk>& chunks);
  uint32_t add_transforms(const std::vector<uint32_t>& names);
  void reserve_parts(size_t count) { parts_.reserve(count); }
  // Before parts are looked at, all that were added must be indexed.
  void add_part(const SavedPart& part) { parts_.push_back(part); }
  void index_parts();

  const std::vector<SavedKey>& keys() const { return keys_; }
  const std::deque<std::vector<SavedChunk>>& chunk_lists() const { return chunk_lists_; }
  const std::vector<std::vector<uint32_t>>& transforms() const { return transforms_; }
  const std::vector<SavedPart>& parts() const { return parts_; }

  // Positions in keys() and parts(); HashedNumbers::kNone where there is none.
  uint32_t find_key(std::string_view fqn) const;
  uint32_t find_part(std::string_view fqn, const std::optional<std::vector<int64_t>>& offsets) const;
  uint32_t find_part(uint32_t fqn, uint32_t offsets) const;  // both by their numbers in the tables

 private:
  std::vector<SavedKey> keys_;
  std::deque<std::vector<SavedChunk>> chunk_lists_;
  std::vector<std::vector<uint32_t>> transforms_;
  std::vector<SavedPart> parts_;
  size_t num_indexed_ = 0;
  std::unordered_map<uint32_t, uint32_t> key_of_name_;
  HashedNumbers known_lists_, known_parts_;
};

}  // namespace torchtitan_ext::core
