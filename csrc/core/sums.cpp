#include "core/sums.h"

#include <algorithm>

#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

using Part = SumTable::Part;

// What these parts of a replica are together: one, or one per rank where ranks hold the same boxes.
void add_up(const std::vector<const Part*>& members, std::vector<Part>& wholes) {
  std::map<SumTable::Box, uint64_t> first;
  uint64_t whole = 0;
  bool are_boxes = true;
  for (const Part* const part : members) {
    for (const auto& [box, sum] : part->sums) {
      are_boxes &= box.has_value();
      if (!box || first.emplace(box, sum).second) whole += sum;
    }
  }
  for (const Part* const part : members) {
    uint64_t total = whole;
    if (are_boxes) {
      for (const auto& [box, sum] : part->sums) total += sum - first.at(box);
    }
    wholes.push_back({members[0]->dtype, members[0]->shape, part->replica, {{std::nullopt, total}}});
    if (!are_boxes) return;
  }
}

}  // namespace

void SumTable::add_key(const std::string& key, Part part) {
  const auto [found, is_new] = number_of_.try_emplace(key, keys_.size());
  if (is_new) {
    keys_.push_back(key);
    parts_.emplace_back();
  }
  parts_[found->second].push_back(std::move(part));
}

SumTable SumTable::merge(const std::vector<const SumTable*>& of_ranks) {
  SumTable merged;
  for (const SumTable* const table : of_ranks) {
    for (size_t key = 0; key < table->keys_.size(); ++key) {
      for (const Part& part : table->parts_[key]) merged.add_key(table->keys_[key], part);
    }
  }
  return merged;
}

std::vector<Part> SumTable::replicas(const std::string& key) const {
  std::vector<std::vector<const Part*>> members;
  std::unordered_map<std::string_view, size_t> number_of;
  for (const Part& part : parts_[number_of_.at(key)]) {
    size_t number = members.size();
    if (!part.replica.empty()) number = number_of.try_emplace(part.replica, number).first->second;
    if (number == members.size()) members.emplace_back();
    members[number].push_back(&part);
  }
  std::vector<Part> wholes;
  for (const std::vector<const Part*>& of_replica : members) add_up(of_replica, wholes);
  return wholes;
}

std::vector<std::string> SumTable::differing(const std::unordered_map<std::string, uint64_t>& expected) const {
  std::vector<std::string> found;
  for (const std::string& key : keys_) {
    const auto wanted = expected.find(key);
    if (wanted == expected.end()) continue;
    const std::vector<Part> held = replicas(key);
    const auto differs = [&](const Part& whole) { return whole.sums.at(std::nullopt) != wanted->second; };
    if (std::any_of(held.begin(), held.end(), differs)) found.push_back(key);
  }
  return found;
}

std::string SumTable::encode() const {
  WireWriter out;
  for (const std::string& key : keys_) {
    const Part& of_key = part(key);
    out.put_string(key);
    out.put_string(of_key.dtype);
    out.put_sizes(of_key.shape);
    out.put_string(of_key.replica);
    out.put(of_key.sums.size());
    for (const auto& [box, sum] : of_key.sums) {
      out.put(box.has_value());
      if (box) out.put_sizes(box->first);
      if (box) out.put_sizes(box->second);
      out.put(sum);
    }
  }
  return out.take();
}

SumTable SumTable::decode(std::string_view bytes) {
  WireReader in(bytes, "sums");
  SumTable table;
  while (in.num_left() > 0) {
    const std::string key(in.get_string("key"));
    Part part{std::string(in.get_string("dtype")), in.get_sizes("shape"), std::string(in.get_string("replica")), {}};
    for (size_t left = in.get_count("sums", 2); left > 0; --left) {
      Box box;
      if (in.get_index("box", 2) == 1) box = {in.get_sizes("offsets"), in.get_sizes("sizes")};
      part.sums[box] = in.get("sum");
    }
    table.add_key(key, std::move(part));
  }
  return table;
}

}  // namespace torchtitan_ext::core
