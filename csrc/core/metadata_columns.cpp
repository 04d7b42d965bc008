#include "core/metadata_columns.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <random>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

constexpr size_t kFewestSlots = 16;
constexpr size_t kMostNumbers = size_t{1} << 31;  // slots are found by 32 bits of a hash

constexpr std::array<std::string_view, 46> kDtypes = {"bool",
                                                      "uint8",
                                                      "int8",
                                                      "int16",
                                                      "int32",
                                                      "int64",
                                                      "uint16",
                                                      "uint32",
                                                      "uint64",
                                                      "float16",
                                                      "bfloat16",
                                                      "float32",
                                                      "float64",
                                                      "complex32",
                                                      "complex64",
                                                      "complex128",
                                                      "float8_e4m3fn",
                                                      "float8_e5m2",
                                                      "float8_e4m3fnuz",
                                                      "float8_e5m2fnuz",
                                                      "float8_e8m0fnu",
                                                      "float4_e2m1fn_x2",
                                                      "quint8",
                                                      "qint8",
                                                      "qint32",
                                                      "quint4x2",
                                                      "quint2x4",
                                                      "bits8",
                                                      "bits16",
                                                      "bits1x8",
                                                      "bits2x4",
                                                      "bits4x2",
                                                      "int1",
                                                      "int2",
                                                      "int3",
                                                      "int4",
                                                      "int5",
                                                      "int6",
                                                      "int7",
                                                      "uint1",
                                                      "uint2",
                                                      "uint3",
                                                      "uint4",
                                                      "uint5",
                                                      "uint6",
                                                      "uint7"};

constexpr std::array<std::string_view, 8> kLayouts = {"torch.strided",    "torch.sparse_coo", "torch.sparse_csr",
                                                      "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc",
                                                      "torch._mkldnn",    "torch.jagged"};

// Whoever writes a file chooses what is hashed. With secrets that are drawn once in a process nobody can choose the
// hashes too, for example all the same, of which each look-up would pass by all the others.
struct Secrets {
  uint64_t mask = drawn(), factor = drawn() | 1;

  static uint64_t drawn() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }
};

__extension__ using Product = unsigned __int128;

// Both halves of the product of two words, of which every bit depends on every bit of the value.
uint64_t mixed(uint64_t value) {
  static const Secrets secrets;
  const Product product = static_cast<Product>(value ^ secrets.mask) * secrets.factor;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash_of(std::span<const int64_t> numbers) {
  uint64_t hash = numbers.size();
  for (const int64_t number : numbers) hash = mixed(hash ^ static_cast<uint64_t>(number));
  return hash;
}

uint64_t hash_of(const std::vector<SavedChunk>& chunks) {
  uint64_t hash = chunks.size();
  for (const SavedChunk& chunk : chunks) hash = mixed(hash ^ (uint64_t{chunk.offsets} << 32 | chunk.sizes));
  return hash;
}

uint64_t hash_of_part(uint32_t fqn, uint32_t offsets) { return mixed(uint64_t{fqn} << 32 | offsets); }

}  // namespace

size_t NameHash::operator()(std::string_view name) const {
  uint64_t hash = name.size(), word = 0;
  for (; name.size() >= sizeof(word); name.remove_prefix(sizeof(word))) {
    std::memcpy(&word, name.data(), sizeof(word));
    hash = mixed(hash ^ word);
  }
  word = 0;
  if (!name.empty()) std::memcpy(&word, name.data(), name.size());
  return mixed(hash ^ word);
}

bool leads_outside(std::string_view path) {
  if (path.empty() || path.front() == '/' || path.find('\0') != std::string_view::npos) return true;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (path.substr(begin, end - begin) == "..") return true;
    begin = end + 1;
  }
  return false;
}

bool is_text(std::string_view utf8) {
  for (size_t at = utf8.find('\xed'); at != std::string_view::npos; at = utf8.find('\xed', at + 1)) {
    if (at + 1 < utf8.size() && static_cast<uint8_t>(utf8[at + 1]) >= 0xa0) return false;
  }
  return true;
}

bool can_be_sizes(std::span<const int64_t> sizes) {
  constexpr int64_t kMostItemBytes = 16;  // of complex128
  int64_t num_bytes = kMostItemBytes;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(num_bytes, std::max<int64_t>(size, 1), &num_bytes)) return false;
  }
  return true;
}

bool is_dtype_name(std::string_view name) { return std::ranges::find(kDtypes, name) != kDtypes.end(); }

bool is_layout_name(std::string_view name) { return std::ranges::find(kLayouts, name) != kLayouts.end(); }

void HashedNumbers::reserve(size_t count) {
  if (2 * count <= slots_.size()) return;
  TTE_CHECK(count <= kMostNumbers / 2, "metadata", "has more than ", kMostNumbers / 2, " parts");
  const std::vector<Slot> old = std::move(slots_);
  slots_.assign(std::max(kFewestSlots, std::bit_ceil(2 * count)), {});
  num_taken_ = 0;
  for (const Slot& slot : old) {
    if (slot.number != kNone) add(slot.hash, slot.number);
  }
}

void HashedNumbers::add(uint64_t hash, uint32_t number) {
  reserve(num_taken_ + 1);
  size_t at = place(hash);
  while (slots_[at].number != kNone) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = {static_cast<uint32_t>(hash), number};
  ++num_taken_;
}

uint32_t NameTable::add(std::string_view name) {
  // Files repeat their names in the same order.
  if (const auto next = size_t{last_} + 1; next < names_.size() && names_[next] == name) return ++last_;
  if (const auto known = number_of_.find(name); known != number_of_.end()) return last_ = known->second;
  const auto number = static_cast<uint32_t>(names_.size());
  number_of_.emplace(names_.emplace_back(name), number);
  return last_ = number;
}

std::optional<uint32_t> NameTable::find(std::string_view name) const {
  const auto known = number_of_.find(name);
  return known == number_of_.end() ? std::nullopt : std::optional(known->second);
}

uint32_t SizesTable::find(std::span<const int64_t> sizes) const {
  return known_.find(hash_of(sizes), [&](uint32_t number) { return std::ranges::equal((*this)[number], sizes); });
}

uint32_t SizesTable::add(std::span<const int64_t> sizes) {
  if (const uint32_t known = find(sizes); known != HashedNumbers::kNone) return known;
  const auto number = static_cast<uint32_t>(size());
  numbers_.insert(numbers_.end(), sizes.begin(), sizes.end());
  begins_.push_back(numbers_.size());
  known_.add(hash_of(sizes), number);
  return number;
}

void MetadataColumns::add_key(const SavedKey& key) {
  const auto [known, is_new] = key_of_name_.try_emplace(key.fqn, static_cast<uint32_t>(keys_.size()));
  if (is_new) {
    keys_.push_back(key);
  } else {
    keys_[known->second] = key;
  }
}

MetadataColumns MetadataColumns::keys_only() const {
  MetadataColumns copy;
  std::vector<uint32_t> lists;
  for (const std::vector<SavedChunk>& list : chunk_lists_) {
    std::vector<SavedChunk> chunks;
    for (const auto& [offsets, of_chunk] : list)
      chunks.push_back({copy.sizes.add(sizes[offsets]), copy.sizes.add(sizes[of_chunk])});
    lists.push_back(copy.add_chunk_list(chunks));
  }
  for (SavedKey key : keys_) {
    key.fqn = copy.names.add(names[key.fqn]);
    if (key.is_tensor) {
      key.sizes = copy.sizes.add(sizes[key.sizes]);
      key.dtype = copy.names.add(names[key.dtype]);
      key.layout = copy.names.add(names[key.layout]);
      key.chunk_list = lists[key.chunk_list];
      key.strides = SavedKey::kNoStrides;
    }
    copy.add_key(key);
  }
  return copy;
}

uint32_t MetadataColumns::add_chunk_list(const std::vector<SavedChunk>& chunks) {
  const uint64_t hash = hash_of(chunks);
  const uint32_t known = known_lists_.find(hash, [&](uint32_t number) { return chunk_lists_[number] == chunks; });
  if (known != HashedNumbers::kNone) return known;
  const auto number = static_cast<uint32_t>(chunk_lists_.size());
  chunk_lists_.push_back(chunks);
  known_lists_.add(hash, number);
  return number;
}

uint32_t MetadataColumns::add_transforms(const std::vector<uint32_t>& names) {
  transforms_.push_back(names);
  return static_cast<uint32_t>(transforms_.size() - 1);
}

void MetadataColumns::index_parts() {
  // Slots lie all over the memory: their lines are fetched while others are looked at.
  constexpr size_t kAhead = 16;
  known_parts_.reserve(parts_.size());
  size_t num_kept = num_indexed_;
  for (size_t at = num_indexed_; at < parts_.size(); ++at) {
    if (at + kAhead < parts_.size()) {
      known_parts_.prefetch(hash_of_part(parts_[at + kAhead].fqn, parts_[at + kAhead].offsets));
    }
    const SavedPart part = parts_[at];
    const uint32_t known = find_part(part.fqn, part.offsets);
    if (known != HashedNumbers::kNone) {
      parts_[known] = part;
      continue;
    }
    parts_[num_kept] = part;
    known_parts_.add(hash_of_part(part.fqn, part.offsets), static_cast<uint32_t>(num_kept++));
  }
  parts_.resize(num_kept);
  num_indexed_ = num_kept;
}

uint32_t MetadataColumns::find_key(std::string_view fqn) const {
  const auto name = names.find(fqn);
  const auto known = name ? key_of_name_.find(*name) : key_of_name_.end();
  return known == key_of_name_.end() ? HashedNumbers::kNone : known->second;
}

uint32_t MetadataColumns::find_part(std::string_view fqn, const std::optional<std::vector<int64_t>>& offsets) const {
  const auto name = names.find(fqn);
  const uint32_t of_sizes = offsets ? sizes.find(*offsets) : SavedPart::kNone;
  if (!name || (offsets && of_sizes == HashedNumbers::kNone)) return HashedNumbers::kNone;
  return find_part(*name, of_sizes);
}

uint32_t MetadataColumns::find_part(uint32_t fqn, uint32_t offsets) const {
  return known_parts_.find(hash_of_part(fqn, offsets), [&](uint32_t number) {
    return parts_[number].fqn == fqn && parts_[number].offsets == offsets;
  });
}

}  // namespace torchtitan_ext::core
